"""Finds the rank that holds a job up while MPI calls hang: marks of what each rank does, and a heartbeat over TCP."""
