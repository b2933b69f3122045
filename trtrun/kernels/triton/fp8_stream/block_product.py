"""The product of few rows that are rounded in groups with a weight of 8 bits in blocks, read by the bulk copy engine:
as product.py, which see, whose way of copying it shares.

A result has the bits of the general kernel (trtrun.kernels.triton.fp8_block_matmul): the matrix units sum up a group of
128 inputs; times the scales of weight and rows, that is added up in float32, in the order of the inputs. Scales of a
step are read while the one before it is multiplied. A tile has one scale for a group, of a weight that has one for each
128 by 128 numbers.

It knows tensors; it does not know who takes it (suitability.py).
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_wait

from trtrun.kernels.rounded_rows import RoundedRows
from trtrun.kernels.triton import early_launch
from trtrun.kernels.triton.fp8_stream.copying import (
    GROUP,
    GROUPS,
    REGISTERS,
    ROWS,
    STAGES,
    TILE,
    copy_steps,
    describe,
    launch_next,
    wait_for_all,
)
from trtrun.kernels.triton.fp8_stream.product import begin_group
from trtrun.kernels.triton.support import multiprocessors

_LINE = gl.constexpr(32)
"""Scales of 128 bytes, what memory is asked for at a time."""

_LINES = gl.constexpr(32)
"""Of scales of a tile, that are asked for at once: for 131,072 inputs."""


@gluon.jit
def _fetch_scales(scale, tile, tiles, groups):
    """Ask for the scales of a tile, long before they are read."""
    line = gl.arange(0, _LINES, layout=gl.BlockedLayout([1], [32], [4], [0]))
    at = gl.minimum(line * _LINE, groups - 1)
    of_tile = scale + gl.minimum(tile, tiles - 1) * TILE // GROUP * groups
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [of_tile + at], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _read_scales(scale, x_scale, scale_stride, step, steps, per_tile, groups, layout: gl.constexpr):
    """For the four groups of a step: those of the rows [ROWS] each, and those of the tile. Behind the last step there
    is none, and behind the last group there are zeros to be multiplied: other scales are read then."""
    step = gl.minimum(step, steps - 1)
    tile = gl.program_id(0) + step // per_tile * gl.num_programs(0)
    of_tile = scale + tile * TILE // GROUP * groups
    of_rows = x_scale + gl.arange(0, ROWS, layout=gl.SliceLayout(0, layout))
    first = step % per_tile * GROUPS
    last = groups - 1
    second, third, fourth = gl.minimum(first + 1, last), gl.minimum(first + 2, last), gl.minimum(first + 3, last)
    rows = (
        gl.load(of_rows + first * scale_stride),
        gl.load(of_rows + second * scale_stride),
        gl.load(of_rows + third * scale_stride),
        gl.load(of_rows + fourth * scale_stride),
    )
    weights = (
        gl.load(of_tile + first),
        gl.load(of_tile + second),
        gl.load(of_tile + third),
        gl.load(of_tile + fourth),
    )
    return rows, weights


@gluon.jit
def _add_group(total, sums, of_rows, of_tile):
    # Said out loud: a compiler may or may not make one of a product and a sum.
    return gl.fma(sums, (of_tile * of_rows)[None, :].broadcast_to(total.shape), total)


@gluon.jit
def _add_step(total, stage, weights, values, scales):
    """Sums [TILE, ROWS] and what the four groups of a step add to them, one after the other."""
    place, nothing = stage * GROUPS, gl.zeros_like(total)
    rows, of_tile = scales
    first = begin_group(place, weights, values, nothing)
    second = begin_group(place + 1, weights, values, nothing)
    third = begin_group(place + 2, weights, values, nothing)
    fourth = begin_group(place + 3, weights, values, nothing)
    total = _add_group(total, warpgroup_mma_wait(3, deps=(first,)), rows[0], of_tile[0])
    total = _add_group(total, warpgroup_mma_wait(2, deps=(second,)), rows[1], of_tile[1])
    total = _add_group(total, warpgroup_mma_wait(1, deps=(third,)), rows[2], of_tile[2])
    return _add_group(total, warpgroup_mma_wait(0, deps=(fourth,)), rows[3], of_tile[3])


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
    weights, values, ready, free, x_scale, scale, bias, y, rows, features, groups, scale_stride, steps, per_tile,
    ADDS: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """The group of four warps that multiplies, and writes one tile after the other."""
    stages: gl.constexpr = ready.shape[0]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 32])
    tiles = gl.cdiv(features, TILE)
    _fetch_scales(scale, gl.program_id(0), tiles, groups)
    wait_for_all(EARLY)
    scales = _read_scales(scale, x_scale, scale_stride, 0, steps, per_tile, groups, layout)
    for start in range(0, steps, per_tile):
        tile = gl.program_id(0) + start // per_tile * gl.num_programs(0)
        _fetch_scales(scale, tile + gl.num_programs(0), tiles, groups)
        total = gl.zeros([TILE, ROWS], gl.float32, layout=layout)
        for step in range(start, start + per_tile):
            following = _read_scales(scale, x_scale, scale_stride, step + 1, steps, per_tile, groups, layout)
            stage = step % stages
            mbarrier.wait(ready.index(stage), (step // stages) & 1)
            total = _add_step(total, stage, weights, values, scales)
            mbarrier.arrive(free.index(stage), count=1)
            scales = following
        _write(total, bias, y, tile, rows, features, layout, ADDS)


# Numbers that differ from layer to layer: a kernel for each kind of them would take long to compile.
@gluon.jit(do_not_specialize=["rows", "features", "groups", "per_tile"])
def _stream_blocks_kernel(
    codes, x, x_scale, scale, bias, y, rows, features, groups, scale_stride, per_tile,
    STAGES: gl.constexpr, ADDS: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Every tile of the weight, by as many programs as there are multiprocessors."""
    kind: gl.constexpr = codes.dtype
    weights = gl.allocate_shared_memory(kind, [STAGES * GROUPS, TILE, GROUP], codes.layout)
    values = gl.allocate_shared_memory(kind, [STAGES * GROUPS, ROWS, GROUP], x.layout)
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
                weights, values, ready, free, x_scale, scale, bias, y, rows, features, groups, scale_stride, steps,
                per_tile, ADDS, EARLY,
            )),
            (copy_steps, (codes, x, weights, values, ready, free, steps, per_tile, EARLY)),
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
            self._described, describe(x.codes, inputs, ROWS.value), x.scale, self._scale,
            self._scale if self._bias is None else self._bias, y,
            rows, features, self._scale.shape[1], x.scale.stride(1), triton.cdiv(inputs, GROUP.value * GROUPS.value),
            STAGES=STAGES, ADDS=self._bias is not None, num_warps=4, maxnreg=REGISTERS, **early_launch.early(y),
        )  # fmt: skip
        return y
