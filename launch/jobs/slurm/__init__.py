"""Batch jobs of Slurm: what a job needs, its script, and following it until it ends."""
