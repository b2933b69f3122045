"""Weights of 8 bits (E4M3) with a scale for each block of 128 by 128, activations with one for each 128 numbers of a
row, and the product of both in plain torch operations: right on any device, fast on none.

So DeepSeek-V3 (arXiv:2412.19437, section 3.3.2) and those after it are quantized. A product is a sum over groups of 128
inputs: of codes times codes, and that times the scales of weight and row. It knows rows, codes and scales; how a number
is rounded is told in fp8.py. It does not know whose they are (trtrun.linear.quantization.fp8_block).
"""

from __future__ import annotations

import torch
from torch.nn import functional

from trtrun.kernels.rounded_rows import GROUP
from trtrun.kernels.torch.fp8 import round_activations, round_rows, widen
from trtrun.tensors import numbers_at_a_time

_NUMBERS_AT_A_TIME = 1 << 20
"""Weights that are widened at once: 8 MiB in float64."""


def num_groups(numbers: int) -> int:
    """Groups of so many numbers; the last may be a smaller one."""
    return -(-numbers // GROUP)


def quantize(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """weight [out, in] of any float dtype, all finite → codes [out, in] E4M3 and block_scale [ceil(out / 128),
    ceil(in / 128)] float32 on its device, by which the largest number of a block is 448."""
    features, inputs = weight.shape
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    scale = torch.empty((num_groups(features), num_groups(inputs)), dtype=torch.float32, device=weight.device)
    step = max(1, numbers_at_a_time(weight.device) // (GROUP * inputs)) * GROUP
    for start in range(0, features, step):
        part = weight[start : start + step]
        padded = functional.pad(part, (0, -inputs % GROUP, 0, -len(part) % GROUP))
        height, width = (size // GROUP for size in padded.shape)
        blocks = padded.view(height, GROUP, width, GROUP).transpose(1, 2)
        rounded, scales = round_rows(blocks.reshape(height * width, GROUP * GROUP))
        scale[start // GROUP : start // GROUP + height] = scales.view(height, width)
        whole = rounded.view(blocks.shape).transpose(1, 2).reshape(padded.shape)
        codes[start : start + step] = whole[: len(part), :inputs]
    return {"codes": codes, "block_scale": scale}


def round_in_groups(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [rows, numbers] of any float dtype → the numbers of codes [rows, numbers] float32, and scales [rows, groups]
    float32. A group that holds NaN or infinity has codes that are NaN."""
    rows, numbers = x.shape
    groups = num_groups(numbers)
    padded = functional.pad(x, (0, -numbers % GROUP))
    values, scale = round_activations(padded.reshape(rows * groups, GROUP))
    return values.view(rows, groups * GROUP)[:, :numbers], scale.view(rows, groups)


class TorchFp8BlockMatmul:
    """x @ (codes * scales of blocks).T + bias with x rounded in groups, any number of rows, dtype of activations and
    device.

    Sums are float64: those of a group have no rounding in them, and groups are added up in their order, so a row's bits
    do not depend on its company.

    Args:
        codes: [out, in] E4M3.
        block_scale: [ceil(out / 128), ceil(in / 128)] float32.
        bias: [out] in the dtype of activations, or None.
    """

    def __init__(self, codes: torch.Tensor, block_scale: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._codes, self._scale, self._bias = codes, block_scale, bias

    @staticmethod
    def working_bytes(rows: int, features: int, inputs: int) -> int:
        """Upper bound of what a product of `rows` rows needs beside its operands and its result."""
        # x in float32 with whole groups, its codes' numbers, steps and float64; weights as they are widened, and sums.
        at_once = min(features, _features_at_once(inputs))
        return rows * (inputs + GROUP) * 20 + at_once * (inputs * 16 + num_groups(inputs) * 8) + rows * at_once * 24

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, in] → [rows, out] in x's dtype."""
        features, inputs = self._codes.shape
        values, own = round_in_groups(x)
        values, own = values.double(), own.double()
        y = x.new_empty((x.shape[0], features))
        step = _features_at_once(inputs)
        for first in range(0, features, step):
            part = slice(first, min(first + step, features))
            y[:, part] = self._multiply(values, own, part)
        return y

    def _multiply(self, values: torch.Tensor, own: torch.Tensor, part: slice) -> torch.Tensor:
        """Some output features, float32: apart, so that nothing of those before them is held any more."""
        weights = widen(self._codes[part])
        of_feature = self._scale[torch.arange(part.start, part.stop, device=values.device) // GROUP].double()
        total = values.new_zeros((len(values), len(weights)))
        for group in range(self._scale.shape[1]):
            inside = slice(group * GROUP, (group + 1) * GROUP)
            sums = values[:, inside] @ weights[:, inside].T
            # One after the other: what fuses a product and a sum may do so for some numbers alone.
            sums *= of_feature[:, group]
            sums *= own[:, group : group + 1]
            total += sums
        result = total.float()
        if self._bias is not None:
            result += self._bias[part]
        return result


def _features_at_once(inputs: int) -> int:
    """Output features whose weights are widened at once."""
    return max(1, _NUMBERS_AT_A_TIME // max(1, inputs))
