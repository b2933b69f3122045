"""CUDA graphs of steps in which heads draft: a token is fed, the one that follows is chosen, and so on, without the
host.

It knows what heads compute by protocol, and how tokens are chosen. It does not know rounds, or where the first token
and state come from.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace

import torch

from trtrun.engine.graphs.decode_graphs import MOST_STEPS
from trtrun.engine.graphs.graph_cache import MOST_GRAPHS, Capture, GraphCache
from trtrun.engine.graphs.graph_shapes import GraphShapes
from trtrun.engine.heads.head_rows import FeatureLayers
from trtrun.kvcache.segments import AttentionBatch, AttentionSegment
from trtrun.kvcache.store import KVStore
from trtrun.sampling.distributions import KeyedRanks
from trtrun.sampling.filters import argmax
from trtrun.sampling.random import Stream
from trtrun.sampling.row_sampling import RowSampling


@dataclass(frozen=True)
class Shape:
    """What graphs are told apart by: `choices` is how tokens are chosen where any are, `work` the kind of work."""

    work: str
    rows: int
    queries: int = 1
    blocks: int = 0
    choices: Hashable = None


class ChainGraphs(GraphCache):
    """Graphs of one rank's heads.

    Attributes:
        shapes: of the graphs.
    """

    def __init__(
        self, layers: FeatureLayers, store: KVStore, capture: Capture, shapes: GraphShapes, num_made: int
    ) -> None:
        """Capture what `layers` compute over `store`, in graphs of these shapes, of which a start makes `num_made`."""
        super().__init__(capture, max(MOST_GRAPHS, num_made))
        self.shapes = shapes
        self._layers = layers
        self._store = store
        self._first_step = torch.zeros(1, dtype=torch.int64, device=store.device)

    def warm_up(self, sampling: RowSampling) -> None:
        """Make all graphs that rounds may need. Collective over the group.

        Args:
            sampling: parameters of rows.
        """
        for rows in self.shapes.numbers_of_rows():
            places = self._first_step.new_zeros(rows)
            hidden = torch.zeros(
                (rows, self._layers.hidden_size), dtype=self._layers.dtype, device=self._first_step.device
            )
            for blocks in self.shapes.widths(rows):
                tables = places.new_zeros((rows, blocks))
                for keyed in (None, *KeyedRanks.kinds(sampling, range(rows), places, Stream.TARGET)):
                    self.follow(places, hidden, places.unsqueeze(1) - 1, tables, keyed)

    def follow(
        self,
        token: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        tables: torch.Tensor,
        keyed: KeyedRanks | None,
    ) -> torch.Tensor:
        """Feed a token, choose the one that follows, feed that, and so on.

        Args:
            token: [R] int64.
            hidden: [R, hidden] states that are fed beside it.
            positions: [R, steps] int64: at which each token is fed; -1 where a row takes no part.
            tables: [R, blocks] int64, as wide as one of the shapes.
            keyed: how rows choose where some are sampled, what is chosen first at their lengths; None takes the
                likeliest.

        Returns:
            [R, steps] int64, equal on all ranks: what is chosen.
        """
        parts = list[torch.Tensor]()
        for start in range(0, positions.shape[1], MOST_STEPS):
            at = None if keyed is None else replace(keyed, lengths=keyed.lengths + start)
            part = positions[:, start : start + MOST_STEPS]
            chosen, hidden = self._steps(token, part, tables, hidden, at)
            if start + MOST_STEPS < positions.shape[1]:  # what comes next is written over what graphs give
                chosen, hidden = chosen.clone(), hidden.clone()
            parts.append(chosen)
            token = chosen[:, -1]
        return torch.cat(parts, dim=1) if parts else token.new_zeros((len(token), 0))

    def _steps(
        self,
        token: torch.Tensor,
        positions: torch.Tensor,
        tables: torch.Tensor,
        hidden: torch.Tensor,
        keyed: KeyedRanks | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens [R, steps] behind `token` [R], and the states [R, hidden] behind the last that was fed."""
        rows, steps = positions.shape
        choices = None if keyed is None else keyed.kind
        shape = Shape("step", self.shapes.rows(rows), 1, tables.shape[1], choices)

        def work(
            token: torch.Tensor,
            positions: torch.Tensor,
            tables: torch.Tensor,
            step: torch.Tensor,
            chosen: torch.Tensor,
            hidden: torch.Tensor,
            *parameters: torch.Tensor,
        ) -> torch.Tensor:
            where = positions.index_select(1, step)
            hidden.copy_(self._forward(token.unsqueeze(1), where, tables, hidden))
            found = self._choose(hidden, keyed, parameters)
            chosen.index_copy_(1, step, found.unsqueeze(1))
            step.add_(1)
            if parameters:
                parameters[1].add_(1)  # lengths
            return found

        def fixed() -> list[torch.Tensor]:
            count = shape.rows
            made = [token.new_zeros(count), positions.new_zeros((count, MOST_STEPS))]
            made += [tables.new_zeros((count, shape.blocks)), self._first_step.clone()]
            made += [token.new_zeros((count, MOST_STEPS)), hidden.new_zeros((count, hidden.shape[1]))]
            return made if keyed is None else [*made, *(tensor.new_zeros(count) for tensor in keyed.parameters)]

        parameters = () if keyed is None else keyed.parameters
        inputs = (token, positions, tables, self._first_step, None, hidden, *parameters)
        captured = self._ready(shape, fixed, work, None, inputs)
        for _ in range(steps):
            captured.replay()
        return captured.inputs[4][:rows, :steps], captured.inputs[5][:rows]

    def _forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, tables: torch.Tensor, hidden: torch.Tensor
    ) -> torch.Tensor:
        rows, queries = tokens.shape
        segment = AttentionSegment(0, rows, queries, tables, positions)
        batch = AttentionBatch([segment], self._store.block_size)
        at = positions.reshape(-1).clamp(min=0)
        return self._layers.forward(tokens.reshape(-1), at, hidden, batch, self._store)

    def _choose(
        self, hidden: torch.Tensor, keyed: KeyedRanks | None, parameters: tuple[torch.Tensor, ...]
    ) -> torch.Tensor:
        """[R] int64 behind states [R, hidden], equal on all ranks."""
        logits = self._layers.logits(hidden)
        if logits is None:
            found = torch.empty(len(hidden), dtype=torch.int64, device=hidden.device)
        elif keyed is None:
            found = argmax(logits)
        else:
            found = keyed.rank(logits, 0, 1, *parameters)[:, 0]
        return self._layers.share(found)
