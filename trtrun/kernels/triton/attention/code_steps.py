"""One step of attention over a paged KV store of codes, as Triton functions: like attention_steps.py, but keys and
values are widened on the way, and scales are multiplied behind the products.

Codes are read two at a time, so that elements are dealt with as two halves: the even ones and the odd ones. Scores are
sums over the even ones and then the odd ones; what is gathered is kept in halves. Scales of keys meet scores, and those
of values the weights: one number a key in place of one a code.

It knows a store's layer and positions. It does not know shares or programs (paged_attention.py).
"""

from __future__ import annotations

import triton
import triton.language as tl

from trtrun.kernels.triton.attention.attention_steps import weigh
from trtrun.kernels.triton.attention.kv_codes import ALIGNED, SCALE_BYTES, widened


@triton.jit
def lift(kind: tl.constexpr):
    """What weights are multiplied by beside scales, and gathered values divided by: a float16 has few bits for weights
    of values with small scales."""
    return 64.0 if kind == tl.float16 else 1.0


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
def _load(pairs, inside, IS_FULL: tl.constexpr):
    """Codes at places that all exist: keys that are not known are those of the null block, whose codes are numbers."""
    return tl.load(pairs) if IS_FULL else tl.load(pairs, mask=tl.broadcast_to(inside, pairs.shape), other=0)


@triton.jit
def step_of_codes(
    peak, total, even, odd, even_query, odd_query, own, first_own, last, first, stop,
    store, scales, value_offset, layer_scales, table, kv_head, kv_heads, window, scale, element, inside,
    BLOCK_SIZE: tl.constexpr, HEAD: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
    CODES: tl.constexpr, HAS_LAYER_SCALES: tl.constexpr,
):  # fmt: skip
    """The keys from `first` on, before `stop`, put to what came before them in their share.

    `store` is the layer as int16, `scales` as float32, and `value_offset` counts bytes. `element` are pairs, `inside`
    which of them there are; `even_query` and `odd_query` are halves of the queries, `even` and `odd` of what was
    gathered, [queries, pairs] each.
    """
    kind: tl.constexpr = even_query.dtype
    width: tl.constexpr = HEAD if HAS_LAYER_SCALES else (HEAD + ALIGNED - 1) // ALIGNED * ALIGNED
    tile_bytes: tl.constexpr = BLOCK_SIZE * (width + (0 if HAS_LAYER_SCALES else SCALE_BYTES))
    at = first + tl.arange(0, KEYS)
    known = at < stop
    tile, within = _tiles(table, first, at, known, kv_head, kv_heads, BLOCK_SIZE, KEYS)
    place = tile.to(tl.int64) * (tile_bytes // 2) + within * (width // 2)
    if HAS_LAYER_SCALES:
        key_scale = tl.broadcast_to(tl.load(layer_scales + kv_head), (KEYS,))
        value_scale = tl.broadcast_to(tl.load(layer_scales + kv_heads + kv_head), (KEYS,))
    else:
        of_scale = tile.to(tl.int64) * (tile_bytes // SCALE_BYTES) + (BLOCK_SIZE * width // SCALE_BYTES + within)
        key_scale = tl.load(scales + of_scale, mask=known, other=0.0)
        value_scale = tl.load(scales + value_offset // SCALE_BYTES + of_scale, mask=known, other=0.0)
    pairs = _load(store + place[None, :] + element[:, None], inside[:, None], 2 * element.shape[0] == HEAD)
    even_keys, odd_keys = widened(pairs, kind, CODES)
    scores = tl.dot(even_query, even_keys, input_precision=PRECISION)
    scores = tl.dot(odd_query, odd_keys, scores, input_precision=PRECISION) * key_scale[None, :]
    peak, total, weights, fade = weigh(scores, peak, total, own, first_own, last, at, first, window, scale, KEYS)
    start = store + value_offset // 2
    pairs = _load(start + place[:, None] + element[None, :], inside[None, :], 2 * element.shape[0] == HEAD)
    even_values, odd_values = widened(pairs, kind, CODES)
    taken = (weights * (value_scale * lift(kind))[None, :]).to(kind)
    even = tl.dot(taken, even_values, even * fade[:, None], input_precision=PRECISION)
    odd = tl.dot(taken, odd_values, odd * fade[:, None], input_precision=PRECISION)
    return peak, total, even, odd
