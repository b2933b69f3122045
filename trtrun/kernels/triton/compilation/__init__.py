"""Kernels are compiled ahead, in processes of their own, and kept."""
