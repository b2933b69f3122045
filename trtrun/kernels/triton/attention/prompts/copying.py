"""The warp that copies keys and values of prompts into shared memory, as Gluon functions.

It asks the bulk copy engine for block after block of the paged store, ahead of the warps that attend. It knows tiles
and block tables; it does not know what is done with keys and values.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from trtrun.kernels.triton.attention.prompts.tiles import KEYS, extent, give_tile, tile_of
from trtrun.kernels.triton.gluon_names import copy_to_shared, reinterpret

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
