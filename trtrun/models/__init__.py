"""Model families and their weights. Importing this package registers every family in trtrun.registry."""

from trtrun.models import llama, mistral, qwen2, qwen3

__all__ = ["llama", "mistral", "qwen2", "qwen3"]
