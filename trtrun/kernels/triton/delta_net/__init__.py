"""Gated delta nets in Triton."""
