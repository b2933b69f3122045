"""States of rows: what layers keep that hold one value a row in place of keys and values of its tokens.

A state that has seen a rejected token cannot forget it. So what is kept of a row is a state some tokens behind its
newest one, and beside it what each token since has brought: a forward goes on from there, through the tokens that
turned out right, to those that it is fed. Which these are says the position at which it begins: what stands before it
counts, as it does for keys and values, and what was fed there or behind it before is fed anew. Nothing is rolled back,
and no verdict has to be told: a state moves up behind the tokens that can no longer be fed again.

A snapshot is a state as it is behind a row's first so many tokens, from which other rows with the same beginning may
go on.

Whose state a token belongs to says the block that it stands in, as a row writes to blocks that are its own. So what
forwards take, and graphs of them, is the same with states and without. It does not know what a token does to a state
(layers), which rows there are, or when they come and go.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from trtrun.kvcache.blocks import NULL_BLOCK
from trtrun.kvcache.segments import AttentionBatch, AttentionSegment
from trtrun.kvcache.specs import RecurrentState, StateDtype
from trtrun.tensors import device_integers

_NEVER = -1
_COPIES = 4
"""Of a layer's states that it computes in: as they were, changed, what is summed, and what goes on."""


@dataclass(frozen=True)
class StateSpace:
    """Rows that have states, and how far behind these stay.

    Attributes:
        max_rows: rows of requests, and guesses behind them.
        most_refed: tokens at a row's end that a forward may feed again, or in place of which it may feed others; what
            each of so many tokens brings is kept.
        num_snapshots: to be kept, the null snapshot among them.
        begins_at_newest: whether every forward of a row begins behind tokens that are sure: then a state moves up to
            there, and little of what is kept is gone through again.
        guess_blocks: blocks of each guess, whose rows are the last ones.
        dtype: in which the parts of states are kept that may be narrow.
    """

    max_rows: int
    most_refed: int
    begins_at_newest: bool
    num_snapshots: int = 1
    guess_blocks: Sequence[Sequence[int]] = ()
    dtype: StateDtype = "float32"

    def num_bytes(self, specs: Sequence[RecurrentState]) -> int:
        """Bytes of all rows' states in layers with such ones, of what tokens bring, of snapshots, and of copies that a
        layer computes in."""
        copies = _COPIES * self.max_rows * max((spec.state_bytes("float32") for spec in specs), default=0)
        states = (self.max_rows + 1 + self.num_snapshots) * sum(spec.state_bytes(self.dtype) for spec in specs)
        brought = (self.max_rows + 1) * self.most_refed * sum(spec.input_numbers for spec in specs)
        return states + brought * torch.float32.itemsize + copies


@dataclass(frozen=True)
class SegmentStates:
    """Where the states of one segment's rows stand. Rows that go on where the one before ends, tiles of a prompt, are
    a run, which is gone through as one row; each of them has the numbers of its run.

    Attributes:
        segment: of the forward.
        numbers: [11, R] int64: all that follow, in their order.
        slots: [R] int64: of each row the place of its state; the last place where it is fed nothing.
        kept: [R] int64: tokens that the state has seen.
        first, end: [R] int64: the first position that is fed, and one behind the last.
        settled: [R] int64: tokens that it is to have seen when the forward is done.
        saved_at: [R] int64: tokens behind which a snapshot is taken in this round; -1 where none is.
        snapshots: [R] int64: which one; the null snapshot where none is.
        places: [R] int64: which of the forward's tokens stands at position 0, as if it were fed.
        leaders: [R] int64: the first row of the run.
        own_first, own_end: [R] int64: of the row alone.
    """

    segment: AttentionSegment
    numbers: torch.Tensor
    slots: torch.Tensor
    kept: torch.Tensor
    first: torch.Tensor
    end: torch.Tensor
    settled: torch.Tensor
    saved_at: torch.Tensor
    snapshots: torch.Tensor
    places: torch.Tensor
    leaders: torch.Tensor
    own_first: torch.Tensor
    own_end: torch.Tensor

    @classmethod
    def of_numbers(cls, segment: AttentionSegment, numbers: torch.Tensor) -> SegmentStates:
        """All that `numbers` has, by its names."""
        return cls(segment, numbers, *numbers.unbind())


class LayerStates:
    """The states of one layer.

    Attributes:
        states: of each part of a state [rows + 1, *shape], as its spec has them; the last one is nobody's.
        inputs: of each kind [rows + 1, most_refed, *shape] float32: what the token at position p brought is at p modulo
            most_refed.
        snapshots: of each part of a state [snapshots, *shape], likewise; the first is nobody's.
    """

    def __init__(self, spec: RecurrentState, space: StateSpace, device: torch.device) -> None:
        rows = space.max_rows + 1
        dtypes = [getattr(torch, name) for name in spec.part_dtypes(space.dtype)]
        parts = list(zip(spec.parts, dtypes, strict=True))
        self.states = [torch.zeros((rows, *shape), dtype=dtype, device=device) for shape, dtype in parts]
        self.inputs = [torch.zeros((rows, space.most_refed, *shape), device=device) for shape in spec.inputs]
        saved = space.num_snapshots
        self.snapshots = [torch.zeros((saved, *shape), dtype=dtype, device=device) for shape, dtype in parts]

    @property
    def num_bytes(self) -> int:
        return sum(part.numel() * part.element_size() for part in (*self.states, *self.inputs, *self.snapshots))


class RowStates:
    """The states of all rows in all layers that have any.

    Attributes:
        layers: by index of the model's layer.
    """

    def __init__(
        self, specs: dict[int, RecurrentState], space: StateSpace, num_blocks: int, device: torch.device
    ) -> None:
        """Make states of zeros, of rows that are written to `num_blocks` blocks."""
        self._space = space
        self._nobody = space.max_rows
        self.layers = {index: LayerStates(spec, space, device) for index, spec in specs.items()}
        self._kept = torch.zeros(space.max_rows + 1, dtype=torch.int64, device=device)
        self._saved_at = torch.full_like(self._kept, _NEVER)
        self._snapshots = torch.zeros_like(self._kept)
        self._saves = False
        self._row_of_block = torch.full((num_blocks,), self._nobody, dtype=torch.int64, device=device)
        first = space.max_rows - len(space.guess_blocks)
        for number, blocks in enumerate(space.guess_blocks):
            self._row_of_block[list(blocks)] = first + number

    @property
    def num_bytes(self) -> int:
        """Bytes of all states, and of what tokens bring."""
        return sum(layer.num_bytes for layer in self.layers.values())

    def announce(self, updates: np.ndarray) -> None:
        """Take in blocks that rows get: [n, 3] whole numbers, row, index in its table, and block."""
        if len(updates):
            row, _, block = torch.from_numpy(updates.astype(np.int64).T.copy()).to(self._kept.device).unbind()
            self._row_of_block.index_copy_(0, block, row)

    def begin(self, starts: Sequence[tuple[int, int, int]]) -> None:
        """Have rows begin anew: of each its number, how many tokens its state has seen, and the snapshot that it is;
        the null snapshot has seen nothing, and is zeros."""
        if not starts:
            return
        rows, kept, snapshots = device_integers(list(zip(*starts, strict=True)), self._kept.device).unbind()
        self._kept.index_copy_(0, rows, kept)
        for layer in self.layers.values():
            for state, snapshot in zip(layer.states, layer.snapshots, strict=True):
                state.index_copy_(0, rows, snapshot.index_select(0, snapshots))

    def save(self, saves: Sequence[tuple[int, int, int]]) -> None:
        """Take snapshots in the round that begins, and no others: of each the row, behind how many tokens, and which
        one it is."""
        if self._saves:
            self._saved_at.fill_(_NEVER)
            self._snapshots.zero_()
        self._saves = bool(saves)
        if saves:
            rows, places, snapshots = device_integers(list(zip(*saves, strict=True)), self._kept.device).unbind()
            self._saved_at.index_copy_(0, rows, places)
            self._snapshots.index_copy_(0, rows, snapshots)

    def share(self, rows: Sequence[int], own: Sequence[int]) -> None:
        """Have each of the rows `own`, none of which is among the others, go on from where the row beside it in `rows`
        stands."""
        source, target = device_integers([list(rows), list(own)], self._kept.device)
        for part in (self._kept, *(part for layer in self.layers.values() for part in (*layer.states, *layer.inputs))):
            part.index_copy_(0, target, part.index_select(0, source))

    def of_batch(self, batch: AttentionBatch) -> Sequence[SegmentStates]:
        """Find the states of a forward's rows, and move up what is sure."""
        return [self._of_segment(segment, batch.block_size) for segment in batch.segments]

    def _of_segment(self, segment: AttentionSegment, block_size: int) -> SegmentStates:
        positions = segment.positions
        own_end = positions.amax(dim=1) + 1
        own_first = torch.where(positions < 0, own_end.unsqueeze(1), positions).amin(dim=1)
        block = segment.block_tables.gather(1, (own_first // block_size).unsqueeze(1)).squeeze(1)
        slots = self._row_of_block.index_select(0, torch.where(own_end == 0, NULL_BLOCK, block))
        leaders = self._leaders(slots, own_first, own_end)
        first, end = own_first.index_select(0, leaders), torch.zeros_like(own_end)
        end = end.scatter_reduce_(0, leaders, own_end, "amax").index_select(0, leaders)
        # What no row writes, rounds that warm up, begins as far behind as a row's state may be.
        behind = (first - self._space.most_refed).clamp(min=0)
        kept = torch.where(slots == self._nobody, behind, self._kept.index_select(0, slots))
        settled = torch.maximum(kept, end - self._space.most_refed)
        if self._space.begins_at_newest:
            settled = torch.maximum(settled, first)
        self._kept.index_copy_(0, slots, settled)
        saved_at, snapshots = (part.index_select(0, slots) for part in (self._saved_at, self._snapshots))
        # Padding stands in front of a row's tokens or behind them.
        before = (positions == own_first.unsqueeze(1)).to(torch.int64).argmax(dim=1)
        starts = torch.arange(segment.start, segment.stop, segment.queries, device=first.device)
        places = (starts + before - own_first).index_select(0, leaders)
        of_run = slots, kept, first, end, settled, saved_at, snapshots, places, leaders
        return SegmentStates.of_numbers(segment, torch.stack((*of_run, own_first, own_end)))

    def _leaders(self, slots: torch.Tensor, first: torch.Tensor, end: torch.Tensor) -> torch.Tensor:
        """[R] int64: of each row the first one of its run."""
        rows = torch.arange(len(slots), device=slots.device)
        if len(slots) == 1:
            return rows
        goes_on = (slots[1:] == slots[:-1]) & (first[1:] == end[:-1]) & (slots[1:] != self._nobody)
        return torch.cat((rows[:1], torch.where(goes_on, 0, rows[1:]))).cummax(dim=0).values
