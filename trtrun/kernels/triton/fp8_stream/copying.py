"""What the kernels of this folder share: the warp that has the bulk copy engine bring weights and rows into shared
memory, ahead of those that multiply, and how much that is.

It knows barriers and places. It does not know what is done with what it brings.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from trtrun.kernels.triton import early_launch
from trtrun.kernels.triton.gluon_names import copy_to_shared

TILE = gl.constexpr(64)
"""Features of a tile: what the matrix units take from four warps."""

ROWS = gl.constexpr(16)
"""Of a product, at most."""

GROUP = gl.constexpr(128)
"""Inputs that the matrix units sum up, as in fp8_matmul; and what they read of a row at once."""

GROUPS = gl.constexpr(4)
"""Of a step: so many bytes that waiting for each other costs nothing beside reading them."""

STAGES = 5
"""Steps on their way, of 40 KiB each. The small kernels that begin beside need a little shared memory, too."""

REGISTERS = 128
"""Of a thread, in the mean. The group that multiplies takes most of those of the warp that copies."""

launch_next = gluon.jit(early_launch.launch_next.fn)
wait_for_all = gluon.jit(early_launch.wait_for_all.fn)


@gluon.jit
def _ask(matrix, first_row, step, per_tile, groups, ready):
    """Have the groups of a step copied, of the rows from `first_row` on; zeros for what is outside of the matrix."""
    stage = step % ready.shape[0]
    for group in gl.static_range(GROUPS):
        place = [first_row, (step % per_tile * GROUPS + group) * GROUP]
        copy_to_shared(matrix, place, ready.index(stage), groups.index(stage * GROUPS + group))


@gluon.jit
def _ask_row_scales(x_scale, step, per_tile, row_scales, ready):
    """Have the rows' scales of a step's groups copied; zeros behind the last group."""
    stage = step % ready.shape[0]
    for group in gl.static_range(GROUPS):
        place = [step % per_tile * GROUPS + group, 0]
        copy_to_shared(x_scale, place, ready.index(stage), row_scales.index(stage * GROUPS + group))


@gluon.jit
def _ask_weights(codes, step, per_tile, weights, ready, GROUP_BYTES: gl.constexpr):
    """Have the weights of a step copied; its barrier then waits for what else its groups need, too."""
    mbarrier.expect(ready.index(step % ready.shape[0]), GROUPS * GROUP_BYTES)
    tile = gl.program_id(0) + step // per_tile * gl.num_programs(0)
    _ask(codes, tile * TILE, step, per_tile, weights, ready)


@gluon.jit
def _ask_rows(x, x_scale, step, per_tile, values, row_scales, ready, IN_GROUPS: gl.constexpr):
    _ask(x, 0, step, per_tile, values, ready)
    if IN_GROUPS:
        _ask_row_scales(x_scale, step, per_tile, row_scales, ready)


@gluon.jit
def copy_steps(
    codes, x, x_scale, weights, values, row_scales, ready, free, steps, per_tile,
    IN_GROUPS: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """The warp that copies. Only the rows have to be waited for. Where they are rounded IN_GROUPS, their scales come
    with them; else nobody looks at `x_scale` and `row_scales`."""
    stages: gl.constexpr = ready.shape[0]
    scale_bytes: gl.constexpr = x_scale.block_type.nbytes if IN_GROUPS else 0
    group_bytes: gl.constexpr = codes.block_type.nbytes + x.block_type.nbytes + scale_bytes
    ahead = gl.minimum(steps, stages)
    for step in range(0, ahead):
        _ask_weights(codes, step, per_tile, weights, ready, group_bytes)
    wait_for_all(EARLY)
    for step in range(0, ahead):
        _ask_rows(x, x_scale, step, per_tile, values, row_scales, ready, IN_GROUPS)
    for step in range(ahead, steps):
        mbarrier.wait(free.index(step % stages), (step // stages + 1) & 1)
        _ask_weights(codes, step, per_tile, weights, ready, group_bytes)
        _ask_rows(x, x_scale, step, per_tile, values, row_scales, ready, IN_GROUPS)


def describe(codes: torch.Tensor, inputs: int, height: int) -> TensorDescriptor:
    """What the copy engine has to know to bring `height` rows of a group."""
    block = [height, GROUP.value]
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.float8e4nv)
    return TensorDescriptor(codes, [codes.shape[0], inputs], [codes.stride(0), 1], block, layout)
