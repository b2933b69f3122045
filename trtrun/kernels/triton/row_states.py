"""Where the states of a segment's rows stand, in one Triton kernel, and copies of states in all layers, in another
(kvcache/state_numbers.py has what torch makes of both).

Torch's operations are some thirty kernels of a few numbers each, in every forward: of one row of Qwen3.5-35B-A3B, whose
token takes 2.8 ms, each takes 1.5 µs, and a draft's steps have them, too.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from typing_extensions import override

from trtrun.kernels.triton.attention import paged_store
from trtrun.kernels.triton.delta_net.inputs import (
    END,
    FIRST,
    KEPT,
    LEADER,
    OWN_END,
    OWN_FIRST,
    PLACE,
    SAVED_AT,
    SETTLED,
    SLOT,
    SNAPSHOT,
)
from trtrun.kernels.triton.early_launch import begin, early
from trtrun.kvcache.blocks import NULL_BLOCK
from trtrun.kvcache.segments import AttentionSegment
from trtrun.kvcache.state_numbers import StateTables, TorchStates

_LINES = 11
"""Of numbers."""

_FEW, _MANY = (32, 8, 1), (128, 32, 4)
"""Rows and queries that are looked at together, and warps: few sizes make few kernels."""

_NULL_BLOCK = tl.constexpr(NULL_BLOCK)


@triton.jit
def _largest(a, b):
    return tl.maximum(a, b)


@triton.jit
def _find_own(
    positions, position_stride, tables, table_stride, row_of_block, kept, saved_at, snapshots, numbers, start, rows,
    queries, block_size, row, inside, QUERIES: tl.constexpr,
):  # fmt: skip
    """Put down what concerns rows alone."""
    line = row.to(tl.int64)
    step = tl.arange(0, QUERIES)
    none: tl.constexpr = 1 << 62
    end, first, before = row.to(tl.int64) * 0, row.to(tl.int64) * 0 + none, row * 0
    for begins in range(0, queries, QUERIES):
        at = begins + step
        mask = inside[:, None] & (at < queries)[None, :]
        position = tl.load(positions + line[:, None] * position_stride + at[None, :], mask=mask, other=-1)
        end = tl.maximum(end, tl.max(position, axis=1) + 1)
        real = tl.where(position < 0, none, position)
        least = tl.min(real, axis=1)
        # Padding stands in front of a row's tokens or behind them.
        where = tl.min(tl.where(real == least[:, None], at[None, :], queries), axis=1)
        before = tl.where(least < first, where, before)
        first = tl.minimum(first, least)
    is_fed = end > 0
    first = tl.where(is_fed, first, 0)
    block = tl.load(tables + line * table_stride + first // block_size, mask=inside & is_fed, other=_NULL_BLOCK)
    slot = tl.load(row_of_block + block, mask=inside, other=0)
    tl.store(numbers + SLOT * rows + row, slot, mask=inside)
    tl.store(numbers + KEPT * rows + row, tl.load(kept + slot, mask=inside, other=0), mask=inside)
    tl.store(numbers + SAVED_AT * rows + row, tl.load(saved_at + slot, mask=inside, other=0), mask=inside)
    tl.store(numbers + SNAPSHOT * rows + row, tl.load(snapshots + slot, mask=inside, other=0), mask=inside)
    tl.store(numbers + PLACE * rows + row, start + line * queries + before - first, mask=inside)
    tl.store(numbers + OWN_FIRST * rows + row, first, mask=inside)
    tl.store(numbers + OWN_END * rows + row, end, mask=inside)


@triton.jit
def _goes_on(numbers, rows, row, nobody):
    """Whether each of rows goes on where the one before it ends; neither the first nor what is behind the last does."""
    mask = (row > 0) & (row < rows)
    slot = tl.load(numbers + SLOT * rows + row, mask=mask, other=nobody)
    before = tl.load(numbers + SLOT * rows + row - 1, mask=mask, other=nobody)
    first = tl.load(numbers + OWN_FIRST * rows + row, mask=mask, other=-1)
    end = tl.load(numbers + OWN_END * rows + row - 1, mask=mask, other=0)
    return mask & (slot == before) & (slot != nobody) & (first == end)


@triton.jit(
    do_not_specialize=[
        "position_stride", "table_stride", "start", "rows", "queries", "block_size", "most_refed", "nobody",
    ],
    do_not_specialize_on_alignment=["positions", "tables", "numbers"],
)  # fmt: skip
def _find_kernel(
    positions, position_stride, tables, table_stride, row_of_block, kept, saved_at, snapshots, numbers, start, rows,
    queries, block_size, most_refed, nobody,
    BEGINS_AT_NEWEST: tl.constexpr, ROWS: tl.constexpr, QUERIES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """All rows of a segment in one program, as they form runs: what concerns each, then the first and the last one of
    each run, then what all of a run have."""
    begin(EARLY)
    for begins in range(0, rows, ROWS):
        row = begins + tl.arange(0, ROWS)
        _find_own(
            positions, position_stride, tables, table_stride, row_of_block, kept, saved_at, snapshots, numbers, start,
            rows, queries, block_size, row, row < rows, QUERIES,
        )  # fmt: skip
    tl.debug_barrier()
    newest = 0
    for begins in range(0, rows, ROWS):
        row = begins + tl.arange(0, ROWS)
        own = tl.where(_goes_on(numbers, rows, row, nobody), 0, row)
        leader = tl.maximum(tl.associative_scan(own, 0, _largest), newest)
        newest = tl.max(tl.where(row < rows, leader, 0))
        tl.store(numbers + LEADER * rows + row, leader.to(tl.int64), mask=row < rows)
        is_last = (row < rows) & (_goes_on(numbers, rows, row + 1, nobody) == 0)
        end = tl.load(numbers + OWN_END * rows + row, mask=is_last, other=0)
        tl.store(numbers + END * rows + leader, end, mask=is_last)
    tl.debug_barrier()
    for begins in range(0, rows, ROWS):
        row = begins + tl.arange(0, ROWS)
        inside = row < rows
        leader = tl.load(numbers + LEADER * rows + row, mask=inside, other=0)
        slot = tl.load(numbers + SLOT * rows + row, mask=inside, other=0)
        first = tl.load(numbers + OWN_FIRST * rows + leader, mask=inside, other=0)
        # Of a leader these two are what they will be, whoever of its run comes first.
        end = tl.load(numbers + END * rows + leader, mask=inside, other=0)
        place = tl.load(numbers + PLACE * rows + leader, mask=inside, other=0)
        # What no row writes, rounds that warm up, begins as far behind as a row's state may be.
        seen = tl.load(numbers + KEPT * rows + row, mask=inside, other=0)
        seen = tl.where(slot == nobody, tl.maximum(first - most_refed, 0), seen)
        settled = tl.maximum(seen, end - most_refed)
        if BEGINS_AT_NEWEST:
            settled = tl.maximum(settled, first)
        tl.store(numbers + KEPT * rows + row, seen, mask=inside)
        tl.store(numbers + FIRST * rows + row, first, mask=inside)
        tl.store(numbers + END * rows + row, end, mask=inside)
        tl.store(numbers + SETTLED * rows + row, settled, mask=inside)
        tl.store(numbers + PLACE * rows + row, place, mask=inside)
        tl.store(kept + slot, settled, mask=inside & (slot != nobody))


class TritonStates(TorchStates):
    """By Triton."""

    @override
    def find_states(self, segment: AttentionSegment, block_size: int, tables: StateTables) -> torch.Tensor:
        positions, of_blocks = segment.positions, segment.block_tables
        positions = positions if positions.stride(1) == 1 else positions.contiguous()
        of_blocks = of_blocks if of_blocks.stride(1) == 1 else of_blocks.contiguous()
        numbers = positions.new_empty((_LINES, segment.rows))
        rows, queries, warps = _FEW if segment.rows <= _FEW[0] and segment.queries <= 2 * _FEW[1] else _MANY
        _find_kernel[(1,)](
            positions, positions.stride(0), of_blocks, of_blocks.stride(0), tables.row_of_block, tables.kept,
            tables.saved_at, tables.snapshots, numbers, segment.start, segment.rows, segment.queries, block_size,
            tables.most_refed, tables.nobody,
            BEGINS_AT_NEWEST=tables.begins_at_newest, ROWS=rows, QUERIES=queries, num_warps=warps, **early(positions),
        )  # fmt: skip
        return numbers

    @override
    def copy_states(self, states: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
        layers, places = states.shape[:2]
        whole = states.view(layers, 1, places, 1, 1, -1)
        if paged_store.takes_blocks(whole):
            paged_store.copy_blocks(whole, source, target)
        else:
            super().copy_states(states, source, target)
