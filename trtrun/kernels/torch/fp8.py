"""Numbers of 8 bits (E4M3), and the products with them in plain torch operations: right on any device, fast on none.

E4M3 (Micikevicius et al. 2022, arXiv:2209.05433) has 4 bits of exponent, 3 of mantissa, no infinity, and 448 as its
largest number. A row of numbers is held as codes times the row's own scale, by which the largest becomes 448; numbers
are multiplied by the scale's reciprocal, which moves one in a million from one neighbour of a tie to the other.

DeepSeek-V3 (arXiv:2412.19437, section 3.3.2) and later models have a scale for each block of 128 by 128 weights, and
activations one for each 128 numbers of a row. A product is a sum over groups of 128 inputs: of codes times codes, and
that times the scales of weight and row.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from trtrun.kernels.arguments import GROUP
from trtrun.tensors import numbers_at_a_time

LARGEST = 448.0
SMALLEST_SCALE = 2.0**-126
"""The smallest number of float32 with all its bits: rows of smaller numbers, and of zeros, have it for a scale."""

EXPONENT, LEAST_EXPONENT = 0x7F800000, 121 << 23
"""Bits of a float32: those of its exponent, and these bits of 2^-6, below which E4M3 has steps of one size."""
TO_STEP = (20 << 23) | 0x400000
"""Added to a power of two as bits: 1.5 times 2^20 times it, beside which a float32 has steps of an eighth of it."""

_CODE_SHIFT, _CODE_MASK = 7, -0x4080
"""E4M3 moved up by 7 bits is float16 divided by 2^8, below its least exponent too; the mask keeps sign and magnitude
of a sign-extended code (0xBF80)."""
_HALF_TO_CODE = 256.0
_NUMBERS_AT_A_TIME = 1 << 20
"""Weights that are widened at once: 8 MiB in float64."""


def row_scales(x: torch.Tensor) -> torch.Tensor:
    """The scale of each row of x [rows, numbers]: float32 [rows]."""
    largest = x.abs().amax(dim=1).float()
    # By a tensor: on GPUs torch multiplies by the reciprocal of a number.
    return largest.div_(largest.new_full((), LARGEST)).clamp_min_(SMALLEST_SCALE)


def round_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [rows, numbers] of any float dtype → codes [rows, numbers] E4M3, rounded to nearest even, and scales [rows]
    float32. A row that holds NaN or infinity has codes that are NaN."""
    if not x.shape[1]:
        return x.new_empty(x.shape, dtype=torch.float8_e4m3fn), x.new_ones(x.shape[0], dtype=torch.float32)
    scale = row_scales(x)
    return (x.float() * scale.reciprocal().unsqueeze(1)).to(torch.float8_e4m3fn), scale


def quantize(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """weight [out, in] of any float dtype, all finite → codes [out, in] E4M3 and scale [out] float32 on its device."""
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    scale = torch.empty(weight.shape[0], dtype=torch.float32, device=weight.device)
    rows = max(1, numbers_at_a_time(weight.device) // weight.shape[1])
    for start in range(0, weight.shape[0], rows):
        part = slice(start, start + rows)
        codes[part], scale[part] = round_rows(weight[part])
    return {"codes": codes, "scale": scale}


def round_activations(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round as `round_rows`, but return the codes' numbers [rows, numbers] in float32 in place of codes. Many times as
    fast on the CPU as torch's conversions."""
    if not x.shape[1]:
        return x.float(), x.new_ones(x.shape[0], dtype=torch.float32)
    scale = row_scales(x)
    values = x.float() * scale.reciprocal().unsqueeze(1)
    steps = values.view(torch.int32).bitwise_and(EXPONENT).clamp_min_(LEAST_EXPONENT).add_(TO_STEP)
    magic = steps.view(torch.float32)
    return values.add_(magic).sub_(magic), scale


def widen(codes: torch.Tensor) -> torch.Tensor:
    """E4M3 codes of finite numbers → the same numbers in float64. Faster than torch's conversion on the CPU."""
    bits = codes.view(torch.int8).to(torch.int16)
    return (
        bits.bitwise_left_shift_(_CODE_SHIFT).bitwise_and_(_CODE_MASK).view(torch.float16).double().mul_(_HALF_TO_CODE)
    )


class TorchFp8Matmul:
    """x @ (codes * scale).T + bias, any number of rows, dtype of activations and device.

    Sums are float64. Products of two E4M3 numbers are whole multiples of 2^-18 below 2^18, so up to 100,000 of them add
    up without rounding, in any order: a row's bits do not depend on its company. With activations as they are the order
    may show, in a result of half precision about once in 2^40 numbers.

    Args:
        codes: [out, in] E4M3.
        scale: [out] float32.
        bias: [out] in the dtype of activations, or None.
        rounds_activations: whether each row of x is rounded to E4M3, too.
    """

    def __init__(
        self, codes: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, *, rounds_activations: bool
    ) -> None:
        self._codes, self._scale, self._bias = codes, scale, bias
        self._rounds_activations = rounds_activations

    @staticmethod
    def working_bytes(rows: int, inputs: int) -> int:
        """Upper bound of what a product of `rows` rows needs beside its operands and its result."""
        # x in float32, its codes' numbers, steps and float64; weights as they are widened, and as many sums.
        return (
            rows * inputs * 20 + (_NUMBERS_AT_A_TIME + inputs) * 16 + rows * _NUMBERS_AT_A_TIME // max(1, inputs) * 12
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, in] → [rows, out] in x's dtype."""
        features, inputs = self._codes.shape
        factor = None
        values = x
        if self._rounds_activations:
            values, factor = round_activations(x)
        values = values.double()
        y = x.new_empty((x.shape[0], features))
        step = max(1, _NUMBERS_AT_A_TIME // max(1, inputs))
        for first in range(0, features, step):
            part = slice(first, min(first + step, features))
            sums = (values @ widen(self._codes[part]).T).float()
            # In this order huge rows do not overflow on the way.
            sums *= self._scale[part]
            if factor is not None:
                sums *= factor.unsqueeze(1)
            if self._bias is not None:
                sums += self._bias[part]
            y[:, part] = sums
        return y


"""Weights that are widened at once: 8 MiB in float64."""


def num_groups(numbers: int) -> int:
    """Groups of so many numbers; the last may be a smaller one."""
    return -(-numbers // GROUP)


def quantize_blocks(weight: torch.Tensor) -> dict[str, torch.Tensor]:
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
