"""Batch jobs of any batch system: what a job needs, what its script says, and following it until it ends."""
