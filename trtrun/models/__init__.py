"""Configurations of models, plans of their layers, and the decoder. Importing this package registers every family."""

from trtrun.models import apertus, dense_families, gemma, glm, granite, mixtures, olmo, olmoe, phi3, smollm3

__all__ = [
    "apertus",
    "dense_families",
    "gemma",
    "glm",
    "granite",
    "mixtures",
    "olmo",
    "olmoe",
    "phi3",
    "smollm3",
]
