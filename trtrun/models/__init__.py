"""Configurations of models, plans of their layers, and the decoder. Importing this package registers every family."""

from trtrun.models import dense_families, gemma, granite, mixtures, smollm3

__all__ = ["dense_families", "gemma", "granite", "mixtures", "smollm3"]
