"""Configurations of models, plans of their layers, and the decoder. Importing this package registers every family."""

from trtrun.models import families

__all__ = ["families"]
