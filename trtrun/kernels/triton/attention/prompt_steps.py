"""The steps of a prompt's attention, as Gluon functions: tiles of queries, copying keys and values, and the softmax.

Tiles take longer the more keys they see, and only the device knows which do: programs take the next one when they are
done. A warp of its own copies keys and values into shared memory. The softmax rounds where the Triton functions of
attention_steps.py round.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from trtrun.kernels.triton.attention import attention_steps
from trtrun.kernels.triton.gluon_names import copy_to_shared, reinterpret

TILE = gl.constexpr(128)
HALF = gl.constexpr(64)
"""Queries of a KV head, heads counted, of a tile and of a group of warps."""

KEYS = gl.constexpr(128)
"""Keys of a step; as many as those of `paged_attention`'s steps, or bits would differ."""


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


_power = gluon.jit(attention_steps.power.fn)
_merge = gluon.jit(attention_steps.merge.fn)


@gluon.jit
def _apart(numbers):
    """[queries, keys] numbers as [queries, keys / 8, 8]: reduced one after the other, they make twice as many chains of
    dependent operations, half as long."""
    return gl.reshape(numbers, [numbers.shape[0], numbers.shape[1] // 8, 8])


@gluon.jit
def _sum_weights(weights):
    """Sum up weights as the function of that name in attention_steps.py does."""
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
    """Add one more share of keys to the result."""
    outer: gl.constexpr = gl.SliceLayout(1, gathered.type.layout)
    all_peak, all_total, fade, factor = _merge(all_peak, all_total, peak, total)
    fade, factor = gl.convert_layout(fade, outer), gl.convert_layout(factor, outer)
    return all_peak, all_total, all_gathered * fade[:, None] + gathered * factor[:, None]


@gluon.jit
def add_sinks(peak, total, gathered, sinks):
    """Totals and sums of values behind the last share, with the sinks of their heads, as `merge_sinks` has them."""
    layout: gl.constexpr = sinks.type.layout
    nothing = gl.zeros(sinks.shape, gl.float32, layout=layout)
    stretched = gl.fma(sinks, nothing + 1.4426950408889634, nothing)  # log2(e)
    of_sinks = gl.ceil(stretched)
    weights = gl.exp2(stretched - gl.where(of_sinks == float("-inf"), 0.0, of_sinks))
    _, total, fade, _ = _merge(peak, total, of_sinks, weights)
    return total, gathered * gl.convert_layout(fade, gl.SliceLayout(1, gathered.type.layout))[:, None]


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


PANEL = gl.constexpr(64)
"""Elements of a head that lie side by side in shared memory: 128 bytes, which the matrix units read at once."""


@gluon.jit
def _copy_step(store, table, first, stop, shift, kv_head, kv_heads, ready, panels, BLOCK: gl.constexpr):
    """Ask for the keys of a step, or for its values, `shift` rows further on. Blocks behind `stop` become zeros."""
    blocks: gl.constexpr = KEYS // BLOCK
    mbarrier.expect(ready, store.block_type.nbytes * panels.shape[0])
    for index in gl.static_range(blocks):
        at = first + index * BLOCK
        known = at < stop
        block = gl.load(table + at // BLOCK, mask=known, other=0).to(gl.int32)
        # The copy engine gives zeros for what is outside of the store.
        slot = gl.where(known, (block * kv_heads + kv_head) * BLOCK + shift, 0x7FFFFF00)
        for panel in gl.static_range(panels.shape[0] // blocks):
            copy_to_shared(store, [slot, panel * PANEL], ready, panels.index(panel * blocks + index))


@gluon.jit
def _clear(panels, block, kept, BLOCK: gl.constexpr):
    """Zeros for the rows of a block from `kept` on."""
    lines: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    line = gl.arange(0, BLOCK, layout=gl.SliceLayout(1, lines))
    blocks: gl.constexpr = KEYS // BLOCK
    for panel in gl.static_range(panels.shape[0] // blocks):
        tile = panels.index(panel * blocks + block)
        held = tile.load(lines)
        tile.store(gl.where((line < kept)[:, None], held, gl.zeros_like(held)))
    fence_async_shared()


@gluon.jit
def _copy_tile(
    store, table, start, stop, kv_head, kv_heads, shift, keys, values, barriers, step, settlings,
    BLOCK: gl.constexpr, HEAD: gl.constexpr,
):  # fmt: skip
    """All steps of a tile; returns how many steps and settlings there have been."""
    key_ready, key_free, value_ready, value_free, settled = barriers
    stages: gl.constexpr = keys.shape[0]
    pieces: gl.constexpr = KEYS // BLOCK * (HEAD // PANEL)
    kind: gl.constexpr = keys.dtype
    layout: gl.constexpr = store.layout
    for first in range(start, stop, KEYS):
        stage, phase = step % stages, (step // stages) & 1
        panels = reinterpret(keys.index(stage), kind, [pieces, BLOCK, PANEL], layout)
        mbarrier.wait(key_free.index(stage), phase ^ 1)
        _copy_step(store, table, first, stop, 0, kv_head, kv_heads, key_ready.index(stage), panels, BLOCK)
        panels = reinterpret(values.index(stage), kind, [pieces, BLOCK, PANEL], layout)
        mbarrier.wait(value_free.index(stage), phase ^ 1)
        if (first + KEYS >= stop) & (stop % BLOCK != 0):
            # Behind the last position may be what another row has left: no number, and a weight of nothing times that
            # would be none either.
            _copy_step(store, table, first, stop, shift, kv_head, kv_heads, settled, panels, BLOCK)
            mbarrier.wait(settled, settlings & 1)
            settlings += 1
            _clear(panels, (stop - 1 - first) // BLOCK, stop % BLOCK, BLOCK)
            mbarrier.arrive(value_ready.index(stage), count=1)
        else:
            ready = value_ready.index(stage)
            _copy_step(store, table, first, stop, shift, kv_head, kv_heads, ready, panels, BLOCK)
        step += 1
    return step, settlings


@gluon.jit
def copy(
    store, tables, positions, taken, keys, values, barriers, board,
    rows, parts, queries, kv_heads, group, window, shift, position_row, position_query, table_row,
    BLOCK: gl.constexpr, HEAD: gl.constexpr,
):  # fmt: skip
    """The warp that copies: takes tiles, tells the others which, and copies keys and values for them."""
    line: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    number = gl.program_id(0)
    turn, step, settlings = 0, 0, 0
    while number < rows * parts * kv_heads:
        give_tile(turn, number, board)
        row, kv_head, first_place = tile_of(number, rows, parts, kv_heads)
        _, _, start, stop = extent(
            positions + row * position_row, position_query, first_place, group, queries, window, line
        )
        step, settlings = _copy_tile(
            store, tables + row * table_row, start, stop, kv_head, kv_heads, shift, keys, values, barriers, step,
            settlings, BLOCK, HEAD,
        )  # fmt: skip
        number = gl.num_programs(0) + gl.atomic_add(taken, 1)
        turn += 1
    give_tile(turn, -1, board)
