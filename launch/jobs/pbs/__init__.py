"""Batch jobs of PBS: OpenPBS and PBS Professional."""
