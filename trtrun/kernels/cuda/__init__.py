"""Kernels in CUDA C++, which CuPy compiles."""
