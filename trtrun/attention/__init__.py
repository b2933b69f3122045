"""Attention over the paged KV store: what a backend is, which one a device gets, and the one that runs anywhere."""
