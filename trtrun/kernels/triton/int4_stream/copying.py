"""The warps that have the bulk copy engine bring words, scales and rows into shared memory, ahead of those that
multiply.

They know barriers and places. They do not know what is done with what they bring.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from trtrun.kernels.triton import early_launch
from trtrun.kernels.triton.gluon_names import copy_to_shared

wait_for_all = gluon.jit(early_launch.wait_for_all.fn)


@gluon.jit
def copy_weights(words, scales, codes, factors, ready, free, steps, per_tile, row_tiles, TILES: gl.constexpr):
    """The warp that copies words and scales: nothing has to be waited for but room."""
    stages: gl.constexpr = ready.shape[0]
    for step in range(0, steps):
        stage = step % stages
        if step >= stages:
            mbarrier.wait(free.index(stage), (step // stages + 1) & 1)
        item = gl.program_id(0) + step // per_tile * gl.num_programs(0)
        mbarrier.expect(ready.index(stage), TILES * (words.block_type.nbytes + scales.block_type.nbytes))
        for number in gl.static_range(TILES):
            place = (item // row_tiles * TILES + number) * per_tile + step % per_tile
            own = stage * TILES + number
            copy_to_shared(words, [place * words.block_type.shape[0], 0], ready.index(stage), codes.index(own))
            copy_to_shared(scales, [place * scales.block_type.shape[0], 0], ready.index(stage), factors.index(own))


@gluon.jit
def copy_rows(x, values, ready, free, steps, per_tile, row_tiles, STEP: gl.constexpr, EARLY: gl.constexpr):
    """The warp that copies rows, when all before this kernel is written; zeros for what is outside of x. A step has
    STEP inputs."""
    slots: gl.constexpr = ready.shape[0]
    together: gl.constexpr = values.shape[0] // slots
    height: gl.constexpr = x.block_type.shape[0]
    width: gl.constexpr = x.block_type.shape[1]
    turns: gl.constexpr = STEP // width // together
    wait_for_all(EARLY)
    for turn in range(0, steps * turns):
        slot = turn % slots
        if turn >= slots:
            mbarrier.wait(free.index(slot), (turn // slots + 1) & 1)
        mbarrier.expect(ready.index(slot), together * x.block_type.nbytes)
        item = gl.program_id(0) + turn // (per_tile * turns) * gl.num_programs(0)
        first = turn % (per_tile * turns) * together
        for part in gl.static_range(together):
            place = [item % row_tiles * height, (first + part) * width]
            copy_to_shared(x, place, ready.index(slot), values.index(slot * together + part))
