"""Sums of squares, xIELU, biases, norms and gates of heads, gated sums, and rotary angles of rows, each in one Triton
kernel for CUDA."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from trtrun.kernels.triton.early_launch import begin, early
from trtrun.kernels.triton.fused import GATES, gated, warps_for

_FEATURES = 1024
"""Features that one program of `xielu`, `add_bias`, `gate_heads` or `add_gated` computes."""
_SIGMOID = tl.constexpr(GATES["sigmoid"])


@triton.jit
def _square_sums_kernel(x, output, x_stride, SIZE: tl.constexpr, PADDED: tl.constexpr, EARLY: tl.constexpr):
    begin(EARLY)
    row = tl.program_id(0).to(tl.int64)
    element = tl.arange(0, PADDED)
    value = tl.load(x + row * x_stride + element, mask=element < SIZE, other=0.0).to(tl.float32)
    tl.store(output + row, tl.sum(value * value, axis=0))


def square_sums(x: torch.Tensor) -> torch.Tensor:
    """The sum of squares of each row of x [rows, size], whose rows have no gaps, [rows] float32."""
    rows, size = x.shape
    output = torch.empty(rows, dtype=torch.float32, device=x.device)
    padded = triton.next_power_of_2(size)
    _square_sums_kernel[(rows,)](
        x, output, x.stride(0), SIZE=size, PADDED=padded, num_warps=warps_for(padded), **early(x)
    )
    return output


@triton.jit
def _xielu_kernel(x, numbers, output, x_stride, FEATURES: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    begin(EARLY)
    row = tl.program_id(0).to(tl.int64)
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = element < FEATURES
    positive, negative = tl.load(numbers), tl.load(numbers + 1)
    slope, least = tl.load(numbers + 2), tl.load(numbers + 3)
    value = tl.load(x + row * x_stride + element, mask=inside, other=0.0).to(tl.float32)
    lower = tl.minimum(value, least)
    # (exp(x) - 1 - x) / x², by its series, of which eight terms are enough for float32 between -0.5 and 0.
    series = lower * 2.7557319e-6 + 2.4801587e-5
    series = series * lower + 1.9841270e-4
    series = series * lower + 1.3888889e-3
    series = series * lower + 8.3333333e-3
    series = series * lower + 4.1666667e-2
    series = series * lower + 1.6666667e-1
    series = series * lower + 0.5
    less_one = tl.where(lower > -0.5, series * lower * lower + lower, tl.exp(lower) - 1.0)
    bent = tl.where(value > 0, positive * value * value, (less_one - value) * negative)
    tl.store(output + row * FEATURES + element, (bent + slope * value).to(output.dtype.element_ty), mask=inside)


def xielu(x: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """xIELU of x [tokens, features], whose rows have no gaps, as `TorchOperations.xielu` has it."""
    tokens, features = x.shape
    output = x.new_empty((tokens, features))
    _xielu_kernel[(tokens, triton.cdiv(features, _FEATURES))](
        x, numbers, output, x.stride(0), FEATURES=features, BLOCK=_FEATURES, num_warps=4, **early(x)
    )
    return output


@triton.constexpr_function
def _halvings(size):
    """How often a power of two is halved until it is 1."""
    return size.bit_length() - 1


@triton.jit
def factor_of_heads(value, epsilon, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """What RMSNorm multiplies each head of `value` by, [rows, PADDED] float32 with zeros behind SIZE: [rows, 1].

    Neighbours are added, then neighbouring sums, until there is one: an order that no layout changes, so that kernels
    with other shapes and other numbers of threads have the same bits. Triton's own sum over a row goes by the layout.
    """
    # Rounded by itself: a compiler would make one of a product and the sum behind it, where one thread has both.
    total = tl.fma(value, value, tl.zeros_like(value))
    for _ in tl.static_range(_halvings(PADDED)):
        total = tl.sum(tl.reshape(total, (total.shape[0], total.shape[1] // 2, 2)), axis=2)
    return tl.rsqrt(total / SIZE + epsilon)


@triton.jit
def weigh_heads(value, factor, weight, ROUNDS_FIRST: tl.constexpr, kind: tl.constexpr):
    """value [rows, PADDED] times its `factor` [rows, 1] and its `weight`, all in float32, rounded to the dtype `kind`;
    in front of the weight, too, if it is to round first."""
    normal = value * factor
    if ROUNDS_FIRST:
        normal = normal.to(kind).to(tl.float32)
    return (normal * weight).to(kind)


@triton.jit
def _normalise_heads_kernel(
    x, weight, output, epsilon, x_stride, HEADS: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr,
    PADDED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    element = tl.arange(0, PADDED)
    inside = (head < HEADS)[:, None] & (element < SIZE)[None, :]
    place = head[:, None] * SIZE + element[None, :]
    value = tl.load(x + token * x_stride + place, mask=inside, other=0.0).to(tl.float32)
    of_weight = tl.load(weight + place, mask=inside, other=0.0).to(tl.float32)
    kind: tl.constexpr = output.dtype.element_ty
    factor = factor_of_heads(value, epsilon, SIZE, PADDED)
    made = weigh_heads(value, factor, of_weight, weight.dtype.element_ty == kind, kind)
    tl.store(output + token * HEADS * SIZE + place, made, mask=inside)


_HEADS_AT_ONCE = 8
"""Heads that one program of `normalise_heads` computes."""


def normalise_heads(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """RMSNorm of each head of a token.

    Args:
        x: [tokens, heads, size] on CUDA; a token's numbers lie one behind the other.
        weight: [heads, size], multiplied with as in `add_and_normalise`.
        epsilon: added to the mean square.

    Returns:
        [tokens, heads, size], contiguous.
    """
    tokens, heads, size = x.shape
    output = torch.empty((tokens, heads, size), dtype=x.dtype, device=x.device)
    if tokens:
        _normalise_heads_kernel[(tokens, triton.cdiv(heads, _HEADS_AT_ONCE))](
            x, weight, output, epsilon, x.stride(0), HEADS=heads, SIZE=size, ROWS=_HEADS_AT_ONCE,
            PADDED=triton.next_power_of_2(size), num_warps=4, **early(x),
        )  # fmt: skip
    return output


@triton.jit
def _gate_heads_kernel(gates, attended, gate_stride, size, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    begin(EARLY)
    row = tl.program_id(0).to(tl.int64)
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = element < size
    gate = tl.load(gates + row * gate_stride + element, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(attended + row * size + element, mask=inside, other=0.0).to(tl.float32)
    made = gated(gate, value, attended.dtype.element_ty, _SIGMOID, 0.0)
    tl.store(attended + row * size + element, made, mask=inside)


def gate_heads(gates: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
    """attended [tokens, heads, size] times the sigmoids of `gates`, of the same shape, in place where that is dense; a
    token's gates lie one behind the other."""
    attended = attended.contiguous()  # what is gathered comes head by head
    tokens, size = attended.shape[0], attended[:1].numel()
    if tokens:
        _gate_heads_kernel[(tokens, triton.cdiv(size, _FEATURES))](
            gates, attended, gates.stride(0), size, BLOCK=_FEATURES, num_warps=4, **early(attended)
        )
    return attended


@triton.jit
def _add_bias_kernel(output, bias, size, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    begin(EARLY)
    place = output + tl.program_id(0).to(tl.int64) * size
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = element < size
    value = tl.load(place + element, mask=inside, other=0.0).to(tl.float32)
    value += tl.load(bias + element, mask=inside, other=0.0).to(tl.float32)
    tl.store(place + element, value.to(output.dtype.element_ty), mask=inside)


def add_bias(output: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """output [rows, size], dense, to whose rows `bias` [size] is added in place, which rounds once."""
    rows, size = output.shape
    if rows:
        _add_bias_kernel[(rows, triton.cdiv(size, _FEATURES))](
            output, bias, size, BLOCK=_FEATURES, num_warps=4, **early(output)
        )
    return output


@triton.jit
def _add_gated_kernel(output, result, logits, size, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    begin(EARLY)
    row = tl.program_id(0).to(tl.int64)
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = element < size
    kind: tl.constexpr = output.dtype.element_ty
    share = (1 / (1 + tl.exp(-tl.load(logits + row).to(tl.float32)))).to(kind).to(tl.float32)
    added = tl.load(result + row * size + element, mask=inside, other=0.0).to(tl.float32) * share
    value = tl.load(output + row * size + element, mask=inside, other=0.0).to(tl.float32)
    tl.store(output + row * size + element, (value + added.to(kind).to(tl.float32)).to(kind), mask=inside)


def add_gated(output: torch.Tensor, result: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """output [tokens, size], to which `result` is added, times the sigmoids of `logits` [tokens, 1], in place; all
    dense."""
    tokens, size = output.shape
    if tokens:
        _add_gated_kernel[(tokens, triton.cdiv(size, _FEATURES))](
            output, result, logits, size, BLOCK=_FEATURES, num_warps=4, **early(output)
        )
    return output


@triton.jit(do_not_specialize_on_alignment=["positions"])
def _select_angles_kernel(
    cosines, sines, positions, cosine, sine, width, SIZE: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    begin(EARLY)
    token = tl.program_id(0).to(tl.int64)
    position = tl.maximum(tl.load(positions + token), 0)
    number = tl.arange(0, SIZE)
    inside = number < width
    source, target = position * width + number, token * width + number
    tl.store(cosine + target, tl.load(cosines + source, mask=inside), mask=inside)
    tl.store(sine + target, tl.load(sines + source, mask=inside), mask=inside)


def select_angles(
    cosines: torch.Tensor, sines: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Select angles as torch's operations do, in one kernel where these have three; tables are contiguous."""
    count, width = len(positions), cosines.shape[1]
    cosine, sine = cosines.new_empty((count, width)), sines.new_empty((count, width))
    if count:
        _select_angles_kernel[(count,)](
            cosines, sines, positions.contiguous(), cosine, sine, width,
            SIZE=triton.next_power_of_2(width), num_warps=1, **early(cosines),
        )  # fmt: skip
    return cosine, sine
