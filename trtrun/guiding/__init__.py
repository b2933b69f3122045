"""Guided output: from what a request asks its text to be to the tokens that may come next, on the host."""
