"""Attention over latents as Triton kernels: what is rotated is turned and written to the store, then a tile of queries
goes through a row's latents, share by share, each step by step.

A latent is loaded once for all heads of a tile, as key and as value. Codes are widened on the way, two at a time, so
that numbers are dealt with in halves, the even ones and the odd ones (attention_steps.py); a token's scale multiplies
its score, and its weight. It knows a store's layer, positions and shares. It does not know who deals out tiles and
shares (latent_attention.py).
"""

from __future__ import annotations

import triton
import triton.language as tl

from trtrun.kernels.triton.attention.attend_kernel import (
    deal_shares,
    fold,
    keep,
    load_queries,
    read_positions,
    store_gathered,
)
from trtrun.kernels.triton.attention.attention_steps import find_slots, find_tiles, lift, load_pairs, merge, weigh
from trtrun.kernels.triton.attention.kv_codes import ALIGNED, PLAIN, SCALE_BYTES, as_scales, to_codes, widened
from trtrun.kernels.triton.attention.paged_store import find_slot
from trtrun.kernels.triton.early_launch import launch_next, wait_for_all

_EVERYTHING = tl.constexpr(1 << 30)
"""The window of a layer that has none."""

# Numbers that change from round to round: Triton must not compile a kernel of its own for each kind of them.
_VARYING = ["places", "queries", "position_row", "position_query", "table_row"]


@triton.jit
def _turned(start, cosine, sine, place, element, known, TURNED: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The numbers that begin at `start` [heads, 1], turned by the angles of a place; see `paged_store._rotated`."""
    other = (element + TURNED // 2) % TURNED
    if INTERLEAVED:  # the numbers i and i + TURNED / 2 of what comes out are 2 * i and 2 * i + 1 of the files
        of_own = element % (TURNED // 2) * 2 + element // (TURNED // 2)
        of_other = other % (TURNED // 2) * 2 + other // (TURNED // 2)
    else:
        of_own, of_other = element, other
    kind = start.dtype.element_ty
    own = tl.load(start + of_own, mask=known, other=0.0).to(tl.float32)
    partner = tl.load(start + of_other, mask=known, other=0.0).to(tl.float32)
    is_number, of_place = element < TURNED, place * TURNED + element
    straight = tl.load(cosine + of_place, mask=is_number, other=0.0).to(tl.float32)
    crossed = tl.load(sine + of_place, mask=is_number, other=0.0).to(tl.float32)
    nothing = tl.zeros_like(own)
    straight = tl.fma(own, tl.broadcast_to(straight, own.shape), nothing)
    crossed = tl.fma(partner, tl.broadcast_to(crossed, own.shape), nothing)
    return (straight.to(kind).to(tl.float32) + crossed.to(kind).to(tl.float32)).to(kind)


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=["positions", "tables"])
def write_kernel(
    query, latent, key, cosine, sine, positions, tables, store, scales, turned,
    query_token, query_head, latent_token, key_token, position_row, position_query, table_row, places, queries, heads,
    BLOCK_SIZE: tl.constexpr, RANK: tl.constexpr, RANK_PADDED: tl.constexpr, TURNED: tl.constexpr,
    TURNED_PADDED: tl.constexpr, HEADS: tl.constexpr, INTERLEAVED: tl.constexpr, CODES: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Queries of HEADS heads of one place, or behind all heads what is kept of it."""
    wait_for_all(EARLY)  # first: attention reads where rows stand before it waits
    launch_next(EARLY)
    place = tl.program_id(0).to(tl.int64)
    element = tl.arange(0, TURNED_PADDED)[None, :]
    if tl.program_id(1) * HEADS < heads:
        head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
        known = (head < heads) & (element < TURNED)
        of_query = query + place * query_token + head * query_head
        turned_query = _turned(of_query, cosine, sine, place, element, known, TURNED, INTERLEAVED)
        tl.store(turned + (place * heads + head) * TURNED + element, turned_query, mask=known)
    else:
        tile, within = find_slot(
            positions, tables, place, place < places, queries, 1, 0, position_row, position_query, table_row, BLOCK_SIZE
        )
        of_key = key + place * key_token + tl.zeros((1, 1), tl.int64)
        turned_key = _turned(of_key, cosine, sine, place, element, element < TURNED, TURNED, INTERLEAVED)
        number = tl.arange(0, RANK_PADDED)[None, :]
        kept = tl.load(latent + place * latent_token + number, mask=number < RANK, other=0.0)
        if CODES == PLAIN:
            target = store + (tile * BLOCK_SIZE + within) * (RANK + TURNED)
            tl.store(target + RANK + element, turned_key, mask=element < TURNED)
            tl.store(target + number, kept, mask=number < RANK)
        else:  # one scale for both
            width: tl.constexpr = (RANK + TURNED + ALIGNED - 1) // ALIGNED * ALIGNED
            tile_bytes: tl.constexpr = BLOCK_SIZE * (width + SCALE_BYTES)
            kept, turned_key = kept.to(tl.float32), turned_key.to(tl.float32)  # zeros behind both
            largest = tl.maximum(tl.max(tl.abs(kept), axis=1), tl.max(tl.abs(turned_key), axis=1))
            scale = as_scales(largest, CODES)
            of_scale = scales + (tile * tile_bytes + BLOCK_SIZE * width) // SCALE_BYTES + within
            tl.store(of_scale + tl.arange(0, 1), scale)
            target = store + tile * tile_bytes + within * width
            tl.store(target + number, to_codes(kept, scale, CODES), mask=number < RANK)
            tl.store(target + RANK + element, to_codes(turned_key, scale, CODES), mask=element < TURNED)


@triton.jit
def _step(
    peak, total, even, odd, even_query, odd_query, even_turned, odd_turned, own, first_own, last, first, stop,
    store, scales, table, scale, number, part,
    BLOCK_SIZE: tl.constexpr, RANK: tl.constexpr, TURNED: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
    CODES: tl.constexpr,
):  # fmt: skip
    """The latents from `first` on, before `stop`, put to what came before them in their share."""
    at = first + tl.arange(0, KEYS)
    known = at < stop
    if CODES == PLAIN:
        base = store + find_slots(table, first, at, known, 0, 1, BLOCK_SIZE, KEYS).to(tl.int64) * (RANK + TURNED)
        latents = tl.load(base[:, None] + number[None, :], mask=known[:, None] & (number < RANK)[None, :], other=0.0)
        keys = tl.load(base[None, :] + RANK + part[:, None], mask=known[None, :] & (part < TURNED)[:, None], other=0.0)
        scores = tl.dot(even_query, tl.trans(latents), input_precision=PRECISION)
        scores = tl.dot(even_turned, keys, scores, input_precision=PRECISION)
        peak, total, weights, fade = weigh(
            scores, peak, total, own, first_own, last, at, first, _EVERYTHING, scale, KEYS, None
        )
        even = tl.dot(weights.to(latents.dtype), latents, even * fade[:, None], input_precision=PRECISION)
    else:
        kind: tl.constexpr = even_query.dtype
        place, of_scale = _places(table, first, at, known, BLOCK_SIZE, RANK + TURNED, KEYS)
        token_scale = tl.load(scales + of_scale, mask=known, other=0.0)
        is_full: tl.constexpr = 2 * number.shape[0] == RANK
        pairs = load_pairs(store + place[:, None] + number[None, :], (2 * number < RANK)[None, :], is_full)
        even_latents, odd_latents = widened(pairs, kind, CODES)
        is_whole: tl.constexpr = 2 * part.shape[0] == TURNED
        pairs = load_pairs(store + place[None, :] + RANK // 2 + part[:, None], (2 * part < TURNED)[:, None], is_whole)
        even_keys, odd_keys = widened(pairs, kind, CODES)
        scores = tl.dot(even_query, tl.trans(even_latents), input_precision=PRECISION)
        scores = tl.dot(odd_query, tl.trans(odd_latents), scores, input_precision=PRECISION)
        scores = tl.dot(even_turned, even_keys, scores, input_precision=PRECISION)
        scores = tl.dot(odd_turned, odd_keys, scores, input_precision=PRECISION) * token_scale[None, :]
        peak, total, weights, fade = weigh(
            scores, peak, total, own, first_own, last, at, first, _EVERYTHING, scale, KEYS, None
        )
        taken = (weights * (token_scale * lift(kind))[None, :]).to(kind)
        even = tl.dot(taken, even_latents, even * fade[:, None], input_precision=PRECISION)
        odd = tl.dot(taken, odd_latents, odd * fade[:, None], input_precision=PRECISION)
    return peak, total, even, odd


@triton.jit
def _places(table, first, at, known, BLOCK_SIZE: tl.constexpr, NUMBERS: tl.constexpr, KEYS: tl.constexpr):
    """Where a step's codes begin, counted in pairs, and where their scales are: both [KEYS] int64."""
    width: tl.constexpr = (NUMBERS + ALIGNED - 1) // ALIGNED * ALIGNED
    tile_bytes: tl.constexpr = BLOCK_SIZE * (width + SCALE_BYTES)
    tile, within = find_tiles(table, first, at, known, 0, 1, BLOCK_SIZE, KEYS)
    tile = tile.to(tl.int64)
    of_scale = tile * (tile_bytes // SCALE_BYTES) + (BLOCK_SIZE * width // SCALE_BYTES + within)
    return tile * (tile_bytes // 2) + within * (width // 2), of_scale


@triton.jit(do_not_specialize=[*_VARYING, "shares", "tiles"], do_not_specialize_on_alignment=["tables", "positions"])
def attend_latents_kernel(
    query, turned, store, scales, tables, positions, output, partial_sum, partial_peak, partial_output, scale,
    position_row, position_query, table_row, queries, heads, shares, tiles,
    BLOCK_SIZE: tl.constexpr, RANK: tl.constexpr, RANK_PADDED: tl.constexpr,
    TURNED: tl.constexpr, TURNED_PADDED: tl.constexpr, TILE: tl.constexpr, SHARE: tl.constexpr, KEYS: tl.constexpr,
    IS_SPLIT: tl.constexpr, PRECISION: tl.constexpr, CODES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One tile of queries of one row, heads counted, over some shares of the row's context, or all, one by one; without
    codes halves are as in `attend_kernel`. It runs behind `write_kernel`, which waits first."""
    launch_next(EARLY)
    # The last tile of a prompt sees most keys: it begins first.
    row = tl.program_id(0) if IS_SPLIT else tl.num_programs(0) - 1 - tl.program_id(0)
    place = tl.arange(0, TILE) + tl.program_id(1) % tiles * TILE
    index, head = place // heads, place % heads
    real = index < queries
    own, first_own, last = read_positions(positions + row * position_row + index * position_query, real)
    stop = last + 1
    first_share, end_share = deal_shares(0, stop, tl.program_id(1) // tiles, tl.num_programs(1) // tiles, SHARE)
    begin_at, end_at = first_share * SHARE, tl.minimum(stop, end_share * SHARE)
    wait_for_all(EARLY)
    if begin_at >= end_at:
        return
    result = (row * queries + index).to(tl.int64) * heads + head
    kind: tl.constexpr = query.dtype.element_ty
    halves: tl.constexpr = 1 if CODES == PLAIN else 2
    number, part = tl.arange(0, RANK_PADDED // halves), tl.arange(0, TURNED_PADDED // halves)
    mask = real[:, None] & (number * halves < RANK)[None, :]
    even_query, odd_query = load_queries(query + result[:, None] * RANK + number[None, :] * halves, mask, CODES)
    of_turned = turned + result[:, None] * TURNED + part[None, :] * halves
    even_turned, odd_turned = load_queries(of_turned, real[:, None] & (part * halves < TURNED)[None, :], CODES)
    table = tables + row * table_row
    nothing = tl.zeros([TILE, RANK_PADDED // halves], tl.float32)
    no_odd = tl.zeros([1], tl.float32) if CODES == PLAIN else nothing
    even, odd = nothing, no_odd
    peak, total = tl.full([TILE], float("-inf"), tl.float32), tl.zeros([TILE], tl.float32)
    all_peak, all_total, all_even, all_odd = peak, total, even, odd
    for first in range(begin_at, end_at, KEYS):
        if (first % SHARE == 0) & (first > begin_at):  # a share is done
            if IS_SPLIT:
                slot = result * shares + (first // SHARE - 1)
                out = partial_output + slot[:, None] * RANK + number[None, :] * halves
                keep(partial_peak + slot, peak, partial_sum + slot, total, out, even, odd, real, mask, kind, CODES)
            else:
                all_peak, all_total, fade, factor = merge(all_peak, all_total, peak, total)
                all_even, all_odd = fold(all_even, all_odd, even, odd, fade, factor, CODES)
            even, odd = nothing, no_odd
            peak, total = tl.full([TILE], float("-inf"), tl.float32), tl.zeros([TILE], tl.float32)
        peak, total, even, odd = _step(
            peak, total, even, odd, even_query, odd_query, even_turned, odd_turned, own, first_own, last, first, stop,
            store, scales, table, scale, number, part, BLOCK_SIZE, RANK, TURNED, KEYS, PRECISION, CODES,
        )  # fmt: skip
    if IS_SPLIT:
        slot = result * shares + (end_at - 1) // SHARE
        out = partial_output + slot[:, None] * RANK + number[None, :] * halves
        keep(partial_peak + slot, peak, partial_sum + slot, total, out, even, odd, real, mask, kind, CODES)
    else:
        all_peak, all_total, fade, factor = merge(all_peak, all_total, peak, total)
        all_even, all_odd = fold(all_even, all_odd, even, odd, fade, factor, CODES)
        all_total = tl.where(all_total == 0.0, 1.0, all_total)[:, None]
        even = all_even / all_total
        if CODES != PLAIN:
            odd = all_odd / all_total
        out = output + result[:, None] * RANK + number[None, :] * halves
        store_gathered(out, even, odd, mask, kind, CODES)
