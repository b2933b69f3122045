"""Where the states of a segment's rows stand, found from the blocks that its tokens are written to, by torch.

A forward asks once, whatever its layers, and a graph asks each time that it is replayed: nothing is read back. It knows
numbers of rows. It does not know what a state is (row_states.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from typing_extensions import override

from trtrun.kvcache.blocks import NULL_BLOCK
from trtrun.kvcache.segments import AttentionSegment


@dataclass(frozen=True)
class StateTables:
    """What is known of rows' states.

    Attributes:
        row_of_block: [blocks] int64: the row that writes to each block; behind the last row where none does.
        kept: [rows + 1] int64: tokens that each row's state has seen; the last place is nobody's.
        saved_at: [rows + 1] int64: tokens behind which a snapshot is taken in this round; -1 where none is.
        snapshots: [rows + 1] int64: which one; the null snapshot where none is.
        most_refed, begins_at_newest: see `StateSpace`.
    """

    row_of_block: torch.Tensor
    kept: torch.Tensor
    saved_at: torch.Tensor
    snapshots: torch.Tensor
    most_refed: int
    begins_at_newest: bool

    @property
    def nobody(self) -> int:
        """The place of what no row writes."""
        return len(self.kept) - 1


class StateOperations(Protocol):
    """What is done with states on a device."""

    def find_states(self, segment: AttentionSegment, block_size: int, tables: StateTables) -> torch.Tensor:
        """`SegmentStates.numbers` of a segment, [11, R] int64; `tables.kept` moves up to what will be settled."""
        ...

    def copy_states(self, states: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy, in each layer of `states` [layers, places, ...], from places `source` to places `target`, [n] int64
        each; no place is among both, and none twice among the targets."""
        ...


class TorchStates(StateOperations):
    """By torch."""

    @override
    def find_states(self, segment: AttentionSegment, block_size: int, tables: StateTables) -> torch.Tensor:
        positions = segment.positions
        own_end = positions.amax(dim=1) + 1
        own_first = torch.where(positions < 0, own_end.unsqueeze(1), positions).amin(dim=1)
        block = segment.block_tables.gather(1, (own_first // block_size).unsqueeze(1)).squeeze(1)
        slots = tables.row_of_block.index_select(0, torch.where(own_end == 0, NULL_BLOCK, block))
        leaders = _leaders(slots, own_first, own_end, tables.nobody)
        first, end = own_first.index_select(0, leaders), torch.zeros_like(own_end)
        end = end.scatter_reduce_(0, leaders, own_end, "amax").index_select(0, leaders)
        # What no row writes, rounds that warm up, begins as far behind as a row's state may be.
        behind = (first - tables.most_refed).clamp(min=0)
        kept = torch.where(slots == tables.nobody, behind, tables.kept.index_select(0, slots))
        settled = torch.maximum(kept, end - tables.most_refed)
        if tables.begins_at_newest:
            settled = torch.maximum(settled, first)
        tables.kept.index_copy_(0, slots, settled)
        saved_at, snapshots = (part.index_select(0, slots) for part in (tables.saved_at, tables.snapshots))
        # Padding stands in front of a row's tokens or behind them.
        before = (positions == own_first.unsqueeze(1)).to(torch.int64).argmax(dim=1)
        starts = torch.arange(segment.start, segment.stop, segment.queries, device=first.device)
        places = (starts + before - own_first).index_select(0, leaders)
        of_run = slots, kept, first, end, settled, saved_at, snapshots, places, leaders
        return torch.stack((*of_run, own_first, own_end))

    @override
    def copy_states(self, states: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
        for layer in states:
            layer.index_copy_(0, target, layer.index_select(0, source))


def _leaders(slots: torch.Tensor, first: torch.Tensor, end: torch.Tensor, nobody: int) -> torch.Tensor:
    """[R] int64: of each row the first one of its run."""
    rows = torch.arange(len(slots), device=slots.device)
    if len(slots) == 1:
        return rows
    goes_on = (slots[1:] == slots[:-1]) & (first[1:] == end[:-1]) & (slots[1:] != nobody)
    return torch.cat((rows[:1], torch.where(goes_on, 0, rows[1:]))).cummax(dim=0).values
