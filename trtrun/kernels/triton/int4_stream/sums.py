"""The warps of the product with a weight of 4 bits: some bring words, scales and rows into shared memory, ahead of
those that widen codes and multiply.

Sums are made of groups of inputs, and of those in the order of the inputs. For few rows some groups of four warps share
the inputs of a tile, and all but the first pass their sums to it; for many rows each has a tile of its own.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, mma_v2, warpgroup_mma, warpgroup_mma_wait

from trtrun.kernels.torch.integers import GROUP, STEP, TILE
from trtrun.kernels.triton import early_launch
from trtrun.kernels.triton.gluon_names import copy_to_shared, reinterpret
from trtrun.kernels.triton.int4_stream.tiles import MOST_BY_WARPS, TURNS_AHEAD
from trtrun.kernels.triton.int4_stream.words import (
    LINE,
    factor_of,
    in_parts,
    read_group,
    read_scales,
    read_words,
    widen,
)

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


_TILE, _GROUP, _GROUPS = gl.constexpr(TILE), gl.constexpr(GROUP), gl.constexpr(STEP // GROUP)
_MOST_BY_WARPS, _AHEAD = gl.constexpr(MOST_BY_WARPS), gl.constexpr(TURNS_AHEAD)


@gluon.jit
def _write(total, bias, y, tile, row_tile, rows, features, LAYOUT: gl.constexpr, ADDS: gl.constexpr):
    """Sums, rounded, plus the bias, to y [rows, features]."""
    height: gl.constexpr = total.shape[1]
    feature = tile * _TILE + gl.arange(0, _TILE, layout=gl.SliceLayout(1, LAYOUT))
    row = row_tile * height + gl.arange(0, height, layout=gl.SliceLayout(0, LAYOUT))
    is_feature, is_row = feature < features, row < rows
    result = total.to(y.dtype.element_ty)
    if ADDS:
        added = gl.load(bias + feature, mask=is_feature, other=0.0).to(gl.float32)[:, None]
        result = (result.to(gl.float32) + added).to(y.dtype.element_ty)
    place = y + row[None, :].to(gl.int64) * features + feature[:, None]
    gl.store(place, result, mask=is_row[None, :] & is_feature[:, None])


@gluon.jit
def _add(total, sums, scales, LAYOUT: gl.constexpr, KIND: gl.constexpr):
    """Sums, times their scales, to those before."""
    factor = factor_of(scales, gl.SliceLayout(1, LAYOUT), KIND).expand_dims(1)
    return gl.fma(sums, factor.broadcast_to(total.shape), total)


@gluon.jit
def _begin(weights, values, place, nothing, LAYOUT: gl.constexpr):
    """Begin to sum up a group of inputs."""
    theirs = values.index(place).permute((1, 0))
    if nothing.shape[1] <= _MOST_BY_WARPS:
        return mma_v2(weights, theirs.load(gl.DotOperandLayout(1, LAYOUT, 2)), nothing)
    else:
        return warpgroup_mma(weights, theirs, nothing, use_acc=False, is_async=True)


@gluon.jit
def _begin_parts(weights, values, group, nothing, LAYOUT: gl.constexpr):
    """Begin to sum up all parts of a group of 128 inputs, which are next to each other."""
    first = group * len(weights)
    if len(weights) == 1:
        return (_begin(weights[0], values, first, nothing, LAYOUT),)
    elif len(weights) == 2:
        lower = _begin(weights[0], values, first, nothing, LAYOUT)
        return lower, _begin(weights[1], values, first + 1, nothing, LAYOUT)
    else:
        lower = _begin_parts(weights[:2], values, group * 2, nothing, LAYOUT)
        return lower + _begin_parts(weights[2:], values, group * 2 + 1, nothing, LAYOUT)


@gluon.jit
def _read_next(codes, factors, scales, stage, after, GROUP: gl.constexpr, WHICH: gl.constexpr, WORKERS: gl.constexpr):
    """Words that are widened after those of a group, of its step or of the next, and their scales."""
    groups: gl.constexpr = codes.shape[1] // LINE
    if groups > GROUP + WORKERS:
        return read_words(codes.index(stage).slice((GROUP + WORKERS) * LINE, LINE)), in_parts(scales[GROUP + WORKERS])
    else:
        words = read_words(codes.index(after).slice(WHICH * LINE, LINE))
        return words, in_parts(read_scales(factors.index(after), groups)[WHICH])


@gluon.jit
def _give(between, sums, number, WHICH: gl.constexpr, WORKERS: gl.constexpr):
    """Hand the sums of a turn over."""
    given, ready, free = between
    place = number % _AHEAD
    mbarrier.wait(free.index(place), (number // _AHEAD + 1) & 1, pred=number >= _AHEAD)
    for each in gl.static_range(len(sums)):
        given.index((place * (WORKERS - 1) + WHICH - 1) * len(sums) + each).store(sums[each])
    mbarrier.arrive(ready.index(place), count=1)


@gluon.jit
def _add_all(
    total, sums, between, scales, number, FIRST: gl.constexpr, WORKERS: gl.constexpr,
    LAYOUT: gl.constexpr, KIND: gl.constexpr,
):  # fmt: skip
    """The sums of a turn to those before, own ones and given ones: groups from FIRST on, in their order."""
    given, ready, free = between
    place = number % _AHEAD
    mbarrier.wait(ready.index(place), (number // _AHEAD) & 1)
    parts: gl.constexpr = len(in_parts(scales[0]))
    for group in gl.static_range(len(sums) // parts * WORKERS):
        of_parts = in_parts(scales[FIRST + group])
        for part in gl.static_range(parts):
            if group % WORKERS == 0:
                total = _add(total, sums[group // WORKERS * parts + part], of_parts[part], LAYOUT, KIND)
            else:
                first = (place * (WORKERS - 1) + group % WORKERS - 1) * len(sums)
                others = given.index(first + group // WORKERS * parts + part).load(LAYOUT)
                total = _add(total, others, of_parts[part], LAYOUT, KIND)
    mbarrier.arrive(free.index(place), count=1)
    return total


@gluon.jit
def multiply_few(
    held,
    between,
    out,
    row_tiles,
    WHICH: gl.constexpr,
    WORKERS: gl.constexpr,
    ADDS: gl.constexpr,
    EARLY: gl.constexpr,
):
    """One of some groups of four warps, which have the groups of inputs of a tile by turns. The next codes are widened
    while the matrix units are busy."""
    codes, factors, ready, free, values, rows_ready, rows_free = held
    bias, y, rows, features, steps, per_tile = out
    stages: gl.constexpr = ready.shape[0]
    slots: gl.constexpr = rows_ready.shape[0]
    height: gl.constexpr = values.shape[1]
    kind: gl.constexpr = values.dtype
    parts: gl.constexpr = _GROUP // values.shape[2]
    together: gl.constexpr = values.shape[0] // slots // parts
    groups: gl.constexpr = codes.shape[1] // LINE
    turns: gl.constexpr = groups // together
    by_warps: gl.constexpr = height <= _MOST_BY_WARPS
    layout: gl.constexpr = (
        gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8]) if by_warps
        else gl.NVMMADistributedLayout([3, 0], [4, 1], [16, height, 16])
    )  # fmt: skip
    mine: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    nothing = gl.zeros([_TILE, height], gl.float32, layout=layout)
    wait_for_all(EARLY)
    mbarrier.wait(ready.index(0), 0)
    words = read_words(codes.index(0).slice(WHICH * LINE, LINE))
    weights = widen(words, in_parts(read_scales(factors.index(0), groups)[WHICH]), mine, kind)
    for start in range(0, steps, per_tile):
        total = nothing
        for step in range(start, start + per_tile):
            stage, after = step % stages, (step + 1) % stages
            scales = read_scales(factors.index(stage), groups)
            for turn in gl.static_range(turns):
                number = step * turns + turn
                slot = number % slots
                mbarrier.wait(rows_ready.index(slot), (number // slots) & 1)
                if turn == turns - 1:
                    # Behind the last step nothing comes: what is widened then nobody multiplies.
                    mbarrier.wait(ready.index(after), ((step + 1) // stages) & 1, pred=step + 1 < steps)
                for group in gl.static_range(turn * together + WHICH, (turn + 1) * together, WORKERS):
                    if not by_warps:
                        words, of_parts = _read_next(codes, factors, scales, stage, after, group, WHICH, WORKERS)
                    begun = _begin_parts(weights, values, slot * together + group % together, nothing, layout)
                    if group < turn * together + WORKERS:
                        sums = begun
                    else:
                        sums += begun
                    if by_warps:  # registers are few here
                        words, of_parts = _read_next(codes, factors, scales, stage, after, group, WHICH, WORKERS)
                    elif parts == 1 and group >= turn * together + WORKERS:
                        # Nothing has to be waited for yet; but without it ptxas has each instruction wait for the last.
                        sums = (warpgroup_mma_wait(1, deps=(sums[0],)), sums[1])
                    weights = widen(words, of_parts, mine, kind)
                if not by_warps:
                    sums = warpgroup_mma_wait(0, deps=sums)
                    if together // WORKERS * parts == 1:
                        sums = (sums,)
                mbarrier.arrive(rows_free.index(slot), count=1)
                if WHICH > 0:
                    _give(between, sums, number, WHICH, WORKERS)
                else:
                    total = _add_all(total, sums, between, scales, number, turn * together, WORKERS, layout, kind)
            mbarrier.arrive(free.index(stage), count=1)
        if WHICH == 0:
            item = gl.program_id(0) + start // per_tile * gl.num_programs(0)
            _write(total, bias, y, item // row_tiles, item % row_tiles, rows, features, layout, ADDS)


@gluon.jit
def multiply_many(held, out, row_tiles, WHICH: gl.constexpr, ADDS: gl.constexpr, EARLY: gl.constexpr):
    """One of two groups of four warps, of which each has a tile. It widens while the other multiplies."""
    codes, factors, ready, free, values, rows_ready, rows_free = held
    bias, y, rows, features, steps, per_tile = out
    stages: gl.constexpr = ready.shape[0]
    slots: gl.constexpr = rows_ready.shape[0]
    height: gl.constexpr = values.shape[1]
    kind: gl.constexpr = values.dtype
    parts: gl.constexpr = _GROUP // values.shape[2]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, height, 16])
    mine: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    nothing = gl.zeros([_TILE, height], gl.float32, layout=layout)
    lines = reinterpret(codes, gl.int32, [codes.shape[0] * _GROUPS, LINE, LINE], codes.layout)
    wait_for_all(EARLY)
    for start in range(0, steps, per_tile):
        total = nothing
        for turn in range(start * _GROUPS, (start + per_tile) * _GROUPS):
            step, group, slot = turn // _GROUPS, turn % _GROUPS, turn % slots
            stage = step % stages
            mbarrier.wait(ready.index(stage), (step // stages) & 1)
            place = stage * 2 + WHICH
            of_parts = in_parts(read_group(factors.index(place), group))
            weights = widen(read_words(lines.index(place * _GROUPS + group)), of_parts, mine, kind)
            mbarrier.wait(rows_ready.index(slot), (turn // slots) & 1)
            for part in gl.static_range(parts):
                sums = _begin(weights[part], values, slot * parts + part, nothing, layout)
                sums = warpgroup_mma_wait(0, deps=(sums,))
                total = _add(total, sums, of_parts[part], layout, kind)
            mbarrier.arrive(rows_free.index(slot), count=1)
            mbarrier.arrive(free.index(stage), count=1, pred=group == _GROUPS - 1)
        item = gl.program_id(0) + start // per_tile * gl.num_programs(0)
        _write(total, bias, y, item // row_tiles * 2 + WHICH, item % row_tiles, rows, features, layout, ADDS)
