"""Shares of a row's context, whose results are put together in their order: Triton functions and a kernel for CUDA.

Flash-Decoding (Dao et al., "Flash-Decoding for long-context inference", October 2023) with peaks that are whole
numbers. It knows results; it does not know keys or values.
"""

from __future__ import annotations

import triton
import triton.language as tl

from trtrun.kernels.triton.early_launch import begin


@triton.jit
def power(exponent):
    """2 to a whole number, exactly: 0 for -inf and what float32 has no normal number for."""
    whole = tl.maximum(exponent, -127.0).to(tl.int32)
    return ((whole + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def merge(peak, total, more_peak, more_total):
    """Peak and total of what came before and of one more share, and the factors of the two. Peaks are whole numbers, so
    that the factors are powers of two, and nothing is rounded but the sums themselves."""
    higher = tl.maximum(peak, more_peak)
    safe = tl.where(higher == float("-inf"), 0.0, higher)
    fade, factor = power(peak - safe), power(more_peak - safe)
    return higher, total * fade + more_total * factor, fade, factor


@triton.jit(
    do_not_specialize=["position_row", "position_query", "queries", "heads", "shares", "window"],
    do_not_specialize_on_alignment=["partial_sum", "partial_peak", "positions"],
)
def combine_kernel(
    partial_sum, partial_peak, partial_output, positions, output,
    position_row, position_query, queries, heads, shares, window,
    SHARE: tl.constexpr, HEAD: tl.constexpr, HEAD_PADDED: tl.constexpr, AT_ONCE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One head of one token: its shares, one after the other."""
    begin(EARLY)
    result = tl.program_id(0)
    token = result // heads
    own = tl.maximum(tl.load(positions + token // queries * position_row + token % queries * position_query), 0)
    element = tl.arange(0, HEAD_PADDED)
    inside = element < HEAD
    lane = tl.arange(0, AT_ONCE)
    peak, total = float("-inf"), 0.0
    gathered = tl.zeros([HEAD_PADDED], tl.float32)
    first, stop = tl.maximum(own - window + 1, 0) // SHARE, own // SHARE + 1
    for at in range(first, stop, AT_ONCE):
        # Some are read at once; then they are taken one after the other.
        known = at + lane < stop
        slot = result.to(tl.int64) * shares + at + lane
        peaks = tl.load(partial_peak + slot, mask=known, other=float("-inf"))
        totals = tl.load(partial_sum + slot, mask=known, other=0.0)
        parts = tl.load(
            partial_output + slot[:, None] * HEAD + element[None, :], mask=known[:, None] & inside[None, :], other=0.0
        )
        for share in tl.static_range(AT_ONCE):
            own_peak = tl.max(tl.where(lane == share, peaks, float("-inf")), axis=0)
            own_total = tl.sum(tl.where(lane == share, totals, 0.0), axis=0)
            own_part = tl.sum(tl.where(lane[:, None] == share, parts, 0.0), axis=0)
            peak, total, fade, factor = merge(peak, total, own_peak, own_total)
            gathered = gathered * fade + own_part * factor
    gathered = gathered / tl.where(total == 0.0, 1.0, total)
    tl.store(output + result.to(tl.int64) * HEAD + element, gathered.to(output.dtype.element_ty), mask=inside)
