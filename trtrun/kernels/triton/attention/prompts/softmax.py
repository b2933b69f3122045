"""The softmax of prompts' attention, as Gluon functions: one step of keys, and shares that are put together.

It rounds where the Triton functions of `attention_steps` and `attention_shares` round. It knows tensors in registers.
It does not know where keys come from.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from trtrun.kernels.triton.attention import attention_shares

_power = gluon.jit(attention_shares.power.fn)
_merge = gluon.jit(attention_shares.merge.fn)


@gluon.jit
def _apart(numbers):
    """[queries, keys] numbers as [queries, keys / 8, 8]: reduced one after the other, they make twice as many chains of
    dependent operations, half as long."""
    return gl.reshape(numbers, [numbers.shape[0], numbers.shape[1] // 8, 8])


@gluon.jit
def _sum_weights(weights):
    """See `attention_steps`."""
    counted = gl.sum(gl.sum(_apart((weights + 3.0).to(gl.int32, bitcast=True)), axis=1), axis=1)
    whole = gl.convert_layout(counted, gl.SliceLayout(1, weights.type.layout)) - (
        0x40400000 * weights.shape[1] & 0x7FFFFFFF
    )
    return whole.to(gl.float32) * (1.0 / (1 << 22))


@gluon.jit
def nothing_yet(scored: gl.constexpr, summed: gl.constexpr, QUERIES: gl.constexpr, HEAD: gl.constexpr):
    """Peaks and totals [QUERIES] and sums of values [QUERIES, HEAD], of no key; their layouts are those of scores and
    sums."""
    peak = gl.full([QUERIES], float("-inf"), gl.float32, layout=gl.SliceLayout(1, scored))
    total = gl.zeros([QUERIES], gl.float32, layout=gl.SliceLayout(1, scored))
    return peak, total, gl.zeros([QUERIES, HEAD], gl.float32, layout=summed)


@gluon.jit
def add_share(all_peak, all_total, all_gathered, peak, total, gathered):
    """The same with one more share of keys."""
    outer: gl.constexpr = gl.SliceLayout(1, gathered.type.layout)
    all_peak, all_total, fade, factor = _merge(all_peak, all_total, peak, total)
    fade, factor = gl.convert_layout(fade, outer), gl.convert_layout(factor, outer)
    return all_peak, all_total, all_gathered * fade[:, None] + gathered * factor[:, None]


@gluon.jit
def weigh(scores, peak, total, gathered, own, column, first, first_own, last, window, stretch):
    """The softmax of a step: weights [queries, keys], peaks and totals after it, and sums so far, faded."""
    outer: gl.constexpr = gl.SliceLayout(1, gathered.type.layout)
    if (first + scores.shape[1] > first_own + 1) | (first <= last - window):  # some query does not see some key
        at = first + column
        seen = (at[None, :] <= own[:, None]) & (at[None, :] > own[:, None] - window)
        scores = gl.where(seen, scores, float("-inf"))
    highest = gl.convert_layout(gl.max(gl.max(_apart(scores), axis=1), axis=1), peak.type.layout)
    higher = gl.maximum(peak, gl.ceil(highest * stretch))
    safe = gl.where(higher == float("-inf"), 0.0, higher)
    weights = gl.exp2(scores * stretch - safe[:, None])
    fade = _power(peak - safe)
    total = total * fade + _sum_weights(weights)
    return weights, higher, total, gathered * gl.convert_layout(fade, outer)[:, None]
