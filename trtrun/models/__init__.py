"""Model families, kinds of heads, and their weights. Importing this package registers every one of them."""

from trtrun.models import dflash_layouts, eagle3_layouts, eagle_layouts, llama, medusa_layouts, mistral, qwen2, qwen3

__all__ = ["dflash_layouts", "eagle3_layouts", "eagle_layouts", "llama", "medusa_layouts", "mistral", "qwen2", "qwen3"]
