"""Configurations of models, plans of their layers, and the decoder. Importing this package registers every family."""

from trtrun.models import llama, mistral, qwen2, qwen3

__all__ = ["llama", "mistral", "qwen2", "qwen3"]
