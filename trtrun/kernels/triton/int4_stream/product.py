"""The product with a weight of 4 bits, read by the bulk copy engine: Triton's Gluon, for compute capability 9.0.

For few rows it takes as long as the weight takes to read, if widening the codes keeps up. Each multiprocessor has one
program, which goes from tile to tile of the weight and keeps most of the shared memory full of steps that are on their
way. The first of them it asks for before the kernels before it have ended (early_launch.py): a weight depends on
nothing (sums.py). Two or four groups of four warps widen codes (words.py) and multiply (sums.py), so that some widen
while the matrix units work for others.

A result has the bits of the general kernel (trtrun.kernels.triton.matmul.int_matmul): the matrix units sum up the
inputs of a group, and groups are added up in float32, in the order of the inputs.

It knows tensors; it does not know who takes it (suitability.py).
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from trtrun.kernels.torch.integers import GROUP, STEP, TILE, groups_of
from trtrun.kernels.triton import early_launch
from trtrun.kernels.triton.int4_stream.sums import copy_rows, copy_weights, multiply_few, multiply_many
from trtrun.kernels.triton.int4_stream.tiles import HEIGHTS, TURNS_AHEAD, Room, steps_at_once
from trtrun.kernels.triton.int4_stream.words import LINE
from trtrun.kernels.triton.support import multiprocessors

_TILE, _GROUP = gl.constexpr(TILE), gl.constexpr(GROUP)
_GIVEN = gl.constexpr(TURNS_AHEAD)

_launch_next = gluon.jit(early_launch.launch_next.fn)


@gluon.jit
def _make_barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for at in gl.static_range(COUNT):
        mbarrier.init(barriers.index(at), count=ARRIVALS)
    return barriers


# Numbers that differ from layer to layer: a kernel for each kind of them would take long to compile.
@gluon.jit(do_not_specialize=["rows", "features", "tiles", "per_tile", "row_tiles"])
def _stream_kernel(
    words, scales, x, bias, y, rows, features, tiles, per_tile, row_tiles,
    STAGES: gl.constexpr, SLOTS: gl.constexpr, TOGETHER: gl.constexpr, WORKERS: gl.constexpr,
    GROUPS: gl.constexpr, ADDS: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Every tile of the weight."""
    height: gl.constexpr = x.block_type.shape[0]
    width: gl.constexpr = x.block_type.shape[1]
    parts: gl.constexpr = _GROUP // width
    per_item: gl.constexpr = 1 if WORKERS else 2
    takers: gl.constexpr = WORKERS if WORKERS else 2
    codes = gl.allocate_shared_memory(gl.int32, [STAGES * per_item, GROUPS * LINE, LINE], words.layout)
    factors = gl.allocate_shared_memory(gl.int32, [STAGES * per_item, scales.block_type.shape[0], LINE], scales.layout)
    values = gl.allocate_shared_memory(x.dtype, [SLOTS * TOGETHER * parts, height, width], x.layout)
    ready, free = _make_barriers(STAGES, 1), _make_barriers(STAGES, takers)
    rows_ready, rows_free = _make_barriers(SLOTS, 1), _make_barriers(SLOTS, takers)
    _launch_next(EARLY)
    items = gl.cdiv(tiles, per_item) * row_tiles
    steps = gl.cdiv(items - gl.program_id(0), gl.num_programs(0)) * per_tile
    held = (codes, factors, ready, free, values, rows_ready, rows_free)
    out = (bias, y, rows, features, steps, per_tile)
    if WORKERS:
        # What the lanes of a warp write together lies in different banks.
        apart: gl.constexpr = gl.SwizzledSharedLayout(8, 1 if height >= 32 else 32 // height, height // 8, [1, 0])
        sums: gl.constexpr = TOGETHER // WORKERS * parts * (WORKERS - 1)
        given = gl.allocate_shared_memory(gl.float32, [_GIVEN * sums, _TILE, height], apart)
        between = (given, _make_barriers(_GIVEN, WORKERS - 1), _make_barriers(_GIVEN, 1))
    if WORKERS == 4:
        gl.warp_specialize(
            [
                (multiply_few, (held, between, out, row_tiles, 0, WORKERS, ADDS, EARLY)),
                (multiply_few, (held, between, out, row_tiles, 1, WORKERS, ADDS, EARLY)),
                (multiply_few, (held, between, out, row_tiles, 2, WORKERS, ADDS, EARLY)),
                (multiply_few, (held, between, out, row_tiles, 3, WORKERS, ADDS, EARLY)),
                (copy_weights, (words, scales, codes, factors, ready, free, steps, per_tile, row_tiles, per_item)),
                (copy_rows, (x, values, rows_ready, rows_free, steps, per_tile, row_tiles, GROUPS * _GROUP, EARLY)),
            ],
            [4, 4, 4, 1, 1],
            [112, 112, 112, 24, 24],
        )
    elif WORKERS == 2:
        gl.warp_specialize(
            [
                (multiply_few, (held, between, out, row_tiles, 0, WORKERS, ADDS, EARLY)),
                (multiply_few, (held, between, out, row_tiles, 1, WORKERS, ADDS, EARLY)),
                (copy_weights, (words, scales, codes, factors, ready, free, steps, per_tile, row_tiles, per_item)),
                (copy_rows, (x, values, rows_ready, rows_free, steps, per_tile, row_tiles, GROUPS * _GROUP, EARLY)),
            ],
            [4, 1, 1],
            [232, 24, 24],
        )
    else:
        gl.warp_specialize(
            [
                (multiply_many, (held, out, row_tiles, 0, ADDS, EARLY)),
                (multiply_many, (held, out, row_tiles, 1, ADDS, EARLY)),
                (copy_weights, (words, scales, codes, factors, ready, free, steps, per_tile, row_tiles, per_item)),
                (copy_rows, (x, values, rows_ready, rows_free, steps, per_tile, row_tiles, GROUPS * _GROUP, EARLY)),
            ],
            [4, 1, 1],
            [232, 24, 24],
        )


class StreamedProduct:
    """The product with one weight.

    Args:
        words, scales: see trtrun.kernels.torch.integers; on CUDA.
        bias: [out] in the dtype of activations, or None.
    """

    def __init__(self, words: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._bias = bias
        self._tiles, self._steps = words.shape[:2]
        self._parts = groups_of(scales)
        self._held = {
            at_once: tuple(_describe(it.view(-1, LINE.value), at_once * it.shape[2]) for it in (words, scales))
            for at_once in {steps_at_once(height, self._parts, self._steps) for height in HEIGHTS}
        }

    def __call__(self, x: torch.Tensor, height: int) -> torch.Tensor:
        """x [rows, in] of half precision, at least one row, which begin at multiples of 16 bytes → [rows, out] in its
        dtype, in tiles of `height` rows."""
        rows, features = len(x), self._tiles * TILE
        y = torch.empty((rows, features), dtype=x.dtype, device=x.device)
        at_once = steps_at_once(height, self._parts, self._steps)
        room = Room.of(height, self._parts, at_once)
        row_tiles = triton.cdiv(rows, height)
        items = triton.cdiv(self._tiles, 1 if room.workers else 2) * row_tiles
        block = [height, GROUP // self._parts]
        layout = gl.NVMMASharedLayout.get_default_for(block, _KINDS[x.dtype])
        described = TensorDescriptor(x, list(x.shape), [x.stride(0), 1], block, layout)
        _stream_kernel[(min(multiprocessors(y.device), items),)](
            *self._held[at_once], described, y if self._bias is None else self._bias, y,
            rows, features, self._tiles, self._steps // at_once, row_tiles,
            STAGES=room.stages, SLOTS=room.slots, TOGETHER=room.together, WORKERS=room.workers,
            GROUPS=at_once * STEP // GROUP,
            ADDS=self._bias is not None, num_warps=4, maxnreg=room.registers, **early_launch.early(y),
        )  # fmt: skip
        return y


_KINDS = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


def _describe(words: torch.Tensor, height: int) -> TensorDescriptor:
    """What the copy engine has to know to bring `height` lines of words."""
    block = [height, LINE.value]
    return TensorDescriptor(words, list(words.shape), [LINE.value, 1], block, gl.NVMMASharedLayout(128, 32, 2))
