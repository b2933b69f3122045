"""Attention of prompts over the paged KV store for GPUs of compute capability 9.0, in Triton's Gluon.

A program goes from tile to tile of queries. Two groups of four warps attend with half of a tile each, so that the
matrix units multiply for one while the other has its softmax (FlashAttention-3, arXiv:2407.08608), and one warp copies
keys and values ahead of both. It rounds where the kernel of `paged_attention` rounds: a query has the same bits from
both. It knows tensors; it does not know who takes which.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from trtrun.kernels.triton import early_launch
from trtrun.kernels.triton.attention.attention_tiles import SHARE
from trtrun.kernels.triton.attention.prompt_steps import (
    HALF,
    KEYS,
    PANEL,
    TILE,
    add_share,
    add_sinks,
    copy,
    extent,
    nothing_yet,
    take_tile,
    tile_of,
    weigh,
)
from trtrun.kernels.triton.support import multiprocessors

_STAGES = 2
"""Steps whose keys and values are in shared memory at once."""

_REGISTERS = 168
"""Registers of a thread, in the mean. Three groups of four warps have so many; those that attend take most of the
third's."""

begin = gluon.jit(early_launch.begin.fn)


@gluon.jit
def _sum_tile(
    mine, keys, values, barriers, own, of_sinks, first_own, last, start, stop, window, stretch, step,
    HEAD: gl.constexpr, SHARE: gl.constexpr, HAS_SINKS: gl.constexpr,
):  # fmt: skip
    """Half of a tile over all its steps: totals of weights, sums of values [HALF, HEAD], and steps so far."""
    key_ready, key_free, value_ready, value_free, _settled = barriers
    stages: gl.constexpr = keys.shape[0]
    kind: gl.constexpr = keys.dtype
    scored: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    summed: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD, 16])
    weighed: gl.constexpr = gl.DotOperandLayout(0, summed, 2)
    column = gl.arange(0, KEYS, layout=gl.SliceLayout(0, scored))
    empty = gl.zeros([HALF, KEYS], gl.float32, layout=scored)
    peak, total, gathered = nothing_yet(scored, summed, HALF, HEAD)
    all_peak, all_total, all_gathered = peak, total, gathered
    stage = step % stages
    mbarrier.wait(key_ready.index(stage), (step // stages) & 1)
    scores = warpgroup_mma(mine, keys.index(stage).permute((1, 0)), empty, use_acc=False)
    mbarrier.arrive(key_free.index(stage), count=1)
    for first in range(start, stop - KEYS, KEYS):
        if (first % SHARE == 0) & (first > start):  # a share is done
            all_peak, all_total, all_gathered = add_share(all_peak, all_total, all_gathered, peak, total, gathered)
            peak, total, gathered = nothing_yet(scored, summed, HALF, HEAD)
        weights, peak, total, gathered = weigh(
            scores, peak, total, gathered, own, column, first, first_own, last, window, stretch
        )
        held = gl.convert_layout(weights.to(kind), weighed)
        stage, phase = step % stages, (step // stages) & 1
        step += 1
        following = step % stages
        mbarrier.wait(value_ready.index(stage), phase)
        pending = warpgroup_mma(held, values.index(stage), gathered, is_async=True)
        # The next scores right behind these sums, so that the matrix units do not wait in between.
        mbarrier.wait(key_ready.index(following), (step // stages) & 1)
        scores = warpgroup_mma(mine, keys.index(following).permute((1, 0)), empty, use_acc=False, is_async=True)
        gathered, scores, held = warpgroup_mma_wait(0, deps=(pending, scores, held))
        mbarrier.arrive(key_free.index(following), count=1)
        mbarrier.arrive(value_free.index(stage), count=1)
    first = (stop - 1) // KEYS * KEYS
    if (first % SHARE == 0) & (first > start):
        all_peak, all_total, all_gathered = add_share(all_peak, all_total, all_gathered, peak, total, gathered)
        peak, total, gathered = nothing_yet(scored, summed, HALF, HEAD)
    weights, peak, total, gathered = weigh(
        scores, peak, total, gathered, own, column, first, first_own, last, window, stretch
    )
    stage = step % stages
    mbarrier.wait(value_ready.index(stage), (step // stages) & 1)
    gathered = warpgroup_mma(gl.convert_layout(weights.to(kind), weighed), values.index(stage), gathered)
    mbarrier.arrive(value_free.index(stage), count=1)
    peak, total, gathered = add_share(all_peak, all_total, all_gathered, peak, total, gathered)
    if HAS_SINKS:
        total, gathered = add_sinks(peak, total, gathered, of_sinks)
    return total, gathered, step + 1


@gluon.jit
def _places(row, kv_head, first_place, queries, group, layout: gl.constexpr):
    """Query, token and head of each place of half a tile: [HALF] in a layout."""
    place = first_place + gl.arange(0, HALF, layout=layout)
    index = place // group
    return index, row.to(gl.int64) * queries + index, kv_head * group + place % group


@gluon.jit
def _attend(
    half: gl.constexpr, query, output, positions, sinks, query_shared, keys, values, barriers, board,
    rows, parts, queries, kv_heads, group, window, stretch, query_token, query_head, position_row,
    position_query,
    HEAD: gl.constexpr, SHARE: gl.constexpr, HAS_SINKS: gl.constexpr,
):  # fmt: skip
    """A group of four warps, which attends with half of each tile."""
    scored: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    summed: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD, 16])
    inner: gl.constexpr = gl.SliceLayout(1, scored)
    outer: gl.constexpr = gl.SliceLayout(1, summed)
    lines: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    line: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    mine = query_shared.index(half)
    turn, step = 0, 0
    number = take_tile(turn, board)
    while number >= 0:
        row, kv_head, tile_place = tile_of(number, rows, parts, kv_heads)
        first_place = tile_place + half * HALF
        index, token, head = _places(row, kv_head, first_place, queries, group, gl.SliceLayout(1, lines))
        element = gl.arange(0, HEAD, layout=gl.SliceLayout(0, lines))
        taken = query + (token * query_token + head * query_head)[:, None] + element[None, :]
        mine.store(gl.load(taken, mask=(index < queries)[:, None], other=0.0))
        fence_async_shared()

        places = positions + row * position_row
        first_own, last, start, stop = extent(places, position_query, tile_place, group, queries, window, line)
        index, _, head = _places(row, kv_head, first_place, queries, group, inner)
        own = gl.load(places + index * position_query, mask=index < queries, other=0)
        own = gl.maximum(own, 0).to(gl.int32)  # padding sees key 0 alone
        of_sinks = own
        if HAS_SINKS:
            of_sinks = gl.load(sinks + head, mask=index < queries, other=float("-inf"))
        total, gathered, step = _sum_tile(
            mine, keys, values, barriers, own, of_sinks, first_own, last, start, stop, window, stretch, step,
            HEAD, SHARE, HAS_SINKS,
        )  # fmt: skip

        gathered = gathered / gl.convert_layout(gl.where(total == 0.0, 1.0, total), outer)[:, None]
        index, token, head = _places(row, kv_head, first_place, queries, group, outer)
        element = gl.arange(0, HEAD, layout=gl.SliceLayout(0, summed))
        target = output + (token * (kv_heads * group) + head)[:, None] * HEAD + element[None, :]
        gl.store(target, gathered.to(keys.dtype), mask=(index < queries)[:, None])
        turn += 1
        number = take_tile(turn, board)


# Numbers that change from round to round or from model to model: a kernel for each kind of them takes long to compile.
@gluon.jit(
    do_not_specialize=[
        "rows", "parts", "queries", "kv_heads", "group", "window", "shift", "position_row", "position_query",
        "table_row",
    ],
    do_not_specialize_on_alignment=["tables", "positions"],
)  # fmt: skip
def _prompt_kernel(
    store, query, output, tables, positions, sinks, taken, scale,
    query_token, query_head, position_row, position_query, table_row,
    rows, parts, queries, kv_heads, group, window, shift,
    BLOCK: gl.constexpr, HEAD: gl.constexpr, SHARE: gl.constexpr, STAGES: gl.constexpr, HAS_SINKS: gl.constexpr,
    EARLY: gl.constexpr,
):  # fmt: skip
    """All tiles of all rows and KV heads, by as many programs as there are multiprocessors."""
    begin(EARLY)
    kind: gl.constexpr = store.dtype
    swizzled: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HALF, HEAD], kind)
    query_shared = gl.allocate_shared_memory(kind, [2, HALF, HEAD], swizzled)
    keys = gl.allocate_shared_memory(kind, [STAGES, KEYS, HEAD], swizzled)
    values = gl.allocate_shared_memory(kind, [STAGES, KEYS, HEAD], swizzled)
    key_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    key_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    value_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    value_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    settled = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(key_ready.index(stage), count=1)
        mbarrier.init(key_free.index(stage), count=2)
        mbarrier.init(value_ready.index(stage), count=1)
        mbarrier.init(value_free.index(stage), count=2)
    mbarrier.init(settled, count=1)

    numbers = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    given = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    read = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(2):
        mbarrier.init(given.index(slot), count=1)
        mbarrier.init(read.index(slot), count=2)

    barriers = (key_ready, key_free, value_ready, value_free, settled)
    board = (numbers, given, read)
    stretch = scale * 1.4426950408889634  # exp2 is the faster one: the factor is log2(e)
    gl.warp_specialize(
        [
            (_attend, (
                0, query, output, positions, sinks, query_shared, keys, values, barriers, board, rows, parts, queries,
                kv_heads, group, window, stretch, query_token, query_head, position_row, position_query, HEAD, SHARE,
                HAS_SINKS,
            )),
            (_attend, (
                1, query, output, positions, sinks, query_shared, keys, values, barriers, board, rows, parts, queries,
                kv_heads, group, window, stretch, query_token, query_head, position_row, position_query, HEAD, SHARE,
                HAS_SINKS,
            )),
            (copy, (
                store, tables, positions, taken, keys, values, barriers, board, rows, parts, queries, kv_heads, group,
                window, shift, position_row, position_query, table_row, BLOCK, HEAD,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def attend(
    query: torch.Tensor,
    store_layer: torch.Tensor,
    tables: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
    window: int,
    output: torch.Tensor,
    *,
    sinks: torch.Tensor | None = None,
) -> None:
    """Attend for rows of a prompt, where `suitability.is_chosen`.

    Args:
        query: [rows * queries, heads, head], rotated, bfloat16 or float16, on CUDA; each head contiguous.
        store_layer: [2, blocks, kv_heads, block, head], contiguous.
        tables: [rows, blocks of a row] int64.
        positions: [rows, queries] int64; -1 is padding, which gets what it sees of key 0.
        scale: of the scores.
        window: keys that a query sees.
        output: [rows * queries, heads, head], contiguous.
        sinks: [heads] float32, as of AttentionCall.
    """
    _, num_blocks, kv_heads, block_size, head_dim = store_layer.shape
    rows, queries = positions.shape
    group = query.shape[1] // kv_heads
    parts = triton.cdiv(queries * group, TILE.value)
    kind = gl.bfloat16 if query.dtype is torch.bfloat16 else gl.float16
    layout = gl.NVMMASharedLayout.get_default_for([block_size, PANEL.value], kind)
    lines = num_blocks * kv_heads * block_size
    store = TensorDescriptor(store_layer, [2 * lines, head_dim], [head_dim, 1], [block_size, PANEL.value], layout)
    taken = torch.zeros(1, dtype=torch.int32, device=query.device)
    programs = min(multiprocessors(query.device), rows * parts * kv_heads)
    _prompt_kernel[(programs,)](
        store, query, output, tables, positions, taken if sinks is None else sinks, taken, scale,
        query.stride(0), query.stride(1), positions.stride(0), positions.stride(1), tables.stride(0),
        rows, parts, queries, kv_heads, group, window, lines,
        BLOCK=block_size, HEAD=head_dim, SHARE=SHARE, STAGES=_STAGES, HAS_SINKS=sinks is not None, num_warps=4,
        maxnreg=_REGISTERS, **early_launch.early(query),
    )  # fmt: skip
