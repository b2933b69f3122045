"""What the user types: commands, the device list, mpirun. It calls trtrun and parallel, and neither knows of it."""
