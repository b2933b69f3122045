"""The arithmetic that PyTorch has not, or not fast enough: kernels for the CPU (cpu/) and for CUDA (triton/), and
products in torch's own operations (torch/). It does not know who uses which.
"""
