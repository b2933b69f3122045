"""How weights are held. Importing this package registers every quantization."""

from trtrun.quantization import dense, int8
from trtrun.quantization.base import QUANTIZATIONS, Quantization, QuantizedWeight

__all__ = ["QUANTIZATIONS", "Quantization", "QuantizedWeight", "dense", "int8"]
