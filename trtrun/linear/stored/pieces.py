"""What is read of stored matrices for a rank that holds their rows in another order than they lie there.

Scales of blocks and words of several numbers lie across rows, so rows that lie together are read together, in whole
blocks, and are put in order behind that. It knows shapes. It does not know formats, nor why there is another order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import TYPE_CHECKING

from trtrun.linear.quantization.base import TensorSlice
from trtrun.linear.quantization.quantizations import BLOCK

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Piece:
    """Rows of one matrix that are read together.

    Attributes:
        part: what is read.
        order: which rows of the matrix a rank holds, in its order; None for all that are read, as they lie.
    """

    part: TensorSlice
    order: tuple[range, ...] | None = None

    @property
    def rows(self) -> int:
        """How many rows a rank holds."""
        return len(self.part.ranges[0]) if self.order is None else sum(map(len, self.order))

    @property
    def moves_parts_of_blocks(self) -> bool:
        """Whether rows of one block get new neighbours."""
        whole = self.part.shape[0]
        return self.order is not None and any(
            rows.start % BLOCK or (rows.stop % BLOCK and (rows.stop != whole or rows is not self.order[-1]))
            for rows in self.order
        )

    def index(self, device: torch.device) -> torch.Tensor | None:
        """[rows] int64: places, among those that are read, of the rows in the order of the rank; None as they lie."""
        if self.order is None:
            return None
        import torch

        first = self.part.ranges[0].start
        return torch.tensor([row - first for rows in self.order for row in rows], device=device)


def pieces_of(parts: Sequence[TensorSlice]) -> list[Piece]:
    """What is read for slices of matrices [out, in], which a rank holds one behind the other.

    A slice that touches no other one of its matrix is read as it is, so that what ends within a block is refused there.
    Of others whole blocks are read, and never more rows than there are.
    """
    held = [part for part in parts if len(part.ranges[0])] or parts
    runs = {name: _runs([part.ranges[0] for part in held if part.name == name]) for name in {it.name for it in held}}
    return [
        _piece(list(group))
        for _, group in groupby(held, lambda part: (part.name, _run_of(part.ranges[0], runs[part.name])))
    ]


def _piece(parts: Sequence[TensorSlice]) -> Piece:
    order = tuple(part.ranges[0] for part in parts)
    part, first, last = parts[0], min(rows.start for rows in order), max(rows.stop for rows in order)
    if all(rows.stop == behind.start for rows, behind in pairwise(order)):
        return Piece(replace(part, ranges=(range(first, last), *part.ranges[1:])))
    rows = range(first // BLOCK * BLOCK, min(-(-last // BLOCK) * BLOCK, part.shape[0]))
    return Piece(replace(part, ranges=(rows, *part.ranges[1:])), order)


def _runs(ranges: Sequence[range]) -> list[range]:
    """Rows without gaps, in ascending order."""
    runs: list[range] = []
    for rows in sorted(ranges, key=lambda rows: rows.start):
        if runs and rows.start <= runs[-1].stop:
            runs[-1] = range(runs[-1].start, max(rows.stop, runs[-1].stop))
        else:
            runs.append(rows)
    return runs


def _run_of(rows: range, runs: Sequence[range]) -> int:
    return next((at for at, run in enumerate(runs) if rows.start in run), -1)
