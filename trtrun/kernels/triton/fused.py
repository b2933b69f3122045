"""Small operations of a decoder layer, each fused into one Triton kernel for CUDA.

They round where the plain torch operations beside their callers round, so that a model computes the same on either path
but for the order of sums. It knows tensors; it does not know when Triton can be used (see support.py).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from trtrun.kernels.rounded_rows import GROUP, RoundedRows, Rounding
from trtrun.kernels.triton.early_launch import begin, early
from trtrun.kernels.triton.fp8_rounding import empty_rows, round_groups, round_row, store_scales, warps_for

_FEATURES = 1024
"""Features that one program of `silu_and_multiply` computes."""

_GROUP = tl.constexpr(GROUP)
_PLAIN, _BY_ROW, _BY_GROUP = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_ROUNDS: dict[Rounding, int] = {"row": _BY_ROW.value, "group": _BY_GROUP.value}
"""How a kernel rounds what it writes."""


@triton.jit
def _add_and_normalise_kernel(
    hidden, delta, weight, output, scales, epsilon, output_stride, scale_stride,
    SIZE: tl.constexpr, PADDED: tl.constexpr, ADDS: tl.constexpr, ROUNDS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    row = tl.program_id(0).to(tl.int64)
    element = tl.arange(0, PADDED)
    inside = element < SIZE
    kind = hidden.dtype.element_ty
    value = tl.load(hidden + row * SIZE + element, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        value += tl.load(delta + row * SIZE + element, mask=inside, other=0.0).to(tl.float32)
        tl.store(hidden + row * SIZE + element, value.to(kind), mask=inside)
        value = value.to(kind).to(tl.float32)
    mean = tl.sum(value * value, axis=0) / SIZE
    normal = (value * tl.rsqrt(mean + epsilon)).to(kind).to(tl.float32)
    factor = tl.load(weight + element, mask=inside, other=0.0).to(tl.float32)
    value = (normal * factor).to(kind)
    if ROUNDS == _BY_ROW:
        value, scale = round_row(value.to(tl.float32), PADDED)
        tl.store(scales + row, scale)
    elif ROUNDS == _BY_GROUP:
        value, scale = round_groups(value.to(tl.float32), PADDED)
        store_scales(scales, scale, row, 0, SIZE, scale_stride, PADDED)
    tl.store(output + row * output_stride + element, value.to(output.dtype.element_ty), mask=inside)


def add_and_normalise(
    hidden: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, epsilon: float
) -> torch.Tensor:
    """hidden += delta, in place, then RMSNorm of it.

    Args:
        hidden: [tokens, size], contiguous, on CUDA.
        delta: [tokens, size], contiguous, or None to normalise only.
        weight: [size].
        epsilon: added to the mean square.

    Returns:
        [tokens, size].
    """
    output = torch.empty_like(hidden)
    tokens, size = hidden.shape
    _add_and_normalise_kernel[(tokens,)](
        hidden, hidden if delta is None else delta, weight, output, output, epsilon, size, 0,
        SIZE=size, PADDED=triton.next_power_of_2(size), ADDS=delta is not None, ROUNDS=_PLAIN.value,
        num_warps=4 if size <= 4096 else 8, **early(hidden),
    )  # fmt: skip
    return output


def add_and_normalise_rounded(
    hidden: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, epsilon: float, rounding: Rounding = "row"
) -> RoundedRows:
    """As `add_and_normalise`, and what it returns is rounded to E4M3."""
    tokens, size = hidden.shape
    made = empty_rows(tokens, size, hidden, rounding)
    padded = triton.next_power_of_2(size if rounding == "row" else max(size, GROUP))
    _add_and_normalise_kernel[(tokens,)](
        hidden, hidden if delta is None else delta, weight, made.codes, made.scale, epsilon, made.codes.stride(0),
        made.scale.stride(-1),
        SIZE=size, PADDED=padded, ADDS=delta is not None, ROUNDS=_ROUNDS[rounding],
        num_warps=4 if size <= 4096 else 8, **early(hidden),
    )  # fmt: skip
    return made


@triton.jit
def _gated(fused, row, element, inside, FEATURES: tl.constexpr):
    """silu of a row's gates times its factors, in the dtype of `fused`, which is rounded to on the way, too."""
    kind = fused.dtype.element_ty
    gate = tl.load(fused + row * 2 * FEATURES + element, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(fused + row * 2 * FEATURES + FEATURES + element, mask=inside, other=0.0).to(tl.float32)
    active = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32)
    return (active * up).to(kind)


@triton.jit
def _silu_and_multiply_kernel(fused, output, FEATURES: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    begin(EARLY)
    row = tl.program_id(0).to(tl.int64)
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = element < FEATURES
    tl.store(output + row * FEATURES + element, _gated(fused, row, element, inside, FEATURES), mask=inside)


def silu_and_multiply(fused: torch.Tensor) -> torch.Tensor:
    """silu of the first half of the features times the second: [tokens, 2 * features] dense → [tokens, features]."""
    tokens, features = fused.shape[0], fused.shape[1] // 2
    output = fused.new_empty((tokens, features))
    _silu_and_multiply_kernel[(tokens, triton.cdiv(features, _FEATURES))](
        fused, output, FEATURES=features, BLOCK=_FEATURES, num_warps=4, **early(fused)
    )
    return output


@triton.jit
def _silu_and_multiply_rounded_kernel(
    fused, codes, scales, code_stride, scale_stride,
    FEATURES: tl.constexpr, BLOCK: tl.constexpr, ROUNDS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Where it is not in groups that a row is rounded, BLOCK has all of it, for its largest number."""
    begin(EARLY)
    row = tl.program_id(0).to(tl.int64)
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = element < FEATURES
    value = _gated(fused, row, element, inside, FEATURES).to(tl.float32)
    if ROUNDS == _BY_ROW:
        value, scale = round_row(value, BLOCK)
        tl.store(scales + row, scale)
    else:
        value, scale = round_groups(value, BLOCK)
        store_scales(scales, scale, row, tl.program_id(1) * (BLOCK // _GROUP), FEATURES, scale_stride, BLOCK)
    tl.store(codes + row * code_stride + element, value.to(codes.dtype.element_ty), mask=inside)


def silu_and_multiply_rounded(fused: torch.Tensor, rounding: Rounding = "row") -> RoundedRows:
    """As `silu_and_multiply`, and what it returns is rounded to E4M3."""
    tokens, features = fused.shape[0], fused.shape[1] // 2
    made = empty_rows(tokens, features, fused, rounding)
    block = triton.next_power_of_2(features) if rounding == "row" else _FEATURES
    _silu_and_multiply_rounded_kernel[(tokens, triton.cdiv(features, block))](
        fused, made.codes, made.scale, made.codes.stride(0), made.scale.stride(-1),
        FEATURES=features, BLOCK=block, ROUNDS=_ROUNDS[rounding], num_warps=warps_for(block), **early(fused),
    )  # fmt: skip
    return made
