"""Which features of an expert a program of codes of 4 bits has, and what is read and written of them besides sums: what
is added and multiplied at their end, and what comes of them.

A program has a tile of the weight, 64 features, or two. It does not know words.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from trtrun.kernels.torch.integers import TILE
from trtrun.kernels.triton.fused import gated

_TILE = gl.constexpr(TILE)
_gated = gluon.jit(gated.fn)


@gluon.jit
def feature_of(index, part, features, GATED: gl.constexpr, TILES: gl.constexpr):
    """Features of y that a program of TILES tiles has, the `part`-th of an expert's, by their `index` among those of
    the weight, and features of the weight. With gates those whose index has bit 3 are factors, which lie as many as
    `features` behind their gates."""
    if not GATED:
        own = part * TILES * _TILE + index
        return own, own
    elif TILES == 1:  # of 64 features of y every other eight, so that a program has whole lines of words
        own = part // 2 * _TILE + index // 16 * 16 + part % 2 * 8 + index % 8
        return own, own + index // 8 % 2 * features
    else:
        own = part * _TILE + index // 16 * 8 + index % 8
        return own, own + index // 8 % 2 * features


@gluon.jit
def read_ends(
    bias, factor, expert, part, features, LAYOUT: gl.constexpr, ADDS: gl.constexpr, SHIFT: gl.constexpr,
    GATED: gl.constexpr, TILES: gl.constexpr,
):  # fmt: skip
    """What is added to sums of a program's features, and what numbers with an exponent are multiplied by before:
    [64 * TILES] each. Read in front of the sums, so that nothing waits for it behind them."""
    place: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    own, feature = feature_of(gl.arange(0, _TILE * TILES, layout=place), part, features, GATED, TILES)
    of_weight = features * 2 if GATED else features
    added = gl.zeros([_TILE * TILES], gl.float32, layout=place)
    of_feature = added
    if ADDS:
        added = gl.load(bias + expert * of_weight + feature, mask=own < features, other=0.0)
    if SHIFT > 0:
        of_feature = gl.load(factor + expert * of_weight + feature, mask=own < features, other=0.0)
    return added, of_feature


@gluon.jit
def store(made, y, pairs, part, features, GATE: gl.constexpr, LIMIT: gl.constexpr, TILES: gl.constexpr):
    """Write what comes of a program's features [64 * TILES, rows] for pairs at as many places, rounded. A thread has a
    gate and its factor."""
    rows: gl.constexpr = made.shape[1]
    if GATE >= 0:
        halves = made.reshape([4 * TILES, 2, 8, rows]).permute((0, 2, 3, 1)).reshape([32 * TILES, rows, 2])
        gate, times = gl.split(halves)
        made = _gated(gate.to(gl.float32), times.to(gl.float32), y.dtype.element_ty, GATE, LIMIT)
    layout: gl.constexpr = made.type.layout
    index = gl.arange(0, made.shape[0], layout=gl.SliceLayout(1, layout))
    if GATE >= 0:
        index = index // 8 * 16 + index % 8
    feature, _ = feature_of(index, part, features, GATE >= 0, TILES)
    pair = gl.load(pairs + gl.arange(0, rows, layout=gl.SliceLayout(0, layout))).to(gl.int64)
    place = y + pair[None, :] * features + feature[:, None]
    gl.store(place, made, mask=(pair >= 0)[None, :] & (feature < features)[:, None])
