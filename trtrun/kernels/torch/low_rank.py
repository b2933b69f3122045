"""What adapters add to a linear layer, in torch's operations: right on any device, for any dtype.

LoRA (arXiv:2106.09685): y += (x @ down.T) @ up.T, with down [rank, in] and up [out, rank] of the adapter of each line
of x. A layer that is several matrices of the checkpoint computed as one has a pair for each. Adapters lie in slots of
tensors that never move, so that a graph meets whatever is loaded later.

It knows slots and tensors. It does not know adapters' files, scales (they are in `up`), or who has which slot.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch.nn import functional
from typing_extensions import override

from trtrun.kernels.arguments import LineSlots


class Factors(NamedTuple):
    """The two factors of an adapter for one matrix: down [rank, in] and up [out, rank], scale included."""

    down: torch.Tensor
    up: torch.Tensor


Install = Callable[[int], None]
"""Fills a slot that no line has with an adapter that is ready. In the thread that computes, between two forwards."""


class LowRankShape(NamedTuple):
    """A linear layer with adapters.

    Attributes:
        outputs: output features of each of its matrices, one behind the other.
        inputs: input features.
        num_slots: adapters that may be loaded at once; their slots count from 1.
        max_rank: of an adapter.
    """

    outputs: tuple[int, ...]
    inputs: int
    num_slots: int
    max_rank: int

    @property
    def num_elements(self) -> int:
        """Numbers of all slots."""
        return self.num_slots * self.max_rank * (len(self.outputs) * self.inputs + sum(self.outputs))


class LowRank(ABC):
    """What adapters add to one linear layer."""

    @abstractmethod
    def prepare(self, factors: Sequence[Factors | None]) -> Install:
        """Make an adapter ready, in the order of the layer's matrices; None where it leaves one as it is. Any thread
        may do so while others compute."""

    def put(self, slot: int, factors: Sequence[Factors | None]) -> None:
        """Fill a slot at once; see `prepare`."""
        self.prepare(factors)(slot)

    @abstractmethod
    def add(self, y: torch.Tensor, x: torch.Tensor, lines: LineSlots) -> None:
        """Add to y [lines, out] in place what x [lines, in] gives. A line's bits do not depend on the other lines, and
        lines without an adapter keep theirs."""

    def add_to(
        self, product: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, lines: LineSlots
    ) -> torch.Tensor:
        """The layer's own product of x [lines, in], and what `add` adds to it → [lines, out]; the same bits as one
        behind the other. `product` only reads x."""
        y = product(x)
        self.add(y, x, lines)
        return y


class StackedFactors(LowRank):
    """The factors of all slots of one layer.

    Attributes:
        down: [slots, matrices * max_rank, in]; zeros behind an adapter's own rank.
        up: [slots, out, max_rank]; zeros there, too.
    """

    def __init__(self, shape: LowRankShape, dtype: torch.dtype, device: torch.device) -> None:
        self.shape = shape
        rows = len(shape.outputs) * shape.max_rank
        self.down = torch.zeros((shape.num_slots, rows, shape.inputs), dtype=dtype, device=device)
        self.up = torch.zeros((shape.num_slots, sum(shape.outputs), shape.max_rank), dtype=dtype, device=device)

    @override
    def prepare(self, factors: Sequence[Factors | None]) -> Install:
        return lambda slot: self._fill(slot, factors)

    def _fill(self, slot: int, factors: Sequence[Factors | None]) -> None:
        shape, start = self.shape, 0
        down, up = self.down[slot - 1], self.up[slot - 1]
        down.zero_()
        up.zero_()
        for place, (outputs, of_matrix) in enumerate(zip(shape.outputs, factors, strict=True)):
            if of_matrix is not None:
                rank, first = of_matrix.down.shape[0], place * shape.max_rank
                down[first : first + rank].copy_(of_matrix.down)
                up[start : start + outputs, :rank].copy_(of_matrix.up)
            start += outputs


class TorchLowRank(StackedFactors):
    """Every slot is computed for all lines, and kept where it is theirs: shapes do not depend on what lines have."""

    @override
    def add(self, y: torch.Tensor, x: torch.Tensor, lines: LineSlots) -> None:
        """Add slot by slot; lines have the same bits in any company where `F.linear` gives them so."""
        shape = self.shape
        for slot in range(1, shape.num_slots + 1):
            is_theirs, start = (lines.slots == slot).unsqueeze(1), 0
            low = functional.linear(x, self.down[slot - 1])
            for place, outputs in enumerate(shape.outputs):
                of_matrix = low[:, place * shape.max_rank : (place + 1) * shape.max_rank]
                part = y[:, start : start + outputs]
                added = part + functional.linear(of_matrix, self.up[slot - 1, start : start + outputs])
                part.copy_(torch.where(is_theirs, added, part))
                start += outputs
