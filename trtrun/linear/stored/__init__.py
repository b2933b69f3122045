"""Weights that lie in quantized checkpoints: how each `quant_method` of config.json says that matrices are stored.
Importing this package registers every method."""

from trtrun.linear.quantization.base import STORED_QUANTIZATIONS, StoredQuantizations
from trtrun.linear.stored import byte_layouts, compressed_tensors, expert_layouts, group_layouts, modelopt

__all__ = [
    "STORED_QUANTIZATIONS",
    "StoredQuantizations",
    "byte_layouts",
    "compressed_tensors",
    "expert_layouts",
    "group_layouts",
    "modelopt",
]
