"""Products of few rounded rows for GPUs of compute capability 9.0: the kernel, and who takes it."""
