"""CUDA graphs of whole draft trees of heads: drawing one up, depth by depth, becomes one launch.

A tree takes some hundred small operations, which the host launches more slowly than a device works on those of few
rows. It knows shapes and tensors. It does not know what heads compute, or how trees grow.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch

from trtrun.engine.graphs.capture import Capture
from trtrun.engine.graphs.graph_cache import GraphCache
from trtrun.engine.graphs.graph_shapes import GraphShapes
from trtrun.engine.start_forwards import MOST_TREE_ROWS, count_tree_graphs

TreeWork = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(rows [R] int64, positions [R, depth - 1] int64, lens [R] int64, hidden [R, hidden], tables [R, blocks] int64) → [R,
width] int64."""


@dataclass(frozen=True)
class _Shape:
    """What graphs are told apart by."""

    rows: int
    depth: int
    blocks: int


class TreeGraphs(GraphCache):
    """Graphs of one rank's trees."""

    def __init__(self, capture: Capture, shapes: GraphShapes, most_depth: int) -> None:
        """Of trees of up to `most_depth` nodes one behind the other, of rows in the numbers of `shapes`."""
        super().__init__(capture, max(1, count_tree_graphs(shapes, most_depth)))
        self._shapes = shapes

    def takes(self, rows: int) -> bool:
        """Whether there are graphs of so many rows."""
        return rows <= MOST_TREE_ROWS

    def run(
        self,
        draw: TreeWork,
        rows: torch.Tensor,
        positions: torch.Tensor,
        lens: torch.Tensor,
        hidden: torch.Tensor,
        tables: torch.Tensor,
        width: int,
    ) -> torch.Tensor:
        """Draw up the trees of some rows, always by the same `draw`.

        Args:
            draw: reads nothing but its arguments, and never waits for the device. Rows that it gets beside these are
                row 0 at positions of -1.
            rows: [R] int64 on the device.
            positions: [R, depth - 1] int64; -1 where a row takes no part.
            lens: [R] int64.
            hidden: [R, hidden].
            tables: [R, blocks] int64, as wide as one of the shapes.
            width: of what it returns.

        Returns:
            [R, width] int64, valid until the next call.
        """
        count = self._shapes.rows(len(rows))
        shape: Hashable = _Shape(count, positions.shape[1] + 1, tables.shape[1])

        def fixed() -> list[torch.Tensor]:
            return [tensor.new_zeros((count, *tensor.shape[1:])) for tensor in (rows, positions, lens, hidden, tables)]

        def output() -> torch.Tensor:
            return rows.new_empty((count, width))

        captured = self._ready(shape, fixed, draw, output, (rows, positions, lens, hidden, tables))
        captured.replay()
        return captured.output[: len(rows)]
