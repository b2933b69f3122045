"""The product of few rounded rows with a weight of 8 bits, read by the bulk copy engine: Triton's Gluon, for compute
capability 9.0; and the warp that brings weights and rows into shared memory, which block_product.py shares.

Such a product takes as long as its weight takes to read. Each multiprocessor has one program, which goes from tile to
tile of the weight and keeps most of the shared memory full of steps that are on their way. The first of them it asks
for before the kernels before it have ended (early_launch.py): a weight depends on nothing.

A result has the bits of the general kernel (trtrun.kernels.triton.matmul.fp8_matmul): the matrix units sum up 128
inputs, and groups of them are added up in float32, in the order of the inputs. But here the next groups are multiplied
while one is added, where the general kernel waits for each; with few features, and so few programs, that is what bounds
it. suitability.py decides when this kernel is used.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from trtrun.kernels.arguments import RoundedRows
from trtrun.kernels.triton import early_launch
from trtrun.kernels.triton.gluon_names import copy_to_shared
from trtrun.kernels.triton.support import multiprocessors

TILE = gl.constexpr(64)
"""Features of a tile: what the matrix units take from four warps."""

ROWS = gl.constexpr(16)
"""Rows of a product, at most."""

GROUP = gl.constexpr(128)
"""Inputs that the matrix units sum up, as in fp8_matmul; and what they read of a row at once."""

GROUPS = gl.constexpr(4)
"""Groups of inputs of a step: so many bytes that waiting for each other costs nothing beside reading them."""

STAGES = 5
"""Steps on their way, of 40 KiB each. The small kernels that begin beside need a little shared memory, too."""

REGISTERS = 128
"""Registers of a thread, in the mean. The group that multiplies takes most of those of the warp that copies."""

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


@gluon.jit
def begin_group(place, weights, values, nothing):
    """Begin to sum up a group."""
    theirs = values.index(place).permute((1, 0))
    return warpgroup_mma(weights.index(place), theirs, nothing, use_acc=False, is_async=True)


@gluon.jit
def _add_step(total, stage, weights, values):
    """Sums [TILE, ROWS] and what the four groups of a step add to them, one after the other."""
    place, nothing = stage * GROUPS, gl.zeros_like(total)
    first = begin_group(place, weights, values, nothing)
    second = begin_group(place + 1, weights, values, nothing)
    third = begin_group(place + 2, weights, values, nothing)
    fourth = begin_group(place + 3, weights, values, nothing)
    total += warpgroup_mma_wait(3, deps=(first,))
    total += warpgroup_mma_wait(2, deps=(second,))
    total += warpgroup_mma_wait(1, deps=(third,))
    total += warpgroup_mma_wait(0, deps=(fourth,))
    return total


@gluon.jit
def _write(total, x_scale, scale, bias, y, tile, rows, features, layout: gl.constexpr, ADDS: gl.constexpr):
    """Sums times their scales, plus the bias, to y [rows, features]; in the words of fp8_matmul's kernel."""
    feature = tile * TILE + gl.arange(0, TILE, layout=gl.SliceLayout(1, layout))
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, layout))
    is_feature, is_row = feature < features, row < rows
    total *= gl.load(scale + feature, mask=is_feature, other=0.0)[:, None]
    factor = gl.load(x_scale + row, mask=is_row, other=0.0)[None, :]
    if ADDS:
        # Said out loud: a compiler may or may not make one of a product and a sum.
        added = gl.load(bias + feature, mask=is_feature, other=0.0).to(gl.float32)[:, None]
        total = gl.fma(total, factor.broadcast_to(total.shape), added.broadcast_to(total.shape))
    else:
        total *= factor
    place = y + row[None, :].to(gl.int64) * features + feature[:, None]
    gl.store(place, total.to(y.dtype.element_ty), mask=is_row[None, :] & is_feature[:, None])


@gluon.jit
def _multiply(
    weights, values, ready, free, x_scale, scale, bias, y, rows, features, steps, per_tile,
    ADDS: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """The group of four warps that multiplies, and writes one tile after the other."""
    stages: gl.constexpr = ready.shape[0]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 32])
    wait_for_all(EARLY)
    for start in range(0, steps, per_tile):
        total = gl.zeros([TILE, ROWS], gl.float32, layout=layout)
        for step in range(start, start + per_tile):
            stage = step % stages
            mbarrier.wait(ready.index(stage), (step // stages) & 1)
            total = _add_step(total, stage, weights, values)
            mbarrier.arrive(free.index(stage), count=1)
        tile = gl.program_id(0) + start // per_tile * gl.num_programs(0)
        _write(total, x_scale, scale, bias, y, tile, rows, features, layout, ADDS)


# Numbers that differ from layer to layer: a kernel for each kind of them would take long to compile.
@gluon.jit(do_not_specialize=["rows", "features", "per_tile"])
def _stream_kernel(
    codes, x, x_scale, scale, bias, y, rows, features, per_tile,
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
                weights, values, ready, free, x_scale, scale, bias, y, rows, features, steps, per_tile, ADDS, EARLY,
            )),
            (copy_steps, (codes, x, x, weights, values, values, ready, free, steps, per_tile, False, EARLY)),
        ],
        [1],
        [24],
    )  # fmt: skip


class StreamedProduct:
    """The product with one weight.

    Args:
        codes: [out, in] E4M3, contiguous, on CUDA; rows of a multiple of 16 bytes.
        scale: [out] float32.
        bias: [out] in the dtype of activations, or None.
    """

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._codes, self._scale, self._bias = codes, scale, bias
        self._described = describe(codes, codes.shape[1], TILE.value)

    def __call__(self, x: RoundedRows) -> torch.Tensor:
        """One to 16 rounded rows of half precision, which begin at multiples of 16 bytes → [rows, out] in
        their dtype."""
        (features, inputs), rows = self._codes.shape, len(x.codes)
        y = torch.empty((rows, features), dtype=x.dtype, device=x.codes.device)
        programs = min(multiprocessors(y.device), triton.cdiv(features, TILE.value))
        _stream_kernel[(programs,)](
            self._described, describe(x.codes, inputs, ROWS.value), x.scale, self._scale,
            self._scale if self._bias is None else self._bias, y,
            rows, features, triton.cdiv(inputs, GROUP.value * GROUPS.value),
            STAGES=STAGES, ADDS=self._bias is not None, num_warps=4, maxnreg=REGISTERS, **early_launch.early(y),
        )  # fmt: skip
        return y
