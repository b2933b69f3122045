"""Weights that lie in quantized checkpoints: one file for each `quant_method` of config.json, registered when this
package is imported, which says how each matrix is stored."""

from trtrun.linear.quantization.base import STORED_QUANTIZATIONS, StoredQuantizations
from trtrun.linear.stored import awq, compressed_tensors, fp8, gptq, modelopt

__all__ = ["STORED_QUANTIZATIONS", "StoredQuantizations", "awq", "compressed_tensors", "fp8", "gptq", "modelopt"]
