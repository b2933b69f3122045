"""States of rows: what layers keep that hold one value a row in place of keys and values of its tokens.

A state that has seen a rejected token cannot forget it. So what is kept of a row is a state some tokens behind its
newest one, and beside it what each token since has brought: a forward goes on from there, through the tokens that
turned out right, to those that it is fed. Which these are says the position at which it begins: what stands before it
counts, as it does for keys and values, and what was fed there or behind it before is fed anew. Nothing is rolled back,
and no verdict has to be told: a state moves up behind the tokens that can no longer be fed again.

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
from trtrun.kvcache.specs import RecurrentState
from trtrun.tensors import device_integers


@dataclass(frozen=True)
class StateSpace:
    """Rows that have states, and how far behind these stay.

    Attributes:
        max_rows: rows of requests, and guesses behind them.
        most_refed: tokens at a row's end that a forward may feed again, or in place of which it may feed others; what
            each of so many tokens brings is kept.
        begins_at_newest: whether every forward of a row begins behind tokens that are sure: then a state moves up to
            there, and little of what is kept is gone through again.
        guess_blocks: blocks of each guess, whose rows are the last ones.
    """

    max_rows: int
    most_refed: int
    begins_at_newest: bool
    guess_blocks: Sequence[Sequence[int]] = ()

    def num_bytes(self, specs: Sequence[RecurrentState]) -> int:
        """Bytes of all rows' states in layers with such ones, and of what tokens bring."""
        numbers = sum(spec.state_numbers + self.most_refed * spec.input_numbers for spec in specs)
        return (self.max_rows + 1) * numbers * torch.float32.itemsize


@dataclass(frozen=True)
class SegmentStates:
    """Where the states of one segment's rows stand.

    Attributes:
        segment: of the forward.
        slots: [R] int64: of each row the place of its state; the last place where it is fed nothing.
        kept: [R] int64: tokens that the state has seen.
        first, end: [R] int64: the first position that is fed, and one behind the last.
        settled: [R] int64: tokens that it is to have seen when the forward is done.
    """

    segment: AttentionSegment
    slots: torch.Tensor
    kept: torch.Tensor
    first: torch.Tensor
    end: torch.Tensor
    settled: torch.Tensor


class StateBatch:
    """The states of a forward's rows, for each of its segments; layers share it."""

    def __init__(self, segments: Sequence[SegmentStates]) -> None:
        self.segments = segments


class LayerStates:
    """The states of one layer.

    Attributes:
        states: [rows + 1, *state] float32; the last one is nobody's.
        inputs: of each kind [rows + 1, most_refed, *shape] float32: what the token at position p brought is at p modulo
            most_refed.
    """

    def __init__(self, spec: RecurrentState, space: StateSpace, device: torch.device) -> None:
        rows = space.max_rows + 1
        self.states = torch.zeros((rows, *spec.state), device=device)
        self.inputs = [torch.zeros((rows, space.most_refed, *shape), device=device) for shape in spec.inputs]

    @property
    def num_bytes(self) -> int:
        return sum(part.numel() * part.element_size() for part in (self.states, *self.inputs))


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

    def begin(self, rows: Sequence[int]) -> None:
        """Have rows begin anew, with a state that has seen nothing."""
        if not rows:
            return
        index = device_integers(list(rows), self._kept.device)
        self._kept.index_fill_(0, index, 0)
        for layer in self.layers.values():
            layer.states.index_fill_(0, index, 0.0)

    def fork(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Have the rows that write to blocks `target` [n] int64 go on from where those of blocks `source` stand."""
        rows, own = (self._row_of_block.index_select(0, blocks) for blocks in (source, target))
        self._kept.index_copy_(0, own, self._kept.index_select(0, rows))
        for layer in self.layers.values():
            for part in (layer.states, *layer.inputs):
                part.index_copy_(0, own, part.index_select(0, rows))

    def of_batch(self, batch: AttentionBatch) -> StateBatch:
        """Find the states of a forward's rows, and move up what is sure."""
        return StateBatch([self._of_segment(segment, batch.block_size) for segment in batch.segments])

    def _of_segment(self, segment: AttentionSegment, block_size: int) -> SegmentStates:
        positions = segment.positions
        end = positions.amax(dim=1) + 1
        first = torch.where(positions < 0, end.unsqueeze(1), positions).amin(dim=1)
        block = segment.block_tables.gather(1, (first // block_size).unsqueeze(1)).squeeze(1)
        slots = self._row_of_block.index_select(0, torch.where(end == 0, NULL_BLOCK, block))
        kept = torch.where(end == 0, 0, self._kept.index_select(0, slots))
        settled = torch.maximum(kept, end - self._space.most_refed)
        if self._space.begins_at_newest:
            settled = torch.maximum(settled, first)
        self._kept.index_copy_(0, slots, settled)
        return SegmentStates(segment, slots, kept, first, end, settled)
