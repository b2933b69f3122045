"""CUDA graphs of forwards over rows and tiles of prompts together.

Shapes are few (mixed_shapes.py): a forward runs through the smallest graph that holds it, and the rest is padding. It
knows inputs and logits. It does not know models, plans or chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch

from trtrun.engine.graphs.capture import Capture
from trtrun.engine.graphs.graph_cache import GraphCache
from trtrun.engine.graphs.mixed_shapes import MixedShape, MixedShapes


class RowsBatch(NamedTuple):
    """Rows, or tiles, with as many queries each: tokens [R, Q] and positions [R, Q] int64, where -1 is padding, and
    block tables [R, blocks] int64."""

    tokens: torch.Tensor
    positions: torch.Tensor
    tables: torch.Tensor


MixedForward = Callable[[RowsBatch, RowsBatch], torch.Tensor]
"""Rows, and tiles of prompts → logits [R * Q + tiles, vocab] float32: of all queries of rows, and after the last one of
each tile."""


class MixedGraphs(GraphCache):
    """Runs them through graphs.

    Attributes:
        shapes: of the graphs.
    """

    position_inputs: Sequence[int] = (1, 4)

    def __init__(
        self,
        forward: MixedForward,
        capture: Capture,
        shapes: MixedShapes,
        logits: torch.Tensor,
        tables: torch.Tensor,
        first_run: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Capture `forward` on demand.

        Args:
            forward: reads nothing but its arguments and what never moves, and never waits for the device.
            capture: see `Capture`.
            shapes: of graphs.
            logits: [lines, vocab] float32, as many lines as the largest shape has: where all graphs write.
            tables: [numbers] int64, as many as the largest shape has: where all graphs read block tables.
            first_run: see GraphCache.
        """
        super().__init__(capture, max(1, len(shapes.all)), first_run)
        self.shapes = shapes
        self._forward = forward
        self._logits = logits
        self._tables = tables

    def run(self, shape: MixedShape, decoded: RowsBatch, prompts: RowsBatch) -> torch.Tensor:
        """Run one forward through the graph of `shape`, which holds it; tables are as wide as its own.

        Returns:
            [rows * queries + tiles, vocab] float32, rows, queries and tiles as the shape has them: valid until the next
            call of any graph of the engine. Of padding they have no meaning; that of rows' queries stands behind them.
        """

        def work(*inputs: torch.Tensor) -> torch.Tensor:
            return self._forward(RowsBatch(*inputs[:3]), RowsBatch(*inputs[3:]))

        def fixed() -> list[torch.Tensor]:
            of_rows = [decoded.tokens.new_zeros((shape.rows, shape.queries)) for _ in range(2)]
            of_tiles = [decoded.tokens.new_zeros((shape.tiles, shape.width)) for _ in range(2)]
            parts = torch.split(
                self._tables[: shape.table_numbers], [shape.rows * shape.blocks, shape.tiles * shape.blocks]
            )
            tables = [part.view(-1, shape.blocks) for part in parts]
            return [*of_rows, tables[0], *of_tiles, tables[1]]

        self._ready(shape, fixed, work, lambda: self._logits[: shape.lines], (*decoded, *prompts)).replay()
        return self._logits[: shape.lines]
