"""Experts that are held in codes of 8 or 4 bits on CUDA: products grouped by expert."""
