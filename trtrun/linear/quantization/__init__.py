"""How linear layers hold their weights: one class each, registered by name when this package is imported."""

from trtrun.linear.quantization import dense, int8
from trtrun.linear.quantization.base import QUANTIZATIONS, Quantization

__all__ = ["QUANTIZATIONS", "Quantization", "dense", "int8"]
