"""One step of attention over the paged KV store, and the shares of a row's context, as Triton functions.

A step takes some keys that a tile of queries meets, found by the block table, and adds them to what came before. A
store of codes has a step of its own: keys and values are widened on the way. Codes are read two at a time, so elements
are dealt with as two halves, the even ones and the odd ones. Scores are sums over the even ones and then the odd ones;
what is gathered is kept in halves. Scales of keys multiply scores, and those of values the weights: one number a key in
place of one a code.

The results of shares are put together in their order, as in Flash-Decoding (Dao et al., "Flash-Decoding for
long-context inference", October 2023), with peaks that are whole numbers. The sinks of heads come behind the last one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from trtrun.kernels.triton.attention.kv_codes import ALIGNED, SCALE_BYTES, widened
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


@triton.jit
def merge_sinks(peak, total, sinks):
    """The total with sinks, scores without values, as one more share; and how what was gathered fades."""
    # Rounded by itself: a compiler might make one of the product and the difference behind it, and not in every kernel.
    nothing = tl.zeros_like(sinks)
    stretched = tl.fma(sinks, nothing + 1.4426950408889634, nothing)  # log2(e)
    of_sinks = tl.ceil(stretched)
    weights = tl.exp2(stretched - tl.where(of_sinks == float("-inf"), 0.0, of_sinks))
    _, total, fade, _ = merge(peak, total, of_sinks, weights)
    return total, fade


@triton.jit(
    do_not_specialize=["position_row", "position_query", "queries", "heads", "shares", "window"],
    do_not_specialize_on_alignment=["partial_sum", "partial_peak", "positions"],
)
def combine_kernel(
    partial_sum, partial_peak, partial_output, positions, output, sinks,
    position_row, position_query, queries, heads, shares, window,
    SHARE: tl.constexpr, HEAD: tl.constexpr, HEAD_PADDED: tl.constexpr, AT_ONCE: tl.constexpr,
    HAS_SINKS: tl.constexpr, EARLY: tl.constexpr,
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
    if HAS_SINKS:
        total, fade = merge_sinks(peak, total, tl.load(sinks + result % heads))
        gathered = gathered * fade
    gathered = gathered / tl.where(total == 0.0, 1.0, total)
    tl.store(output + result.to(tl.int64) * HEAD + element, gathered.to(output.dtype.element_ty), mask=inside)


@triton.jit
def _sum_weights(weights, KEYS: tl.constexpr):
    """Sums of [queries, KEYS] numbers of 0 to 1, in steps of 2^-22: of whole numbers, whose order does not count."""
    # Beside 3 a float32 has just that step, and its bits count up with it. A sum may go round; the difference does not.
    whole = tl.sum((weights + 3.0).to(tl.int32, bitcast=True), axis=1) - (0x40400000 * KEYS & 0x7FFFFFFF)
    return whole.to(tl.float32) * (1.0 / (1 << 22))


@triton.jit
def find_slots(table, first, at, known, kv_head, kv_heads, BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr):
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
def _tanh(scores, factor):
    """tanh(scores * factor): (1 - e) / (1 + e) with e = exp(-2 |scores| factor), and the sign of the score."""
    power = tl.exp2(tl.abs(scores) * (factor * -2.8853900817779268))  # -2 log2(e)
    size = (1.0 - power) / (1.0 + power)
    return tl.where(scores < 0.0, -size, size)


@triton.jit
def weigh(
    scores, peak, total, own, first_own, last, at, first, window, scale, KEYS: tl.constexpr, SOFT_CAP: tl.constexpr
):  # fmt: skip
    """Scores [queries, KEYS] of keys at places `at`, which begin at `first`, put to what came before them: the new peak
    and total, weights of 0 to 1, and how what was gathered fades."""
    if SOFT_CAP is not None:
        scores = _tanh(scores, scale * (1.0 / SOFT_CAP))
    if (first + KEYS > first_own + 1) | (first <= last - window):  # some query does not see some key
        seen = (at[None, :] <= own[:, None]) & (at[None, :] > own[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
    # exp2 is the faster one: the factor of scale is log2(e).
    stretch = (scale if SOFT_CAP is None else SOFT_CAP) * 1.4426950408889634
    higher = tl.maximum(peak, tl.ceil(tl.max(scores, axis=1) * stretch))
    safe = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp2(scores * stretch - safe[:, None])
    fade = power(peak - safe)
    return higher, total * fade + _sum_weights(weights, KEYS), weights, fade


@triton.jit
def step(
    peak, total, gathered, rotated, own, first_own, last, first, stop,
    store, value_offset, table, kv_head, kv_heads, window, scale, element, inside,
    BLOCK_SIZE: tl.constexpr, HEAD: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr, SOFT_CAP: tl.constexpr,
):  # fmt: skip
    """The keys from `first` on, before `stop`, put to what came before them in their share."""
    at = first + tl.arange(0, KEYS)
    known = at < stop
    base = find_slots(table, first, at, known, kv_head, kv_heads, BLOCK_SIZE, KEYS).to(tl.int64) * HEAD
    keys = tl.load(store + base[None, :] + element[:, None], mask=known[None, :] & inside[:, None], other=0.0)
    scores = tl.dot(rotated, keys, input_precision=PRECISION)
    peak, total, weights, fade = weigh(
        scores, peak, total, own, first_own, last, at, first, window, scale, KEYS, SOFT_CAP
    )
    values = tl.load(
        store + value_offset + base[:, None] + element[None, :], mask=known[:, None] & inside[None, :], other=0.0
    )
    gathered = tl.dot(weights.to(values.dtype), values, gathered * fade[:, None], input_precision=PRECISION)
    return peak, total, gathered


@triton.jit
def lift(kind: tl.constexpr):
    """What weights are multiplied by beside scales, and gathered values divided by: a float16 has few bits for weights
    of values with small scales."""
    return 64.0 if kind == tl.float16 else 1.0


@triton.jit
def find_tiles(table, first, at, known, kv_head, kv_heads, BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr):
    """The tiles of the store that a step's keys are in, and where in these: both [KEYS] int32."""
    if KEYS % BLOCK_SIZE == 0:
        within = tl.arange(0, KEYS)
        block = tl.load(table + first // BLOCK_SIZE + within // BLOCK_SIZE, mask=known, other=0).to(tl.int32)
    else:
        within = at
        block = tl.load(table + at // BLOCK_SIZE, mask=known, other=0).to(tl.int32)
    return block * kv_heads + kv_head, within % BLOCK_SIZE


@triton.jit
def load_pairs(pairs, inside, IS_FULL: tl.constexpr):
    """Codes at places that all exist: keys that are not known are those of the null block, whose codes are numbers."""
    return tl.load(pairs) if IS_FULL else tl.load(pairs, mask=tl.broadcast_to(inside, pairs.shape), other=0)


@triton.jit
def step_of_codes(
    peak, total, even, odd, even_query, odd_query, own, first_own, last, first, stop,
    store, scales, value_offset, layer_scales, table, kv_head, kv_heads, window, scale, element, inside,
    BLOCK_SIZE: tl.constexpr, HEAD: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
    CODES: tl.constexpr, HAS_LAYER_SCALES: tl.constexpr, SOFT_CAP: tl.constexpr,
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
    tile, within = find_tiles(table, first, at, known, kv_head, kv_heads, BLOCK_SIZE, KEYS)
    place = tile.to(tl.int64) * (tile_bytes // 2) + within * (width // 2)
    if HAS_LAYER_SCALES:
        key_scale = tl.broadcast_to(tl.load(layer_scales + kv_head), (KEYS,))
        value_scale = tl.broadcast_to(tl.load(layer_scales + kv_heads + kv_head), (KEYS,))
    else:
        of_scale = tile.to(tl.int64) * (tile_bytes // SCALE_BYTES) + (BLOCK_SIZE * width // SCALE_BYTES + within)
        key_scale = tl.load(scales + of_scale, mask=known, other=0.0)
        value_scale = tl.load(scales + value_offset // SCALE_BYTES + of_scale, mask=known, other=0.0)
    pairs = load_pairs(store + place[None, :] + element[:, None], inside[:, None], 2 * element.shape[0] == HEAD)
    even_keys, odd_keys = widened(pairs, kind, CODES)
    scores = tl.dot(even_query, even_keys, input_precision=PRECISION)
    scores = tl.dot(odd_query, odd_keys, scores, input_precision=PRECISION) * key_scale[None, :]
    peak, total, weights, fade = weigh(
        scores, peak, total, own, first_own, last, at, first, window, scale, KEYS, SOFT_CAP
    )
    start = store + value_offset // 2
    pairs = load_pairs(start + place[:, None] + element[None, :], inside[None, :], 2 * element.shape[0] == HEAD)
    even_values, odd_values = widened(pairs, kind, CODES)
    taken = (weights * (value_scale * lift(kind))[None, :]).to(kind)
    even = tl.dot(taken, even_values, even * fade[:, None], input_precision=PRECISION)
    odd = tl.dot(taken, odd_values, odd * fade[:, None], input_precision=PRECISION)
    return peak, total, even, odd
