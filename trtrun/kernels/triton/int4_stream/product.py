"""The product of few rows with a weight of 4 bits, read by the bulk copy engine: Triton's Gluon, for compute capability
9.0.

Such a product takes as long as its weight takes to read, if widening the codes keeps up. Each multiprocessor has one
program, which goes from tile to tile of the weight and keeps most of the shared memory full of steps that are on their
way. The first of them it asks for before the kernels before it have ended (early_launch.py): a weight depends on
nothing. Codes are widened (words.py) while the matrix units sum up the inputs before.

A result has the bits of the product with the dense weight (trtrun.kernels.triton.matmul): one chain of sums over the
inputs, in their order.

It knows tensors; it does not know who takes it (suitability.py).
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, mma_v2, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from trtrun.kernels.torch.int4 import GROUP, STEP, TILE
from trtrun.kernels.triton import early_launch
from trtrun.kernels.triton.int4_stream.words import LINE, read_scales, widen
from trtrun.kernels.triton.support import multiprocessors

_TILE = gl.constexpr(TILE)
"""Features of a tile: what the matrix units take from four warps."""

_GROUP = gl.constexpr(GROUP)
_GROUPS = gl.constexpr(STEP // GROUP)
"""Of a step: so many bytes that waiting for each other costs nothing beside reading them."""

_ROOM = {8: (7, 4, 4), 16: (7, 4, 4), 32: (7, 2, 4), 64: (6, 5, 1), 128: (4, 3, 1)}
"""By rows of a product: steps of the weight on their way, of 17 KiB or a little more; places for rows, and groups of
128 inputs in each. The small kernels that begin beside need a little shared memory, too."""

_ROOM_OF_TWO = {8: (4, 2, 4), 16: (4, 2, 4), 32: (4, 2, 2), 64: (3, 3, 1), 128: (2, 2, 1)}
"""The same where two programs share a multiprocessor: with more tiles than there are of these one widens codes while
the other waits."""

_MOST_BY_WARPS = gl.constexpr(8)
"""Rows that each warp multiplies by itself: instructions of four warps take as long for few rows as for many."""

_REGISTERS = 128
"""Of a thread, in the mean. The group that multiplies takes most of those of the warps that copy."""

_launch_next = gluon.jit(early_launch.launch_next.fn)
_wait_for_all = gluon.jit(early_launch.wait_for_all.fn)


@gluon.jit
def _copy_weights(words, scales, codes, factors, ready, free, steps, per_tile):
    """The warp that copies words and scales: nothing has to be waited for but room."""
    stages: gl.constexpr = ready.shape[0]
    for step in range(0, steps):
        stage = step % stages
        if step >= stages:
            mbarrier.wait(free.index(stage), (step // stages + 1) & 1)
        place = (gl.program_id(0) + step // per_tile * gl.num_programs(0)) * per_tile + step % per_tile
        mbarrier.expect(ready.index(stage), words.block_type.nbytes + scales.block_type.nbytes)
        tma.async_copy_global_to_shared(
            words, [place * words.block_type.shape[0], 0], ready.index(stage), codes.index(stage)
        )
        tma.async_copy_global_to_shared(
            scales, [place * scales.block_type.shape[0], 0], ready.index(stage), factors.index(stage)
        )


@gluon.jit
def _copy_rows(x, values, ready, free, steps, per_tile, EARLY: gl.constexpr):
    """The warp that copies rows, when all before this kernel is written; zeros for what is outside of x."""
    slots: gl.constexpr = ready.shape[0]
    together: gl.constexpr = values.shape[0] // slots
    _wait_for_all(EARLY)
    for turn in range(0, steps * (_GROUPS // together)):
        slot = turn % slots
        if turn >= slots:
            mbarrier.wait(free.index(slot), (turn // slots + 1) & 1)
        mbarrier.expect(ready.index(slot), together * x.block_type.nbytes)
        for part in gl.static_range(together):
            place = [0, (turn * together + part) % (per_tile * _GROUPS) * _GROUP]
            tma.async_copy_global_to_shared(x, place, ready.index(slot), values.index(slot * together + part))


@gluon.jit
def _write(total, bias, y, tile, rows, features, ROWS: gl.constexpr, LAYOUT: gl.constexpr, ADDS: gl.constexpr):
    """Sums, rounded, plus the bias, to y [rows, features]."""
    feature = tile * _TILE + gl.arange(0, _TILE, layout=gl.SliceLayout(1, LAYOUT))
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, LAYOUT))
    is_feature, is_row = feature < features, row < rows
    result = total.to(y.dtype.element_ty)
    if ADDS:
        added = gl.load(bias + feature, mask=is_feature, other=0.0).to(gl.float32)[:, None]
        result = (result.to(gl.float32) + added).to(y.dtype.element_ty)
    place = y + row[None, :].to(gl.int64) * features + feature[:, None]
    gl.store(place, result, mask=is_row[None, :] & is_feature[:, None])


@gluon.jit
def _multiply_by_warps(
    codes, factors, ready, free, values, rows_ready, rows_free, bias, y, rows, features, steps, per_tile,
    ADDS: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """The group of four warps that widens and multiplies, each warp 16 features, and writes one tile after the other.
    The next codes are widened while the matrix units are busy, which take as long for the least product."""
    stages: gl.constexpr = ready.shape[0]
    slots: gl.constexpr = rows_ready.shape[0]
    together: gl.constexpr = values.shape[0] // slots
    height: gl.constexpr = values.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
    mine: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    other: gl.constexpr = gl.DotOperandLayout(1, layout, 2)
    _wait_for_all(EARLY)
    mbarrier.wait(ready.index(0), 0)
    weights = widen(codes.index(0).slice(0, LINE), read_scales(factors.index(0))[0], mine, values.dtype)
    for start in range(0, steps, per_tile):
        total = gl.zeros([_TILE, height], gl.float32, layout=layout)
        for step in range(start, start + per_tile):
            stage, after = step % stages, (step + 1) % stages
            scales = read_scales(factors.index(stage))
            # Behind the last step nothing comes: what is widened then nobody multiplies.
            mbarrier.wait(ready.index(after), ((step + 1) // stages) & 1, pred=step + 1 < steps)
            next_scales = read_scales(factors.index(after))
            for part in gl.static_range(_GROUPS):
                turn = (step * _GROUPS + part) // together
                slot = turn % slots
                if part % together == 0:
                    mbarrier.wait(rows_ready.index(slot), (turn // slots) & 1)
                if part < _GROUPS - 1:
                    words = codes.index(stage).slice((part + 1) * LINE, LINE)
                    following = widen(words, scales[part + 1], mine, values.dtype)
                else:
                    following = widen(codes.index(after).slice(0, LINE), next_scales[0], mine, values.dtype)
                theirs = values.index(slot * together + part % together).permute((1, 0))
                total = mma_v2(weights, theirs.load(other), total)
                weights = following
                if part % together == together - 1:
                    mbarrier.arrive(rows_free.index(slot), count=1)
            mbarrier.arrive(free.index(stage), count=1)
        tile = gl.program_id(0) + start // per_tile * gl.num_programs(0)
        _write(total, bias, y, tile, rows, features, height, layout, ADDS)


@gluon.jit
def _multiply(
    codes, factors, ready, free, values, rows_ready, rows_free, bias, y, rows, features, steps, per_tile,
    ADDS: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """The same for more rows, by instructions of the four warps together: codes are widened while the matrix units
    multiply the group before."""
    stages: gl.constexpr = ready.shape[0]
    slots: gl.constexpr = rows_ready.shape[0]
    together: gl.constexpr = values.shape[0] // slots
    height: gl.constexpr = values.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, height, 16])
    mine: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    _wait_for_all(EARLY)
    for start in range(0, steps, per_tile):
        total = gl.zeros([_TILE, height], gl.float32, layout=layout)
        for step in range(start, start + per_tile):
            stage = step % stages
            mbarrier.wait(ready.index(stage), (step // stages) & 1)
            scales = read_scales(factors.index(stage))
            for part in gl.static_range(_GROUPS):
                words = codes.index(stage).slice(part * LINE, LINE)
                weights = widen(words, scales[part], mine, values.dtype)
                turn = (step * _GROUPS + part) // together
                slot = turn % slots
                if part % together == 0:
                    mbarrier.wait(rows_ready.index(slot), (turn // slots) & 1)
                theirs = values.index(slot * together + part % together).permute((1, 0))
                total = warpgroup_mma(weights, theirs, total, is_async=True)
                total = warpgroup_mma_wait(1, deps=(total,))
                if part % together == 0:  # the group before is done
                    is_known = step > start if part == 0 else True
                    mbarrier.arrive(rows_free.index((turn - 1) % slots), count=1, pred=is_known)
            mbarrier.arrive(free.index(stage), count=1)
        total = warpgroup_mma_wait(0, deps=(total,))
        mbarrier.arrive(rows_free.index(((start + per_tile) * (_GROUPS // together) - 1) % slots), count=1)
        tile = gl.program_id(0) + start // per_tile * gl.num_programs(0)
        _write(total, bias, y, tile, rows, features, height, layout, ADDS)


@gluon.jit
def _multiply_either(
    codes, factors, ready, free, values, rows_ready, rows_free, bias, y, rows, features, steps, per_tile,
    ADDS: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    if values.shape[1] <= _MOST_BY_WARPS:
        _multiply_by_warps(
            codes, factors, ready, free, values, rows_ready, rows_free, bias, y, rows, features, steps, per_tile,
            ADDS, EARLY,
        )  # fmt: skip
    else:
        _multiply(
            codes, factors, ready, free, values, rows_ready, rows_free, bias, y, rows, features, steps, per_tile,
            ADDS, EARLY,
        )  # fmt: skip


@gluon.jit
def _make_barriers(COUNT: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for at in gl.static_range(COUNT):
        mbarrier.init(barriers.index(at), count=1)
    return barriers


# Numbers that differ from layer to layer: a kernel for each kind of them would take long to compile.
@gluon.jit(do_not_specialize=["rows", "features", "tiles", "per_tile"])
def _stream_kernel(
    words, scales, x, bias, y, rows, features, tiles, per_tile,
    STAGES: gl.constexpr, SLOTS: gl.constexpr, TOGETHER: gl.constexpr, ADDS: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Every tile of the weight."""
    height: gl.constexpr = x.block_type.shape[0]
    codes = gl.allocate_shared_memory(gl.int32, [STAGES, _GROUPS * LINE, LINE], words.layout)
    factors = gl.allocate_shared_memory(gl.int32, [STAGES, scales.block_type.shape[0], LINE], scales.layout)
    values = gl.allocate_shared_memory(x.dtype, [SLOTS * TOGETHER, height, _GROUP], x.layout)
    ready, free = _make_barriers(STAGES), _make_barriers(STAGES)
    rows_ready, rows_free = _make_barriers(SLOTS), _make_barriers(SLOTS)
    _launch_next(EARLY)
    steps = gl.cdiv(tiles - gl.program_id(0), gl.num_programs(0)) * per_tile
    gl.warp_specialize(
        [
            (_multiply_either, (
                codes, factors, ready, free, values, rows_ready, rows_free, bias, y, rows, features, steps, per_tile,
                ADDS, EARLY,
            )),
            (_copy_weights, (words, scales, codes, factors, ready, free, steps, per_tile)),
            (_copy_rows, (x, values, rows_ready, rows_free, steps, per_tile, EARLY)),
        ],
        [1, 1],
        [24, 24],
    )  # fmt: skip


class StreamedProduct:
    """The product with one weight.

    Args:
        words, scales: see trtrun.kernels.torch.int4; on CUDA.
        bias: [out] in the dtype of activations, or None.
    """

    def __init__(self, words: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._bias = bias
        self._tiles, self._steps = words.shape[:2]
        self._words = _describe(words.view(-1, LINE.value), words.shape[2])
        self._scales = _describe(scales.view(-1, LINE.value), scales.shape[2])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, in] of half precision, one to 128 rows that begin at multiples of 16 bytes → [rows, out] in its
        dtype."""
        rows, features = len(x), self._tiles * TILE
        y = torch.empty((rows, features), dtype=x.dtype, device=x.device)
        height = next(height for height in _ROOM if rows <= height)
        units = multiprocessors(y.device)
        programs, room = (units, _ROOM) if self._tiles <= units else (2 * units, _ROOM_OF_TWO)
        stages, slots, together = room[height]
        block = [height, GROUP]
        layout = gl.NVMMASharedLayout.get_default_for(block, _KINDS[x.dtype])
        described = TensorDescriptor(x, list(x.shape), [x.stride(0), 1], block, layout)
        _stream_kernel[(min(programs, self._tiles),)](
            self._words, self._scales, described, y if self._bias is None else self._bias, y,
            rows, features, self._tiles, self._steps,
            STAGES=stages, SLOTS=slots, TOGETHER=together, ADDS=self._bias is not None, num_warps=4, maxnreg=_REGISTERS,
            **early_launch.early(y),
        )  # fmt: skip
        return y


_KINDS = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


def _describe(words: torch.Tensor, height: int) -> TensorDescriptor:
    """What the copy engine has to know to bring `height` lines of words."""
    block = [height, LINE.value]
    return TensorDescriptor(words, list(words.shape), [LINE.value, 1], block, gl.NVMMASharedLayout(128, 32, 2))
