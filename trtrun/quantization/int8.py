"""Weights of 8 bits, activations as they are (W8A16): half the bytes of a bfloat16 weight to read at every token.

Each output feature is scaled so that its largest weight becomes 127 and rounded to nearest: absmax quantization by
vectors (Dettmers et al. 2022, arXiv:2208.07339, section 2.1) without their treatment of activations, which stay as
they are. It needs no calibration data. A draft loses a little acceptance by it, the output of a run nothing.
"""

from __future__ import annotations

import math

import torch

from trtrun.errors import ConfigError
from trtrun.quantization.base import QUANTIZATIONS, QuantizedWeight

_LARGEST = 127
_NUMBERS_AT_A_TIME = 1 << 20
"""Numbers whose float32 copies exist at once: 4 MiB each."""
_DTYPES = {"cpu": (torch.bfloat16,), "cuda": (torch.bfloat16, torch.float16)}


class Int8:
    """One int8 a weight and one float32 an output feature; see `Quantization`."""

    keeps_weight = False

    def check(self, dtype: torch.dtype, device: torch.device) -> None:
        """bfloat16 on CPUs; on GPUs float16, too. Others would run slower than unquantized."""
        if dtype not in _DTYPES[device.type]:
            raise ConfigError(
                f"quantization int8 computes in bfloat16{' or float16' if device.type == 'cuda' else ''}, not in "
                f"{str(dtype).removeprefix('torch.')}: set dtype to bfloat16 or quantization to none"
            )

    def num_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """See `Quantization`."""
        return math.prod(shape) + shape[0] * torch.float32.itemsize

    def quantize(self, weight: torch.Tensor) -> QuantizedWeight:
        """See `Quantization`."""
        codes = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
        scale = torch.empty(weight.shape[0], dtype=torch.float32, device=weight.device)
        rows = max(1, _NUMBERS_AT_A_TIME // weight.shape[1])
        for start in range(0, weight.shape[0], rows):
            part = weight[start : start + rows].float()
            largest = part.abs().amax(dim=1)
            factor = torch.where(largest > 0, largest / _LARGEST, 1.0)
            codes[start : start + rows] = part.div_(factor.unsqueeze(1)).round_()
            scale[start : start + rows] = factor
        return QuantizedWeight(codes, scale)


QUANTIZATIONS.register("int8")(Int8())
