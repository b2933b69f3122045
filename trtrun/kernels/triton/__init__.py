"""Kernels for CUDA in Triton, which compiles them at first use.

support.py says whether it works; only then may the other modules be imported.
"""
