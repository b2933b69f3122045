"""CUDA graphs of the forwards that rounds repeat, over rows alone and with tiles of prompts: a whole forward becomes
one launch.

On a GPU a small forward takes longer to launch, kernel by kernel from Python, than to run. A forward over rows with the
same number of queries each is captured once for each of a few shapes (graph_shapes.py), and replayed from then on: its
inputs are copied into tensors of fixed place, its logits into one buffer that all graphs share. A forward runs through
the smallest graph that holds it, and the rest is padding.

Where a row's next token follows from the logits and the row's parameters, the graph of one step chooses it, too, and
stands ready for the next: a chain of steps is that graph again and again, without a look at the host.

It knows a function from tokens, positions and block tables to logits. It does not know models, plans or which ranks the
function talks to; collectives inside it must be capturable (`Communicator.is_capturable`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from trtrun.engine.draft_paths import TreeBatch
from trtrun.engine.graphs.graph_cache import MOST_GRAPHS, Capture, GraphCache
from trtrun.engine.graphs.graph_shapes import GraphShapes, MixedShape, MixedShapes
from trtrun.sampling.distributions import KeyedRanks
from trtrun.sampling.filters import likeliest

RowForward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], torch.Tensor]
"""(tokens [R, Q], positions [R, Q], block_tables [R, blocks], num_last) → logits [R * num_last, vocab], of the last
queries of each row, or [R * Q, vocab] where num_last is 0. Here and below they have any floating dtype: a graph writes
them in float32."""

TreeForward = Callable[[TreeBatch], torch.Tensor]
"""Trees → logits [R * (nodes + 1), vocab]."""

MOST_STEPS = 16
"""Steps of a chain between two looks of the host."""


@dataclass(frozen=True)
class _Shape:
    """What graphs are told apart by. `num_ranked` is 0 for a forward, whose result is logits; `choices` is how a step
    of a chain chooses, None where it takes the likeliest; `paths` is the number and depth of the paths of trees."""

    rows: int
    queries: int
    blocks: int
    num_last: int = 1
    num_ranked: int = 0
    choices: Hashable = None
    paths: tuple[int, int] = (0, 0)


class GraphMemory(NamedTuple):
    """Where the graphs of one engine read and write.

    Attributes:
        logits: [lines, vocab] float32: where all graphs write.
        tables: [numbers] int64: where all graphs read block tables, which may be megabytes each.
    """

    logits: torch.Tensor
    tables: torch.Tensor

    @classmethod
    def of(cls, lines: int, table_numbers: int, vocab_size: int, device: torch.device) -> GraphMemory:
        """Memory for up to `lines` logits of one forward, those of padding counted, and for as many numbers of tables
        as the most rows of a forward times the widest block tables have."""
        logits = torch.empty((lines, vocab_size), dtype=torch.float32, device=device)
        return cls(logits, torch.zeros(table_numbers, dtype=torch.int64, device=device))


class ForwardGraphs(GraphCache):
    """Runs row forwards through graphs.

    Attributes:
        shapes: of the graphs.
        logits: [lines, vocab] float32: where all graphs write.
    """

    def __init__(
        self,
        forward: RowForward,
        capture: Capture,
        shapes: GraphShapes,
        memory: GraphMemory,
        *,
        most_graphs: int = MOST_GRAPHS,
        forward_trees: TreeForward | None = None,
        first_run: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Capture `forward` on demand.

        Args:
            forward: reads nothing but its arguments and what never moves, and never waits for the device.
            capture: see `Capture`; `CudaCapture` on a GPU.
            shapes: of graphs.
            memory: large enough for every shape.
            most_graphs: how many to keep.
            forward_trees: as `forward`, of rows with draft trees; None where there are none.
            first_run: see GraphCache.
        """
        super().__init__(capture, most_graphs, first_run)
        self.shapes = shapes
        self._forward = forward
        self._forward_trees = forward_trees
        self.logits, self._tables = memory
        self._first_step = torch.zeros(1, dtype=torch.int64, device=memory.tables.device)

    def run(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        block_tables: torch.Tensor,
        num_last: int,
    ) -> torch.Tensor:
        """Run one forward.

        Args:
            tokens: [R, Q] int64 on the device.
            positions: [R, Q] int64; -1 is padding.
            block_tables: [R, blocks] int64, as wide as one of the shapes.
            num_last: of each row's queries so many, the last ones, have logits; 0 where all have.

        Returns:
            [R * num_last, vocab], or [R * Q, vocab] where that is 0, float32: valid until the next call.
        """
        rows, queries = tokens.shape
        bucket = self.shapes.rows(rows)
        width = queries if num_last else self.shapes.queries(bucket, queries)
        shape = _Shape(bucket, width, block_tables.shape[1], num_last)

        def work(tokens: torch.Tensor, positions: torch.Tensor, block_tables: torch.Tensor) -> torch.Tensor:
            return self._forward(tokens, positions, block_tables, num_last)

        def fixed() -> list[torch.Tensor]:
            both = [tensor.new_zeros((bucket, width)) for tensor in (tokens, positions)]
            return [*both, self._own_tables(shape)]

        lines = bucket * (num_last or width)
        captured = self._ready(shape, fixed, work, lambda: self.logits[:lines], (tokens, positions, block_tables))
        captured.replay()
        if num_last or width == queries:
            return self.logits[: rows * (num_last or queries)]
        return self.logits[: rows * width].view(rows, width, -1)[:, :queries].reshape(rows * queries, -1)

    def run_trees(self, trees: TreeBatch) -> torch.Tensor:
        """Run one forward over rows with draft trees.

        Returns:
            [R * (nodes + 1), vocab] float32: valid until the next call.
        """
        rows, queries = trees.tokens.shape
        count, depth = trees.positions.shape[1:]
        shape = _Shape(self.shapes.rows(rows), queries, trees.tables.shape[2], 0, paths=(count, depth))
        inputs = (trees.tokens, trees.positions, trees.tables, trees.nodes, trees.places)

        forward = self._forward_trees
        assert forward is not None

        def work(*inputs: torch.Tensor) -> torch.Tensor:
            return forward(TreeBatch(*inputs))

        def fixed() -> list[torch.Tensor]:
            return [tensor.new_zeros((shape.rows, *tensor.shape[1:])) for tensor in inputs]

        captured = self._ready(shape, fixed, work, lambda: self.logits[: shape.rows * queries], inputs)
        captured.replay()
        return self.logits[: rows * queries]

    def run_chain(
        self,
        first: torch.Tensor,
        positions: torch.Tensor,
        block_tables: torch.Tensor,
        vocab_size: int,
        num_ranked: int,
        keyed: KeyedRanks | None = None,
    ) -> torch.Tensor:
        """Feed a token, choose the one that follows, feed that, and so on, without a look at the host.

        Args:
            first: [R] int64 on the device: the first tokens.
            positions: [R, steps] int64: where each step's token stands; -1 is padding.
            block_tables: [R, blocks] int64, as wide as one of the shapes.
            vocab_size: ids to choose from: the first ones.
            num_ranked: how many tokens to tell of each step.
            keyed: how rows choose where some are sampled; None takes the likeliest.

        Returns:
            [R, steps, num_ranked] int64: after each step the tokens that it would choose, best first; valid until the
            next call.
        """
        rows, steps = positions.shape
        if steps > MOST_STEPS:
            part, rest = positions[:, :MOST_STEPS], positions[:, MOST_STEPS:]
            begun = self.run_chain(first, part, block_tables, vocab_size, num_ranked, keyed).clone()
            after = None if keyed is None else replace(keyed, lengths=keyed.lengths + MOST_STEPS)
            ended = self.run_chain(begun[:, -1, 0], rest, block_tables, vocab_size, num_ranked, after)
            return torch.cat((begun, ended), dim=1)
        choices = None if keyed is None else keyed.kind
        shape = _Shape(self.shapes.rows(rows), 1, block_tables.shape[1], num_ranked=num_ranked, choices=choices)

        def work(
            token: torch.Tensor,
            positions: torch.Tensor,
            block_tables: torch.Tensor,
            step: torch.Tensor,
            ranked: torch.Tensor,
            *parameters: torch.Tensor,
        ) -> torch.Tensor:
            where = positions.index_select(1, step)
            logits = self._forward(token.unsqueeze(1), where, block_tables, 1)[:, :vocab_size].float()
            found = likeliest(logits, num_ranked) if keyed is None else keyed.rank(logits, 0, num_ranked, *parameters)
            ranked.index_copy_(1, step, found.unsqueeze(1))
            step.add_(1)
            if parameters:
                parameters[1].add_(1)  # lengths
            return found[:, 0]

        def fixed() -> list[torch.Tensor]:
            places = positions.new_zeros((shape.rows, MOST_STEPS))
            ranked = first.new_empty((shape.rows, MOST_STEPS, num_ranked))
            made = [first.new_zeros(shape.rows), places, self._own_tables(shape), self._first_step.clone(), ranked]
            return made if keyed is None else [*made, *(tensor.new_zeros(shape.rows) for tensor in keyed.parameters)]

        parameters = () if keyed is None else keyed.parameters
        inputs = (first, positions, block_tables, self._first_step, None, *parameters)
        captured = self._ready(shape, fixed, work, None, inputs)
        for _ in range(steps):
            captured.replay()
        return captured.inputs[4][:rows, :steps]

    def _own_tables(self, shape: _Shape) -> torch.Tensor:
        return self._tables[: shape.rows * shape.blocks].view(shape.rows, shape.blocks)


class RowsBatch(NamedTuple):
    """Rows, or tiles, with as many queries each: tokens [R, Q] and positions [R, Q] int64, where -1 is padding, and
    block tables [R, blocks] int64."""

    tokens: torch.Tensor
    positions: torch.Tensor
    tables: torch.Tensor


MixedForward = Callable[[RowsBatch, RowsBatch], torch.Tensor]
"""Rows, and tiles of prompts → logits [R * Q + tiles, vocab]: of all queries of rows, and after the last one of
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
        memory: GraphMemory,
        first_run: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Capture `forward` on demand.

        Args:
            forward: reads nothing but its arguments and what never moves, and never waits for the device.
            capture: see `Capture`.
            shapes: of graphs.
            memory: large enough for every shape.
            first_run: see GraphCache.
        """
        super().__init__(capture, max(1, len(shapes.all)), first_run)
        self.shapes = shapes
        self._forward = forward
        self._logits, self._tables = memory

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
