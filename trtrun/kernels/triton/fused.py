"""Small operations of a decoder layer, each fused into one Triton kernel for CUDA: norms, gates, and rounding rows to
E4M3, whole or in groups.

They round where the plain torch operations beside their callers round, so that a model computes the same on either path
but for the order of sums. Rounding to E4M3 has the bits of trtrun.kernels.torch.fp8.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from trtrun.kernels.arguments import (
    GELU_CUBIC,
    GELU_LINEAR,
    GROUP,
    SWIGLU_SLOPE,
    Activation,
    ExpertSums,
    RoundedRows,
    Rounding,
)
from trtrun.kernels.torch import fp8 as torch_fp8
from trtrun.kernels.triton.early_launch import begin, early, launch_next, wait_for_all
from trtrun.kernels.triton.expert_sums import sum_of_experts

_ALIGNED = 16
"""Codes of a row begin at a multiple of so many bytes, so that they are read in vectors; and scales of a group lie in
memory for a multiple of so many rows."""

_BLOCK = 1024
"""Numbers of a program that rounds in groups."""

_GROUP = tl.constexpr(GROUP)
_GELU_LINEAR, _GELU_CUBIC = tl.constexpr(GELU_LINEAR), tl.constexpr(GELU_CUBIC)
_SWIGLU_SLOPE = tl.constexpr(SWIGLU_SLOPE)
_LARGEST = tl.constexpr(torch_fp8.LARGEST)
_SMALLEST_SCALE = tl.constexpr(torch_fp8.SMALLEST_SCALE)


@triton.jit
def _scale_of(largest):
    return tl.maximum(tl.div_rn(largest, _LARGEST), _SMALLEST_SCALE)


@triton.jit
def _round(value, factor):
    """float32 times a factor of the same shape → the numbers of its codes, in float32."""
    # Rounded by itself: a compiler would make one of a product and the sum behind it, which rounds elsewhere.
    value = tl.fma(value, factor, tl.zeros_like(value))
    # Beside 1.5 * 2^20 times its power of two a number of float32 keeps 3 bits of mantissa; below 2^-6 steps stay.
    exponent = tl.maximum(value.to(tl.int32, bitcast=True) & 0x7F800000, 121 << 23)
    magic = (exponent + 0x0A400000).to(tl.float32, bitcast=True)
    return (value + magic) - magic


@triton.jit
def round_row(value, PADDED: tl.constexpr):
    """[PADDED] float32, zeros behind the row → the numbers of its codes, in float32, and its scale."""
    scale = _scale_of(tl.max(tl.abs(value), axis=0))
    return _round(value, tl.broadcast_to(tl.div_rn(1.0, scale), (PADDED,))), scale


@triton.jit
def round_groups(value, PADDED: tl.constexpr):
    """[PADDED] float32, zeros behind the row, of at least a group → the numbers of its codes, in float32, and the scale
    of each group."""
    groups: tl.constexpr = PADDED // _GROUP
    value = tl.reshape(value, (groups, _GROUP))
    scale = _scale_of(tl.max(tl.abs(value), axis=1))
    value = _round(value, tl.broadcast_to(tl.div_rn(1.0, scale)[:, None], (groups, _GROUP)))
    return tl.reshape(value, (PADDED,)), scale


@triton.jit
def store_scales(scales, scale, row, first, numbers, stride, PADDED: tl.constexpr):
    """Scales of PADDED numbers of a row, from the group `first` on, of those that a row of so many numbers has."""
    group = first + tl.arange(0, PADDED // _GROUP)
    tl.store(scales + group.to(tl.int64) * stride + row, scale, mask=group * _GROUP < numbers)


@triton.jit
def _round_kernel(x, codes, scales, inputs, x_stride, code_stride, PADDED: tl.constexpr, EARLY: tl.constexpr):
    begin(EARLY)
    row = tl.program_id(0).to(tl.int64)
    number = tl.arange(0, PADDED)
    inside = number < inputs
    value, scale = round_row(tl.load(x + row * x_stride + number, mask=inside, other=0.0).to(tl.float32), PADDED)
    tl.store(codes + row * code_stride + number, value.to(codes.dtype.element_ty), mask=inside)
    tl.store(scales + row, scale)


@triton.jit
def _round_groups_kernel(
    x, codes, scales, inputs, x_stride, code_stride, scale_stride, BLOCK: tl.constexpr, EARLY: tl.constexpr
):
    begin(EARLY)
    row = tl.program_id(0).to(tl.int64)
    number = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = number < inputs
    value, scale = round_groups(tl.load(x + row * x_stride + number, mask=inside, other=0.0).to(tl.float32), BLOCK)
    tl.store(codes + row * code_stride + number, value.to(codes.dtype.element_ty), mask=inside)
    store_scales(scales, scale, row, tl.program_id(1) * (BLOCK // _GROUP), inputs, scale_stride, BLOCK)


def round_activations(x: torch.Tensor, rounding: Rounding = "row") -> RoundedRows:
    """x [rows, inputs] of half precision or float32, whose rows have no gaps, rounded."""
    made = empty_rows(x.shape[0], x.shape[1], x, rounding)
    rows, inputs = x.shape
    if rows and rounding == "group":
        _round_groups_kernel[(rows, triton.cdiv(inputs, _BLOCK))](
            x, made.codes, made.scale, inputs, x.stride(0), made.codes.stride(0), made.scale.stride(1),
            BLOCK=_BLOCK, num_warps=4, **early(x),
        )  # fmt: skip
    elif rows:
        padded = triton.next_power_of_2(inputs)
        _round_kernel[(rows,)](
            x, made.codes, made.scale, inputs, x.stride(0), made.codes.stride(0),
            PADDED=padded, num_warps=warps_for(padded), **early(x),
        )  # fmt: skip
    return made


def empty_rows(rows: int, inputs: int, like: torch.Tensor, rounding: Rounding = "row") -> RoundedRows:
    """Room for rounded rows on the device of `like`, and with its dtype."""
    codes = torch.empty((rows, _align(inputs)), dtype=torch.float8_e4m3fn, device=like.device)
    shape = (rows,) if rounding == "row" else (triton.cdiv(inputs, GROUP), _align(rows))
    scale = torch.empty(shape, dtype=torch.float32, device=like.device)
    return RoundedRows(codes, scale if rounding == "row" else scale.T[:rows], like.dtype)


def _align(count: int) -> int:
    return -(-count // _ALIGNED) * _ALIGNED


def warps_for(padded: int) -> int:
    """Warps of a program that has a row of so many numbers."""
    return min(32, max(4, padded // 512))


_FEATURES = 1024
"""Features that one program of `activate_and_multiply` computes."""
_PLAIN, _BY_ROW, _BY_GROUP = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
ROUNDS: dict[Rounding | None, int] = {None: _PLAIN.value, "row": _BY_ROW.value, "group": _BY_GROUP.value}
"""How a kernel rounds what it writes."""


@triton.jit
def store_normal(
    value, factor, output, scales, row, epsilon, output_stride, scale_stride,
    kind: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """Write the norm of a row, [PADDED] in float32, times a weight's factors, which are of the row's dtype `kind` or in
    float32; rounded to E4M3 where ROUNDS says so."""
    element = tl.arange(0, PADDED)
    inside = element < SIZE
    mean = tl.sum(value * value, axis=0) / SIZE
    normal = value * tl.rsqrt(mean + epsilon)
    if factor.dtype == kind:
        normal = normal.to(kind).to(tl.float32)
    value = (normal * factor.to(tl.float32)).to(kind)
    if ROUNDS == _BY_ROW:
        value, scale = round_row(value.to(tl.float32), PADDED)
        tl.store(scales + row, scale)
    elif ROUNDS == _BY_GROUP:
        value, scale = round_groups(value.to(tl.float32), PADDED)
        store_scales(scales, scale, row, 0, SIZE, scale_stride, PADDED)
    tl.store(output + row * output_stride + element, value.to(output.dtype.element_ty), mask=inside)


@triton.jit
def _add_and_normalise_kernel(
    hidden, delta, shares, weight, output, scales, epsilon, hidden_stride, output_stride, scale_stride,
    SIZE: tl.constexpr, PADDED: tl.constexpr, ADDS: tl.constexpr, CHOSEN: tl.constexpr, ROUNDS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    launch_next(EARLY)
    row = tl.program_id(0).to(tl.int64)
    element = tl.arange(0, PADDED)
    inside = element < SIZE
    # It depends on nothing: behind the sum it would be waited for once more.
    factor = tl.load(weight + element, mask=inside, other=0.0)
    wait_for_all(EARLY)
    kind = hidden.dtype.element_ty
    value = tl.load(hidden + row * hidden_stride + element, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        if CHOSEN > 0:  # it is what so many experts made of each row
            added = sum_of_experts(delta, shares, row, element, inside, SIZE, CHOSEN).to(kind)
        else:
            added = tl.load(delta + row * SIZE + element, mask=inside, other=0.0)
        value += added.to(tl.float32)
        tl.store(hidden + row * hidden_stride + element, value.to(kind), mask=inside)
        value = value.to(kind).to(tl.float32)
    store_normal(
        value, factor, output, scales, row, epsilon, output_stride, scale_stride, kind, SIZE, PADDED, ROUNDS
    )  # fmt: skip


def norm_options(hidden: torch.Tensor) -> dict[str, Any]:
    """What norms of rows are launched with: the same warps wherever a row is normalised, as the order of a sum follows
    from them."""
    return {"num_warps": 4 if hidden.shape[1] <= 4096 else 8, **early(hidden)}


def _of_delta(hidden: torch.Tensor, delta: torch.Tensor | ExpertSums | None) -> tuple[Any, ...]:
    """What the kernel takes of `delta`: numbers, shares, and how it is compiled."""
    if isinstance(delta, ExpertSums):
        return *delta, {"ADDS": True, "CHOSEN": delta.made.shape[1]}
    return hidden if delta is None else delta, hidden, {"ADDS": delta is not None, "CHOSEN": 0}


def add_and_normalise(
    hidden: torch.Tensor, delta: torch.Tensor | ExpertSums | None, weight: torch.Tensor, epsilon: float
) -> torch.Tensor:
    """hidden += delta, in place, then RMSNorm of it.

    Args:
        hidden: [tokens, size], whose rows have no gaps, on CUDA.
        delta: [tokens, size], contiguous, or what experts made of each token; None to normalise only.
        weight: [size]; one in float32 beside `hidden` in half precision is multiplied with before the result is
            rounded, others behind that.
        epsilon: added to the mean square.

    Returns:
        [tokens, size].
    """
    output = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
    tokens, size = hidden.shape
    added, shares, kind = _of_delta(hidden, delta)
    _add_and_normalise_kernel[(tokens,)](
        hidden, added, shares, weight, output, output, epsilon, hidden.stride(0), size, 0,
        SIZE=size, PADDED=triton.next_power_of_2(size), ROUNDS=ROUNDS[None], **kind, **norm_options(hidden),
    )  # fmt: skip
    return output


def add_and_normalise_rounded(
    hidden: torch.Tensor,
    delta: torch.Tensor | ExpertSums | None,
    weight: torch.Tensor,
    epsilon: float,
    rounding: Rounding = "row",
) -> RoundedRows:
    """Compute `add_and_normalise`, with what it returns rounded to E4M3."""
    tokens, size = hidden.shape
    made = empty_rows(tokens, size, hidden, rounding)
    padded = triton.next_power_of_2(size if rounding == "row" else max(size, GROUP))
    added, shares, kind = _of_delta(hidden, delta)
    _add_and_normalise_kernel[(tokens,)](
        hidden, added, shares, weight, made.codes, made.scale, epsilon, hidden.stride(0),
        made.codes.stride(0), made.scale.stride(-1),
        SIZE=size, PADDED=padded, ROUNDS=ROUNDS[rounding], **kind, **norm_options(hidden),
    )  # fmt: skip
    return made


GATES: dict[Activation, int] = {"silu": 0, "gelu_tanh": 1, "clamped_swiglu": 2, "sigmoid": 3}
"""Numbers of activations, which kernels are compiled for."""

_GELU_TANH, _CLAMPED_SWIGLU = tl.constexpr(GATES["gelu_tanh"]), tl.constexpr(GATES["clamped_swiglu"])
_SIGMOID = tl.constexpr(GATES["sigmoid"])


@triton.jit
def gated(gate, factor, kind: tl.constexpr, GATE: tl.constexpr, LIMIT: tl.constexpr):
    """Activated gates times factors, all in float32, rounded to the dtype `kind`; where factors are multiplied as they
    are, on the way, too."""
    if GATE == _CLAMPED_SWIGLU:
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        factor = tl.where(factor > LIMIT, LIMIT, tl.where(factor < -LIMIT, -LIMIT, factor))
        inner = gate * _SWIGLU_SLOPE
        made = gate / (1.0 + tl.exp(-inner)) * (factor + 1.0)
    elif GATE == _SIGMOID:
        made = (1.0 / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32) * factor
    else:
        inner = gate
        if GATE == _GELU_TANH:
            inner = _GELU_LINEAR * (gate + _GELU_CUBIC * gate * gate * gate)
        made = (gate / (1.0 + tl.exp(-inner))).to(kind).to(tl.float32) * factor
    return made.to(kind)


@triton.jit
def _gated(fused, row, element, inside, FEATURES: tl.constexpr, GATE: tl.constexpr, LIMIT: tl.constexpr):
    """Activated gates of a row times its factors, in the dtype of `fused`."""
    kind = fused.dtype.element_ty
    gate = tl.load(fused + row * 2 * FEATURES + element, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(fused + row * 2 * FEATURES + FEATURES + element, mask=inside, other=0.0).to(tl.float32)
    return gated(gate, up, kind, GATE, LIMIT)


@triton.jit
def _activate_and_multiply_kernel(
    fused, output,
    FEATURES: tl.constexpr, BLOCK: tl.constexpr, GATE: tl.constexpr, LIMIT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    row = tl.program_id(0).to(tl.int64)
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = element < FEATURES
    tl.store(output + row * FEATURES + element, _gated(fused, row, element, inside, FEATURES, GATE, LIMIT), mask=inside)


def activate_and_multiply(
    fused: torch.Tensor, activation: Activation = "silu", limit: float = math.inf
) -> torch.Tensor:
    """The activated first half of the features times the second: [tokens, 2 * features] dense → [tokens, features];
    see `Activation` for the limit."""
    tokens, features = fused.shape[0], fused.shape[1] // 2
    output = fused.new_empty((tokens, features))
    _activate_and_multiply_kernel[(tokens, triton.cdiv(features, _FEATURES))](
        fused, output, FEATURES=features, BLOCK=_FEATURES, GATE=GATES[activation], LIMIT=limit,
        num_warps=4, **early(fused),
    )  # fmt: skip
    return output


@triton.jit
def _activate_and_multiply_rounded_kernel(
    fused, codes, scales, code_stride, scale_stride,
    FEATURES: tl.constexpr, BLOCK: tl.constexpr, ROUNDS: tl.constexpr, GATE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Where it is not in groups that a row is rounded, BLOCK has all of it, for its largest number."""
    begin(EARLY)
    row = tl.program_id(0).to(tl.int64)
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = element < FEATURES
    value = _gated(fused, row, element, inside, FEATURES, GATE, float("inf")).to(tl.float32)
    if ROUNDS == _BY_ROW:
        value, scale = round_row(value, BLOCK)
        tl.store(scales + row, scale)
    else:
        value, scale = round_groups(value, BLOCK)
        store_scales(scales, scale, row, tl.program_id(1) * (BLOCK // _GROUP), FEATURES, scale_stride, BLOCK)
    tl.store(codes + row * code_stride + element, value.to(codes.dtype.element_ty), mask=inside)


def activate_and_multiply_rounded(
    fused: torch.Tensor, rounding: Rounding = "row", activation: Activation = "silu"
) -> RoundedRows:
    """Compute `activate_and_multiply`, with what it returns rounded to E4M3."""
    tokens, features = fused.shape[0], fused.shape[1] // 2
    made = empty_rows(tokens, features, fused, rounding)
    block = triton.next_power_of_2(features) if rounding == "row" else _FEATURES
    _activate_and_multiply_rounded_kernel[(tokens, triton.cdiv(features, block))](
        fused, made.codes, made.scale, made.codes.stride(0), made.scale.stride(-1),
        FEATURES=features, BLOCK=block, ROUNDS=ROUNDS[rounding], GATE=GATES[activation],
        num_warps=warps_for(block), **early(fused),
    )  # fmt: skip
    return made
