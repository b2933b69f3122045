"""Attention over paged keys and values, and what writes and copies these."""
