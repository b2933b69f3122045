"""CUDA graphs of what heads compute in rounds that repeat: what rows gained is fed, and tokens are drafted without the
host, or nodes of draft trees fed; or whole trees are drawn up, depth by depth, in one launch.

Shapes are those of the target's graphs. A tree takes some hundred small operations, which the host launches more slowly
than a device works on those of few rows. It knows what heads compute by protocol. It does not know rounds, where tokens
and hidden states come from, or how trees grow.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace

import torch

from trtrun.engine.graphs.graph_cache import Capture, GraphCache
from trtrun.engine.graphs.graph_shapes import GraphShapes
from trtrun.engine.heads.chain_graphs import ChainGraphs, Shape
from trtrun.engine.heads.head_rows import FeatureLayers
from trtrun.engine.start_forwards import MOST_TREE_ROWS, count_head_graphs, count_tree_graphs
from trtrun.kvcache.store import KVStore
from trtrun.sampling.distributions import NUM_KINDS, KeyedRanks
from trtrun.sampling.random import Stream
from trtrun.sampling.row_sampling import RowSampling


class HeadGraphs(ChainGraphs):
    """Graphs of one rank's heads that are fed what rows gain."""

    def __init__(
        self,
        layers: FeatureLayers,
        store: KVStore,
        capture: Capture,
        shapes: GraphShapes,
        max_rows: int,
        tapped: tuple[int, int],
        *,
        most_fed: int = 0,
    ) -> None:
        """Capture what `layers` compute over `store`.

        Args:
            layers: of the heads.
            store: of their keys and values.
            capture: see `Capture`.
            shapes: of the target's graphs.
            max_rows: of a round.
            tapped: how many hidden states of the target there are of a token, and numbers of each.
            most_fed: nodes of a row's draft tree that are fed at once, fewer than are verified; 0 where drafts are
                chains.
        """
        # All that a start makes are kept: which rounds need them is not known.
        num_made = count_head_graphs(shapes, 1 + NUM_KINDS, has_trees=most_fed > 0)
        super().__init__(layers, store, capture, shapes, num_made)
        self._most_fed = most_fed
        self._width = shapes.numbers_of_queries(1)[0]
        device, most = store.device, max_rows * self._width
        # All graphs read hidden states from one place, and write states to one.
        self._tapped = torch.zeros((most, *tapped), dtype=layers.dtype, device=device)
        self._states = torch.zeros((most, layers.hidden_size), dtype=layers.dtype, device=device)

    def takes(self, queries: int) -> bool:
        """Whether `feed` has graphs for so many tokens of rows."""
        return queries <= self._width

    def warm_up(self, sampling: RowSampling) -> None:
        """Make all graphs that rounds may need. Collective over the group.

        Args:
            sampling: parameters of rows.
        """
        for rows in self.shapes.numbers_of_rows():
            places = torch.zeros(rows, dtype=torch.int64, device=self._states.device)
            kinds = [None, *KeyedRanks.kinds(sampling, range(rows), places, Stream.TARGET)]
            hidden = self._states.new_zeros((rows, self._states.shape[1]))
            for blocks in self.shapes.widths(rows):
                tables = places.new_zeros((rows, blocks))
                for queries in self.shapes.numbers_of_queries(rows):
                    nowhere = places.new_full((rows, queries), -1)
                    tapped = self._tapped[: rows * queries].view(rows, queries, *self._tapped.shape[1:])
                    self.feed(nowhere.clamp(min=0), nowhere, tables, tapped)
                if self._most_fed:
                    nodes = rows * self._most_fed
                    nothing, none = places.new_zeros((nodes, blocks)), places.new_full((nodes, 1), -1)
                    self.grow(rows, nothing[:, 0], none, nothing, self._states[:nodes])
                for keyed in () if self._most_fed else kinds:
                    self.draft(hidden, places.unsqueeze(1) - 1, tables, keyed)

    def feed(
        self, tokens: torch.Tensor, positions: torch.Tensor, tables: torch.Tensor, tapped: torch.Tensor
    ) -> torch.Tensor:
        """Feed tokens beside the target's hidden states.

        Args:
            tokens, positions: [R, Q] int64 on the device; -1 is padding.
            tables: [R, blocks] int64, as wide as one of the shapes.
            tapped: [R, Q, taps, the target's hidden].

        Returns:
            [R * Q, hidden]: the states behind them, valid until the next call.
        """
        rows, queries = tokens.shape
        count = self.shapes.rows(rows)
        width = self.shapes.queries(count, queries)
        shape = Shape("feed", count, width, tables.shape[1])
        states = self._states[: count * width]

        def work(
            tokens: torch.Tensor, positions: torch.Tensor, tables: torch.Tensor, tapped: torch.Tensor
        ) -> torch.Tensor:
            return self._forward(tokens, positions, tables, self._layers.fuse(tapped.flatten(0, 1)))

        def fixed() -> list[torch.Tensor]:
            both = [tensor.new_zeros((count, width)) for tensor in (tokens, positions)]
            of_tokens = self._tapped[: count * width].view(count, width, *self._tapped.shape[1:])
            return [*both, tables.new_zeros((count, shape.blocks)), of_tokens]

        self._ready(shape, fixed, work, lambda: states, (tokens, positions, tables, tapped)).replay()
        if width == queries:
            return states[: rows * queries]
        return states.view(count, width, -1)[:rows, :queries].flatten(0, 1)

    def grow(
        self,
        rows: int,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        tables: torch.Tensor,
        hidden: torch.Tensor,
    ) -> torch.Tensor:
        """Feed nodes of the draft trees of `rows` rows, each a row of its own to attention.

        Args:
            rows: that have trees.
            tokens: [n] int64 on the device, `most_fed` times rows or fewer.
            positions: [n, 1] int64; -1 where a row takes no part.
            tables: [n, blocks] int64, as wide as one of the shapes of `rows`.
            hidden: [n, hidden] states of the nodes before.

        Returns:
            [n, hidden]: the states behind them, valid until the next call.
        """
        nodes = self.shapes.rows(rows) * self._most_fed
        shape, states = Shape("grow", nodes, 1, tables.shape[1]), self._states[:nodes]

        def fixed() -> list[torch.Tensor]:
            made = [tokens.new_zeros(nodes), positions.new_zeros((nodes, 1))]
            return [*made, tables.new_zeros((nodes, shape.blocks)), hidden.new_zeros((nodes, hidden.shape[1]))]

        def work(
            tokens: torch.Tensor, positions: torch.Tensor, tables: torch.Tensor, hidden: torch.Tensor
        ) -> torch.Tensor:
            return self._forward(tokens.unsqueeze(1), positions, tables, hidden)

        self._ready(shape, fixed, work, lambda: states, (tokens, positions, tables, hidden)).replay()
        return states[: len(tokens)]

    def draft(
        self, hidden: torch.Tensor, positions: torch.Tensor, tables: torch.Tensor, keyed: KeyedRanks | None
    ) -> torch.Tensor:
        """Choose a token behind each state, feed it, choose the one that follows, and so on.

        Args:
            hidden: [R, hidden] states.
            positions: [R, steps] int64: at which each token but the last is fed; -1 where a row takes no part.
            tables: [R, blocks] int64, as wide as one of the shapes.
            keyed: how rows choose where some are sampled, the first at their lengths; None takes the likeliest.

        Returns:
            [R, steps + 1] int64, equal on all ranks.
        """
        first = self._choose_first(hidden, keyed)
        behind = None if keyed is None else replace(keyed, lengths=keyed.lengths + 1)
        return torch.cat((first.unsqueeze(1), self.follow(first, hidden, positions, tables, behind)), dim=1)

    def _choose_first(self, hidden: torch.Tensor, keyed: KeyedRanks | None) -> torch.Tensor:
        """[R] int64 behind hidden [R, hidden]."""
        rows = len(hidden)
        places = self._first_step.new_zeros((rows, 1))  # no token is fed, so that they do not matter
        shape = Shape("first", self.shapes.rows(rows), choices=None if keyed is None else keyed.kind)

        def work(
            token: torch.Tensor, places: torch.Tensor, hidden: torch.Tensor, *parameters: torch.Tensor
        ) -> torch.Tensor:
            return self._choose(hidden, keyed, parameters)

        def fixed() -> list[torch.Tensor]:
            made = [places.new_zeros(shape.rows), places.new_zeros((shape.rows, 1))]
            made.append(hidden.new_zeros((shape.rows, hidden.shape[1])))
            return made if keyed is None else [*made, *(tensor.new_zeros(shape.rows) for tensor in keyed.parameters)]

        parameters = () if keyed is None else keyed.parameters
        captured = self._ready(shape, fixed, work, None, (None, places, hidden, *parameters))
        captured.replay()
        return captured.inputs[0][:rows]


TreeWork = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(rows [R] int64, positions [R, depth - 1] int64, lens [R] int64, hidden [R, hidden], tables [R, blocks] int64) → [R,
width] int64."""


@dataclass(frozen=True)
class _TreeShape:
    """What graphs are told apart by."""

    rows: int
    depth: int
    blocks: int


class TreeGraphs(GraphCache):
    """Graphs of one rank's trees."""

    def __init__(self, capture: Capture, shapes: GraphShapes, most_depth: int) -> None:
        """Keep graphs of trees of up to `most_depth` nodes one behind the other, of rows in the numbers of `shapes`."""
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
        shape: Hashable = _TreeShape(count, positions.shape[1] + 1, tables.shape[1])

        def fixed() -> list[torch.Tensor]:
            return [tensor.new_zeros((count, *tensor.shape[1:])) for tensor in (rows, positions, lens, hidden, tables)]

        def output() -> torch.Tensor:
            return rows.new_empty((count, width))

        captured = self._ready(shape, fixed, draw, output, (rows, positions, lens, hidden, tables))
        captured.replay()
        return captured.output[: len(rows)]
