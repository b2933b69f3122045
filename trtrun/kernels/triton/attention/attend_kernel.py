"""Attention of one tile of queries over a row's paged context, as a Triton kernel: share by share, each step by step.

It knows a store's layer, positions and shares. It does not know who deals out tiles and shares (paged_attention.py).
"""

from __future__ import annotations

import triton
import triton.language as tl

from trtrun.kernels.triton.attention.attention_steps import lift, merge, merge_sinks, step, step_of_codes
from trtrun.kernels.triton.attention.kv_codes import PLAIN
from trtrun.kernels.triton.early_launch import launch_next, wait_for_all

_VARYING = ["queries", "position_row", "position_query", "table_row"]
"""Numbers that change from round to round: Triton must not compile a kernel of its own for each kind of them."""


@triton.jit(do_not_specialize=[*_VARYING, "shares", "tiles"], do_not_specialize_on_alignment=["tables", "positions"])
def attend_kernel(
    query, store, scales, value_offset, layer_scales, tables, positions, output,
    partial_sum, partial_peak, partial_output, sinks, scale,
    query_token, query_head, position_row, position_query, table_row,
    queries, kv_heads, group, window, shares, tiles,
    BLOCK_SIZE: tl.constexpr, HEAD: tl.constexpr, HEAD_PADDED: tl.constexpr,
    TILE: tl.constexpr, SHARE: tl.constexpr, KEYS: tl.constexpr, IS_SPLIT: tl.constexpr, PRECISION: tl.constexpr,
    CODES: tl.constexpr, HAS_LAYER_SCALES: tl.constexpr, SOFT_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr, LOOKS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One tile of queries of one row and KV head over some shares of the row's context, or all of them, one by one. It
    LOOKS where rows stand before it waits only behind `rotate_and_write`, which waits first.
    Where the store has codes, elements are dealt with in two halves, of which `odd` is the second (attention_steps.py);
    else there is no second, and [1] zeros stand for it."""
    launch_next(EARLY)
    if not LOOKS:
        wait_for_all(EARLY)
    # The last tile of a prompt sees most keys: it begins first.
    row = tl.program_id(0) if IS_SPLIT else tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    place = tl.arange(0, TILE) + tl.program_id(2) % tiles * TILE
    index, head = place // group, kv_head * group + place % group
    real = index < queries
    own, first_own, last = read_positions(positions + row * position_row + index * position_query, real)
    start, stop = tl.maximum(first_own - window + 1, 0) // KEYS * KEYS, last + 1
    first_share, end_share = deal_shares(start, stop, tl.program_id(2) // tiles, tl.num_programs(2) // tiles, SHARE)
    begin_at, end_at = tl.maximum(start, first_share * SHARE), tl.minimum(stop, end_share * SHARE)
    if LOOKS:
        wait_for_all(EARLY)
    if begin_at >= end_at:
        return
    token = row * queries + index
    halves: tl.constexpr = 1 if CODES == PLAIN else 2
    width: tl.constexpr = HEAD_PADDED // halves
    element = tl.arange(0, width)
    inside = element < HEAD // halves
    mask = real[:, None] & inside[None, :]
    of_query = query + token[:, None] * query_token + head[:, None] * query_head + element[None, :] * halves
    even_query, odd_query = load_queries(of_query, mask, CODES)
    kind: tl.constexpr = even_query.dtype
    table = tables + row * table_row
    result = token * (kv_heads * group) + head
    nothing = tl.zeros([TILE, width], tl.float32)
    no_odd = tl.zeros([1], tl.float32) if CODES == PLAIN else nothing
    peak = tl.full([TILE], float("-inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    even, odd = nothing, no_odd
    all_peak, all_total, all_even, all_odd = peak, total, even, odd
    # One loop over all shares, so that keys of the next one are asked for while this one ends.
    for first in range(begin_at, end_at, KEYS):
        if (first % SHARE == 0) & (first > begin_at):  # a share is done
            if IS_SPLIT:
                slot = result.to(tl.int64) * shares + (first // SHARE - 1)
                out = partial_output + slot[:, None] * HEAD + element[None, :] * halves
                keep(partial_peak + slot, peak, partial_sum + slot, total, out, even, odd, real, mask, kind, CODES)
            else:
                all_peak, all_total, fade, factor = merge(all_peak, all_total, peak, total)
                all_even, all_odd = fold(all_even, all_odd, even, odd, fade, factor, CODES)
            even, odd = nothing, no_odd
            peak = tl.full([TILE], float("-inf"), tl.float32)
            total = tl.zeros([TILE], tl.float32)
        peak, total, even, odd = _step(
            peak, total, even, odd, even_query, odd_query, own, first_own, last, first, stop,
            store, scales, value_offset, layer_scales, table, kv_head, kv_heads, window, scale, element, inside,
            BLOCK_SIZE, HEAD, KEYS, PRECISION, CODES, HAS_LAYER_SCALES, SOFT_CAP,
        )  # fmt: skip
    if IS_SPLIT:
        slot = result.to(tl.int64) * shares + (end_at - 1) // SHARE
        out = partial_output + slot[:, None] * HEAD + element[None, :] * halves
        keep(partial_peak + slot, peak, partial_sum + slot, total, out, even, odd, real, mask, kind, CODES)
    else:
        all_peak, all_total, fade, factor = merge(all_peak, all_total, peak, total)
        all_even, all_odd = fold(all_even, all_odd, even, odd, fade, factor, CODES)
        if HAS_SINKS:
            of_heads = tl.load(sinks + head, mask=real, other=float("-inf"))
            all_total, fade = merge_sinks(all_peak, all_total, of_heads)
            all_even = all_even * fade[:, None]
            if CODES != PLAIN:
                all_odd = all_odd * fade[:, None]
        all_total = tl.where(all_total == 0.0, 1.0, all_total)[:, None]
        even = all_even / all_total
        if CODES != PLAIN:
            odd = all_odd / all_total
        out = output + result[:, None] * HEAD + element[None, :] * halves
        store_gathered(out, even, odd, mask, kind, CODES)


@triton.jit
def deal_shares(start, stop, number, programs, SHARE: tl.constexpr):
    """The first share of a row's keys that is a program's, and the one behind its last: each has as many, but for the
    last ones."""
    first = start // SHARE
    count = (tl.cdiv(stop, SHARE) - first + programs - 1) // programs
    return first + number * count, first + (number + 1) * count


@triton.jit
def read_positions(places, real):
    """Positions of the queries at `places`, as far as they are real: each one's, the first and the last."""
    own = tl.load(places, mask=real, other=0, cache_modifier=".cg")  # as this may be before the kernel waits
    own = tl.maximum(own, 0)  # padding sees key 0 alone
    last = tl.max(own)
    return own, tl.min(tl.where(real, own, last)), last


@triton.jit
def load_queries(query, mask, CODES: tl.constexpr):
    """Queries, and again where there are no halves; or their even and odd elements."""
    even = tl.load(query, mask=mask, other=0.0)
    odd = even if CODES == PLAIN else tl.load(query + 1, mask=mask, other=0.0)
    return even, odd


@triton.jit
def fold(all_even, all_odd, even, odd, fade, factor, CODES: tl.constexpr):
    """What was gathered in a share, to that of those before."""
    all_even = all_even * fade[:, None] + even * factor[:, None]
    if CODES != PLAIN:
        all_odd = all_odd * fade[:, None] + odd * factor[:, None]
    return all_even, all_odd


@triton.jit
def _step(
    peak, total, even, odd, even_query, odd_query, own, first_own, last, first, stop,
    store, scales, value_offset, layer_scales, table, kv_head, kv_heads, window, scale, element, inside,
    BLOCK_SIZE: tl.constexpr, HEAD: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
    CODES: tl.constexpr, HAS_LAYER_SCALES: tl.constexpr, SOFT_CAP: tl.constexpr,
):  # fmt: skip
    """The step of stores that are plain, or of codes."""
    if CODES == PLAIN:
        peak, total, even = step(
            peak, total, even, even_query, own, first_own, last, first, stop,
            store, value_offset, table, kv_head, kv_heads, window, scale, element, inside,
            BLOCK_SIZE, HEAD, KEYS, PRECISION, SOFT_CAP,
        )  # fmt: skip
    else:
        peak, total, even, odd = step_of_codes(
            peak, total, even, odd, even_query, odd_query, own, first_own, last, first, stop,
            store, scales, value_offset, layer_scales, table, kv_head, kv_heads, window, scale, element, inside,
            BLOCK_SIZE, HEAD, KEYS, PRECISION, CODES, HAS_LAYER_SCALES, SOFT_CAP,
        )  # fmt: skip
    return peak, total, even, odd


@triton.jit
def keep(peaks, peak, sums, total, out, even, odd, real, mask, kind: tl.constexpr, CODES: tl.constexpr):
    """A share's results, to be combined with those of other programs."""
    tl.store(peaks, peak, mask=real)
    tl.store(sums, total, mask=real)
    store_gathered(out, even, odd, mask, kind, CODES)


@triton.jit
def store_gathered(out, even, odd, mask, kind: tl.constexpr, CODES: tl.constexpr):
    """What was gathered, to places [queries, pairs] of its even elements, or of all."""
    if CODES == PLAIN:
        tl.store(out, even.to(out.dtype.element_ty), mask=mask)
    else:
        tl.store(out, (even * (1.0 / lift(kind))).to(out.dtype.element_ty), mask=mask)
        tl.store(out + 1, (odd * (1.0 / lift(kind))).to(out.dtype.element_ty), mask=mask)
