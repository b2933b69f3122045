"""Batch jobs of Slurm: their settings and script, and Slurm's programs."""
