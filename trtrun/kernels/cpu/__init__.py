"""Kernels for the CPU, written as LLVM IR and compiled at start-up for the processor that they run on.

README.md says how to read them.
"""
