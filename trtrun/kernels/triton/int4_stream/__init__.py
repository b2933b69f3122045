"""Products of few rows with weights of 4 bits for GPUs of compute capability 9.0: the kernel, and who takes it."""
