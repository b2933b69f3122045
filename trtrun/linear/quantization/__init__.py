"""How linear layers hold their weights: one class each, registered by name when this package is imported."""

from trtrun.linear.quantization import dense, fp8, fp8_block, int8
from trtrun.linear.quantization.base import QUANTIZATIONS, Quantization, find_quantization, of_head

__all__ = ["QUANTIZATIONS", "Quantization", "dense", "find_quantization", "fp8", "fp8_block", "int8", "of_head"]
