"""One step of attention over the paged KV store, as Triton functions: some keys that a tile of queries meets, found by
the block table, and put to what came before them.

Keys and values are as they are, or codes that are widened on the way (kv_codes.py). It knows a store's layer and
positions. It does not know shares or programs (paged_attention.py).
"""

from __future__ import annotations

import triton
import triton.language as tl

from trtrun.kernels.triton.attention_shares import power
from trtrun.kernels.triton.kv_codes import ALIGNED, PLAIN, SCALE_BYTES, from_codes


@triton.jit
def _sum_weights(weights, KEYS: tl.constexpr):
    """Sums of [queries, KEYS] numbers of 0 to 1, in steps of 2^-22: of whole numbers, whose order does not count."""
    # Beside 3 a float32 has just that step, and its bits count up with it. A sum may go round; the difference does not.
    whole = tl.sum((weights + 3.0).to(tl.int32, bitcast=True), axis=1) - (0x40400000 * KEYS & 0x7FFFFFFF)
    return whole.to(tl.float32) * (1.0 / (1 << 22))


@triton.jit
def _tiles(table, first, at, known, kv_head, kv_heads, BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr):
    """The tiles of the store that a step's keys are in, and where in these: both [KEYS] int32."""
    if KEYS % BLOCK_SIZE == 0:
        within = tl.arange(0, KEYS)
        block = tl.load(table + first // BLOCK_SIZE + within // BLOCK_SIZE, mask=known, other=0).to(tl.int32)
    else:
        within = at
        block = tl.load(table + at // BLOCK_SIZE, mask=known, other=0).to(tl.int32)
    return block * kv_heads + kv_head, within % BLOCK_SIZE


@triton.jit
def _read_codes(
    store, scales, layer_scale, tile, within, known, kind: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, HEAD: tl.constexpr, HEAD_PADDED: tl.constexpr,
    CODES: tl.constexpr, HAS_LAYER_SCALES: tl.constexpr, IS_TURNED: tl.constexpr,
):  # fmt: skip
    """Keys or values of a step, of which there are codes: [KEYS, HEAD_PADDED] of `kind`, or turned."""
    width: tl.constexpr = HEAD if HAS_LAYER_SCALES else (HEAD + ALIGNED - 1) // ALIGNED * ALIGNED
    tile_bytes: tl.constexpr = BLOCK_SIZE * (width + (0 if HAS_LAYER_SCALES else SCALE_BYTES))
    if HAS_LAYER_SCALES:
        factor = tl.broadcast_to(tl.load(layer_scale), known.shape)
    else:
        place = tile.to(tl.int64) * (tile_bytes // SCALE_BYTES) + (BLOCK_SIZE * width // SCALE_BYTES + within)
        factor = tl.load(scales + place, mask=known, other=0.0)
    place = tile.to(tl.int64) * tile_bytes + within * width
    element = tl.arange(0, HEAD_PADDED)
    if IS_TURNED:
        inside = known[None, :] & (element < HEAD)[:, None]
        codes = tl.load(store + place[None, :] + element[:, None], mask=inside, other=0)
        numbers = from_codes(codes, factor[None, :], kind, CODES)
    else:
        inside = known[:, None] & (element < HEAD)[None, :]
        codes = tl.load(store + place[:, None] + element[None, :], mask=inside, other=0)
        numbers = from_codes(codes, factor[:, None], kind, CODES)
    return numbers


@triton.jit
def _slots(table, first, at, known, kv_head, kv_heads, BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr):
    """Places of a step's keys in the store, [KEYS] int32, counted in heads."""
    if KEYS % BLOCK_SIZE == 0:
        # What does not change from step to step is said apart, and slots have 32 bits: a third less arithmetic.
        within = tl.arange(0, KEYS)
        block = tl.load(table + first // BLOCK_SIZE + within // BLOCK_SIZE, mask=known, other=0).to(tl.int32)
        slot = block * (kv_heads * BLOCK_SIZE) + (kv_head * BLOCK_SIZE + within % BLOCK_SIZE)
    else:
        block = tl.load(table + at // BLOCK_SIZE, mask=known, other=0).to(tl.int32)
        slot = (block * kv_heads + kv_head) * BLOCK_SIZE + at % BLOCK_SIZE
    return slot


@triton.jit
def step(
    peak, total, gathered, rotated, own, first_own, last, first, stop,
    store, scales, value_offset, layer_scales, table, kv_head, kv_heads, window, scale, element, inside,
    BLOCK_SIZE: tl.constexpr, HEAD: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
    CODES: tl.constexpr, HAS_LAYER_SCALES: tl.constexpr,
):  # fmt: skip
    """The keys from `first` on, before `stop`, put to what came before them in their share."""
    at = first + tl.arange(0, KEYS)
    known = at < stop
    if CODES == PLAIN:
        base = _slots(table, first, at, known, kv_head, kv_heads, BLOCK_SIZE, KEYS).to(tl.int64) * HEAD
        keys = tl.load(store + base[None, :] + element[:, None], mask=known[None, :] & inside[:, None], other=0.0)
    else:
        tile, within = _tiles(table, first, at, known, kv_head, kv_heads, BLOCK_SIZE, KEYS)
        keys = _read_codes(
            store, scales, layer_scales + kv_head, tile, within, known, rotated.dtype,
            BLOCK_SIZE, HEAD, rotated.shape[1], CODES, HAS_LAYER_SCALES, True,
        )  # fmt: skip
    scores = tl.dot(rotated, keys, input_precision=PRECISION)
    if (first + KEYS > first_own + 1) | (first <= last - window):  # some query does not see some key
        seen = (at[None, :] <= own[:, None]) & (at[None, :] > own[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
    # exp2 is the faster one: the factor of scale is log2(e).
    stretch = scale * 1.4426950408889634
    higher = tl.maximum(peak, tl.ceil(tl.max(scores, axis=1) * stretch))
    safe = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp2(scores * stretch - safe[:, None])
    fade = power(peak - safe)
    if CODES == PLAIN:
        values = tl.load(
            store + value_offset + base[:, None] + element[None, :], mask=known[:, None] & inside[None, :], other=0.0
        )
    else:
        values = _read_codes(
            store + value_offset, scales + value_offset // SCALE_BYTES, layer_scales + kv_heads + kv_head,
            tile, within, known, rotated.dtype,
            BLOCK_SIZE, HEAD, rotated.shape[1], CODES, HAS_LAYER_SCALES, False,
        )  # fmt: skip
    total = total * fade + _sum_weights(weights, KEYS)
    gathered = tl.dot(weights.to(values.dtype), values, gathered * fade[:, None], input_precision=PRECISION)
    return higher, total, gathered
