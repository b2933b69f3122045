"""Products of few rounded rows for GPUs of compute capability 9.0: the kernels, and who takes them."""
