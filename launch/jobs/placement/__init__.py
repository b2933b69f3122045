"""Which rank sits where: devices and allocations become a topology, with the memory and links that each rank needs."""
