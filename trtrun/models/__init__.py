"""Configurations of models, plans of their layers, and the decoder. Importing this package registers every family."""

from trtrun.models import dense_families, gemma3, granite, olmo, smollm3

__all__ = ["dense_families", "gemma3", "granite", "olmo", "smollm3"]
