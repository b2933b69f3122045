"""How linear layers hold their weights: one class each, registered by name when this package is imported."""

from trtrun.linear.quantization import quantizations
from trtrun.linear.quantization.base import QUANTIZATIONS, Quantization, find_quantization, of_head

__all__ = ["QUANTIZATIONS", "Quantization", "find_quantization", "of_head", "quantizations"]
