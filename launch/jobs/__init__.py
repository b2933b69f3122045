"""Jobs of several ranks: devices, mpirun, Slurm, checks and plans."""
