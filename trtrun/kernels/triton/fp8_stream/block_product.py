"""The product of few rows that are rounded in groups with a weight of 8 bits in blocks, read by the bulk copy engine:
as product.py, which see, whose way of copying it shares.

A result has the bits of the general kernel (trtrun.kernels.triton.matmul.fp8_block_matmul): the matrix units sum up a
group of 128 inputs; times the scales of weight and rows, that is added up in float32, in the order of the inputs.
Scales of rows come with the rows, those of the weight are read two steps ahead: a wait for either would be as long as a
step. A tile has one scale for a group, of a weight that has one for each 128 by 128 numbers.

It knows tensors; it does not know who takes it (suitability.py).
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from trtrun.kernels.arguments import RoundedRows
from trtrun.kernels.triton import early_launch
from trtrun.kernels.triton.fp8_stream.product import (
    GROUP,
    GROUPS,
    REGISTERS,
    ROWS,
    STAGES,
    TILE,
    begin_group,
    copy_steps,
    describe,
    launch_next,
    wait_for_all,
)
from trtrun.kernels.triton.support import multiprocessors

_WIDTH = gl.constexpr(32)
"""Scales of rows that are brought together: 128 bytes, at which shared memory for the copy engine begins; behind the
last row zeros."""


@gluon.jit
def _read_tile_scales(scale, step, steps, per_tile, groups):
    """Read the weight's scales for the four groups of a step. Behind the last step there is none, and behind the last
    group there are zeros to be multiplied: other scales are read then."""
    step = gl.minimum(step, steps - 1)
    tile = gl.program_id(0) + step // per_tile * gl.num_programs(0)
    of_tile = scale + tile * TILE // GROUP * groups
    first, last = step % per_tile * GROUPS, groups - 1
    return (
        gl.load(of_tile + first),
        gl.load(of_tile + gl.minimum(first + 1, last)),
        gl.load(of_tile + gl.minimum(first + 2, last)),
        gl.load(of_tile + gl.minimum(first + 3, last)),
    )


@gluon.jit
def _add_group(total, sums, row_scales, place, of_tile, layout: gl.constexpr):
    of_rows = row_scales.index(place).slice(0, ROWS, dim=1).load(layout)
    # Said out loud: a compiler may or may not make one of a product and a sum.
    return gl.fma(sums, (of_rows * of_tile).broadcast_to(total.shape), total)


@gluon.jit
def _add_step(total, stage, weights, values, row_scales, of_tile, layout: gl.constexpr):
    """Sums [TILE, ROWS] and what the four groups of a step add to them, one after the other."""
    place, nothing = stage * GROUPS, gl.zeros_like(total)
    first = begin_group(place, weights, values, nothing)
    second = begin_group(place + 1, weights, values, nothing)
    third = begin_group(place + 2, weights, values, nothing)
    fourth = begin_group(place + 3, weights, values, nothing)
    total = _add_group(total, warpgroup_mma_wait(3, deps=(first,)), row_scales, place, of_tile[0], layout)
    total = _add_group(total, warpgroup_mma_wait(2, deps=(second,)), row_scales, place + 1, of_tile[1], layout)
    total = _add_group(total, warpgroup_mma_wait(1, deps=(third,)), row_scales, place + 2, of_tile[2], layout)
    return _add_group(total, warpgroup_mma_wait(0, deps=(fourth,)), row_scales, place + 3, of_tile[3], layout)


@gluon.jit
def _write(total, bias, y, tile, rows, features, layout: gl.constexpr, ADDS: gl.constexpr):
    """Sums, plus the bias, to y [rows, features]."""
    feature = tile * TILE + gl.arange(0, TILE, layout=gl.SliceLayout(1, layout))
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, layout))
    is_feature, is_row = feature < features, row < rows
    if ADDS:
        total += gl.load(bias + feature, mask=is_feature, other=0.0).to(gl.float32)[:, None]
    place = y + row[None, :].to(gl.int64) * features + feature[:, None]
    gl.store(place, total.to(y.dtype.element_ty), mask=is_row[None, :] & is_feature[:, None])


@gluon.jit
def _multiply(
    weights, values, row_scales, ready, free, scale, bias, y, rows, features, groups, steps, per_tile,
    ADDS: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """The group of four warps that multiplies, and writes one tile after the other. Scales of the weight depend on
    nothing, and are read two steps ahead."""
    stages: gl.constexpr = ready.shape[0]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 32])
    of_tile = _read_tile_scales(scale, 0, steps, per_tile, groups)
    next_one = _read_tile_scales(scale, 1, steps, per_tile, groups)
    wait_for_all(EARLY)
    for start in range(0, steps, per_tile):
        total = gl.zeros([TILE, ROWS], gl.float32, layout=layout)
        for step in range(start, start + per_tile):
            one_behind = _read_tile_scales(scale, step + 2, steps, per_tile, groups)
            stage = step % stages
            mbarrier.wait(ready.index(stage), (step // stages) & 1)
            total = _add_step(total, stage, weights, values, row_scales, of_tile, layout)
            mbarrier.arrive(free.index(stage), count=1)
            of_tile = next_one
            next_one = one_behind
        tile = gl.program_id(0) + start // per_tile * gl.num_programs(0)
        _write(total, bias, y, tile, rows, features, layout, ADDS)


# Numbers that differ from layer to layer: a kernel for each kind of them would take long to compile.
@gluon.jit(do_not_specialize=["rows", "features", "groups", "per_tile"])
def _stream_blocks_kernel(
    codes, x, x_scale, scale, bias, y, rows, features, groups, per_tile,
    STAGES: gl.constexpr, ADDS: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Every tile of the weight, by as many programs as there are multiprocessors."""
    kind: gl.constexpr = codes.dtype
    weights = gl.allocate_shared_memory(kind, [STAGES * GROUPS, TILE, GROUP], codes.layout)
    values = gl.allocate_shared_memory(kind, [STAGES * GROUPS, ROWS, GROUP], x.layout)
    row_scales = gl.allocate_shared_memory(gl.float32, [STAGES * GROUPS, 1, _WIDTH], x_scale.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=1)
    launch_next(EARLY)
    steps = gl.cdiv(gl.cdiv(features, TILE) - gl.program_id(0), gl.num_programs(0)) * per_tile
    gl.warp_specialize(
        [
            (_multiply, (
                weights, values, row_scales, ready, free, scale, bias, y, rows, features, groups, steps, per_tile,
                ADDS, EARLY,
            )),
            (copy_steps, (
                codes, x, x_scale, weights, values, row_scales, ready, free, steps, per_tile, True, EARLY,
            )),
        ],
        [1],
        [24],
    )  # fmt: skip


class StreamedBlockProduct:
    """The product with one weight.

    Args:
        codes: [out, in] E4M3, contiguous, on CUDA; rows of a multiple of 16 bytes.
        block_scale: [ceil(out / 128), ceil(in / 128)] float32, contiguous.
        bias: [out] in the dtype of activations, or None.
    """

    def __init__(self, codes: torch.Tensor, block_scale: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._codes, self._scale, self._bias = codes, block_scale, bias
        self._described = describe(codes, codes.shape[1], TILE.value)

    def __call__(self, x: RoundedRows) -> torch.Tensor:
        """One to 16 rows of half precision, rounded in groups, which begin at multiples of 16 bytes → [rows, out] in
        their dtype."""
        (features, inputs), rows = self._codes.shape, len(x.codes)
        y = torch.empty((rows, features), dtype=x.dtype, device=x.codes.device)
        programs = min(multiprocessors(y.device), triton.cdiv(features, TILE.value))
        _stream_blocks_kernel[(programs,)](
            self._described, describe(x.codes, inputs, ROWS.value), _describe_scales(x.scale), self._scale,
            self._scale if self._bias is None else self._bias, y,
            rows, features, self._scale.shape[1], triton.cdiv(inputs, GROUP.value * GROUPS.value),
            STAGES=STAGES, ADDS=self._bias is not None, num_warps=4, maxnreg=REGISTERS, **early_launch.early(y),
        )  # fmt: skip
        return y


def _describe_scales(scale: torch.Tensor) -> TensorDescriptor:
    """What the copy engine has to know to bring the scales [rows, groups] of all rows for one group, which lie beside
    each other, with room for a multiple of 16 rows (`RoundedRows`)."""
    block = [1, _WIDTH.value]
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.float32)
    return TensorDescriptor(scale, [scale.shape[1], scale.stride(1)], [scale.stride(1), 1], block, layout)
