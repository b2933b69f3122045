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

import torch

from trtrun.kvcache.segments import AttentionBatch, AttentionSegment
from trtrun.kvcache.specs import RecurrentState, StateDtype
from trtrun.kvcache.state_numbers import StateOperations, StateTables, TorchStates
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


@dataclass(frozen=True)
class LayerStates:
    """The states of one layer.

    Attributes:
        states: of each part of a state [rows + 1, *shape], as its spec has them; the last one is nobody's.
        inputs: of each kind [rows + 1, most_refed, *shape] float32: what the token at position p brought is at p modulo
            most_refed.
        snapshots: of each part of a state [snapshots, *shape], likewise; the first is nobody's.
    """

    states: Sequence[torch.Tensor]
    inputs: Sequence[torch.Tensor]
    snapshots: Sequence[torch.Tensor]


class RowStates:
    """The states of all rows in all layers that have any. Those of layers that are alike lie in one tensor, snapshots
    behind rows, so that a row of all of them is copied at once.

    Attributes:
        layers: by index of the model's layer.
    """

    def __init__(
        self,
        specs: dict[int, RecurrentState],
        space: StateSpace,
        num_blocks: int,
        device: torch.device,
        operations: StateOperations | None = None,
    ) -> None:
        """Make states of zeros, of rows that are written to `num_blocks` blocks."""
        self._operations = operations or TorchStates()
        self._first_snapshot = space.max_rows + 1
        self._states: list[torch.Tensor] = []
        self._inputs: list[torch.Tensor] = []
        self.layers: dict[int, LayerStates] = {}
        for spec in dict.fromkeys(specs.values()):
            self._make(spec, [index for index, one in specs.items() if one == spec], space, device)
        kept = torch.zeros(space.max_rows + 1, dtype=torch.int64, device=device)
        blocks = torch.full((num_blocks,), space.max_rows, dtype=torch.int64, device=device)
        saved_at, snapshots = torch.full_like(kept, _NEVER), torch.zeros_like(kept)
        self._tables = StateTables(
            blocks, kept, saved_at, snapshots, space.most_refed, begins_at_newest=space.begins_at_newest
        )
        self._saves = False
        first = space.max_rows - len(space.guess_blocks)
        for number, of_guess in enumerate(space.guess_blocks):
            blocks[list(of_guess)] = first + number

    def _make(self, spec: RecurrentState, members: Sequence[int], space: StateSpace, device: torch.device) -> None:
        """Make the states of layers that are alike."""
        rows, count = self._first_snapshot, len(members)
        dtypes = [getattr(torch, name) for name in spec.part_dtypes(space.dtype)]
        slots = rows + space.num_snapshots
        states = [
            torch.zeros((count, slots, *shape), dtype=dtype, device=device)
            for shape, dtype in zip(spec.parts, dtypes, strict=True)
        ]
        inputs = [torch.zeros((count, rows, space.most_refed, *shape), device=device) for shape in spec.inputs]
        for place, index in enumerate(members):
            parts = [part[place] for part in states]
            self.layers[index] = LayerStates(
                [part[:rows] for part in parts], [part[place] for part in inputs], [part[rows:] for part in parts]
            )
        self._states += states
        self._inputs += inputs

    @property
    def num_bytes(self) -> int:
        """Bytes of all states, and of what tokens bring."""
        return sum(part.numel() * part.element_size() for part in (*self._states, *self._inputs))

    def announce(self, rows: torch.Tensor, blocks: torch.Tensor) -> None:
        """Take in blocks that rows get to write to, [n] int64 each."""
        self._tables.row_of_block.index_copy_(0, blocks, rows)

    def begin(self, starts: Sequence[tuple[int, int, int]]) -> None:
        """Have rows begin anew: of each its number, how many tokens its state has seen, and the snapshot that it is;
        the null snapshot has seen nothing, and is zeros."""
        if not starts:
            return
        rows, kept, snapshots = zip(*starts, strict=True)
        places = [self._first_snapshot + snapshot for snapshot in snapshots]
        target, seen, source = device_integers([rows, kept, places], self._tables.kept.device).unbind()
        self._tables.kept.index_copy_(0, target, seen)
        for part in self._states:
            self._operations.copy_states(part, source, target)

    def save(self, saves: Sequence[tuple[int, int, int]]) -> None:
        """Take snapshots in the round that begins, and no others: of each the row, behind how many tokens, and which
        one it is."""
        tables = self._tables
        if self._saves:
            tables.saved_at.fill_(_NEVER)
            tables.snapshots.zero_()
        self._saves = bool(saves)
        if saves:
            rows, places, snapshots = device_integers(list(zip(*saves, strict=True)), tables.kept.device).unbind()
            tables.saved_at.index_copy_(0, rows, places)
            tables.snapshots.index_copy_(0, rows, snapshots)

    def share(self, rows: Sequence[int], own: Sequence[int]) -> None:
        """Have each of the rows `own`, none of which is among the others, go on from where the row beside it in `rows`
        stands."""
        source, target = device_integers([list(rows), list(own)], self._tables.kept.device)
        self._tables.kept.index_copy_(0, target, self._tables.kept.index_select(0, source))
        for part in (*self._states, *self._inputs):
            self._operations.copy_states(part, source, target)

    def of_batch(self, batch: AttentionBatch) -> Sequence[SegmentStates]:
        """Find the states of a forward's rows, and move up what is sure."""
        size, tables, find = batch.block_size, self._tables, self._operations.find_states
        return [SegmentStates.of_numbers(segment, find(segment, size, tables)) for segment in batch.segments]
