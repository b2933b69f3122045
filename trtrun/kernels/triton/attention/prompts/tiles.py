"""Tiles of queries of a prompt, and the steps of keys that each needs, as Gluon functions.

Tiles take longer the more keys they see, and which do the device alone knows: programs take the next one when they are
done. It knows positions; it does not know queries, keys or values.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

TILE = gl.constexpr(128)
HALF = gl.constexpr(64)
"""Queries of a KV head, heads counted, of a tile and of a group of warps."""

KEYS = gl.constexpr(128)
"""Of a step; as many as those of `paged_attention`'s steps, or bits would differ."""


@gluon.jit
def tile_of(number, rows, parts, kv_heads):
    """Row, KV head and first place of a tile. The last rows of a prompt see most keys and come first."""
    place = number // kv_heads
    return rows - 1 - place // parts, number % kv_heads, place % parts * TILE


@gluon.jit
def take_tile(turn, board):
    """The number of a group's next tile, as the warp that copies has written it on the board; -1 is the end."""
    numbers, ready, free = board
    slot, phase = turn % 2, (turn // 2) & 1
    mbarrier.wait(ready.index(slot), phase)
    number = gl.max(numbers.index(slot).load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0])), axis=0)
    mbarrier.arrive(free.index(slot), count=1)
    return number


@gluon.jit
def give_tile(turn, number, board):
    """Write the next number for all groups that attend, when they have read the one before the last."""
    numbers, ready, free = board
    slot, phase = turn % 2, (turn // 2) & 1
    mbarrier.wait(free.index(slot), phase ^ 1)
    numbers.index(slot).store(gl.full([1], number, gl.int32, layout=gl.BlockedLayout([1], [32], [1], [0])))
    mbarrier.arrive(ready.index(slot), count=1)


@gluon.jit
def extent(positions, position_query, first_place, group, queries, window, layout: gl.constexpr):
    """Smallest and largest position of a tile, and the first and last key, plus one, of its steps."""
    index = (first_place + gl.arange(0, TILE, layout=layout)) // group
    real = index < queries
    own = gl.maximum(gl.load(positions + index * position_query, mask=real, other=0), 0).to(gl.int32)
    last = gl.max(own, axis=0)
    first_own = gl.min(gl.where(real, own, last), axis=0)
    return first_own, last, gl.maximum(first_own - window + 1, 0) // KEYS * KEYS, last + 1
