"""One step of attention over the paged KV store, as Triton functions: some keys that a tile of queries meets, found by
the block table, and put to what came before them.

Keys and values are as they are; code_steps.py has the same for codes. It knows a store's layer and positions. It does
not know shares or programs (paged_attention.py).
"""

from __future__ import annotations

import triton
import triton.language as tl

from trtrun.kernels.triton.attention.attention_shares import power


@triton.jit
def _sum_weights(weights, KEYS: tl.constexpr):
    """Sums of [queries, KEYS] numbers of 0 to 1, in steps of 2^-22: of whole numbers, whose order does not count."""
    # Beside 3 a float32 has just that step, and its bits count up with it. A sum may go round; the difference does not.
    whole = tl.sum((weights + 3.0).to(tl.int32, bitcast=True), axis=1) - (0x40400000 * KEYS & 0x7FFFFFFF)
    return whole.to(tl.float32) * (1.0 / (1 << 22))


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
def weigh(scores, peak, total, own, first_own, last, at, first, window, scale, KEYS: tl.constexpr):
    """Scores [queries, KEYS] of keys at places `at`, which begin at `first`, put to what came before them: the new peak
    and total, weights of 0 to 1, and how what was gathered fades."""
    if (first + KEYS > first_own + 1) | (first <= last - window):  # some query does not see some key
        seen = (at[None, :] <= own[:, None]) & (at[None, :] > own[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
    # exp2 is the faster one: the factor of scale is log2(e).
    stretch = scale * 1.4426950408889634
    higher = tl.maximum(peak, tl.ceil(tl.max(scores, axis=1) * stretch))
    safe = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp2(scores * stretch - safe[:, None])
    fade = power(peak - safe)
    return higher, total * fade + _sum_weights(weights, KEYS), weights, fade


@triton.jit
def step(
    peak, total, gathered, rotated, own, first_own, last, first, stop,
    store, value_offset, table, kv_head, kv_heads, window, scale, element, inside,
    BLOCK_SIZE: tl.constexpr, HEAD: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The keys from `first` on, before `stop`, put to what came before them in their share."""
    at = first + tl.arange(0, KEYS)
    known = at < stop
    base = _slots(table, first, at, known, kv_head, kv_heads, BLOCK_SIZE, KEYS).to(tl.int64) * HEAD
    keys = tl.load(store + base[None, :] + element[:, None], mask=known[None, :] & inside[:, None], other=0.0)
    scores = tl.dot(rotated, keys, input_precision=PRECISION)
    peak, total, weights, fade = weigh(scores, peak, total, own, first_own, last, at, first, window, scale, KEYS)
    values = tl.load(
        store + value_offset + base[:, None] + element[None, :], mask=known[:, None] & inside[None, :], other=0.0
    )
    gathered = tl.dot(weights.to(values.dtype), values, gathered * fade[:, None], input_precision=PRECISION)
    return peak, total, gathered
