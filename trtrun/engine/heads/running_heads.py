"""Heads of one rank over the target's rows, as an engine runs them: steps in which tokens are fed and chosen, through
graphs where there are any; and heads that keep nothing, which read what the target keeps.

It does not know what heads compute, or which tokens are chosen.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trtrun.engine.heads.chain_graphs import ChainGraphs
from trtrun.engine.heads.head_rows import FeatureLayers, HeadRows
from trtrun.engine.start_forwards import count_chain_graphs
from trtrun.kvcache.segments import AttentionBatch, AttentionSegment, StepBatch
from trtrun.kvcache.store import KVStore
from trtrun.sampling.distributions import NUM_KINDS, KeyedRanks
from trtrun.tensors import cached_range, inference


class RunningHeads:
    """Heads of one rank at work.

    Attributes:
        rows: the state of every row.
        block_size: tokens of a KV block.
        tapped_shape: hidden states of the target that are read of a token, and numbers of each.
        hidden_size, dtype: of states.
        logits: [n, vocab_size] float32 of states [n, hidden_size]; None on ranks that do not decide.
        share: what the rank that decides has, on all ranks.
    """

    def __init__(self, layers: FeatureLayers, fed: HeadRows, store: KVStore, graphs: ChainGraphs | None) -> None:
        """Have `layers` work on the rows `fed` over a store, through graphs where there are any."""
        rows = fed.rows
        self._layers = layers
        self._store = store
        self._chains = graphs
        self.rows = self._rows = rows
        if rows.device.type == "cuda":  # where growing would hold up a round
            layers.reserve_positions(-(-rows.token_ids.shape[1] // rows.block_size) * rows.block_size)
        self.block_size = rows.block_size
        self.tapped_shape = fed.tapped_shape
        self.hidden_size = layers.hidden_size
        self.dtype = layers.dtype
        self.logits = layers.logits
        self.share = layers.share

    def warm_up(self) -> None:
        """Make all graphs, where there are any. Collective over the group."""
        if self._chains is not None:
            self._chains.warm_up(self._rows.sampling)

    @property
    def num_graphs(self) -> int:
        """Graphs that are held."""
        return 0 if self._chains is None else self._chains.num_graphs

    def close(self) -> None:
        """Give back what must not outlive the communicators. Nothing runs afterwards."""
        if self._chains is not None:
            self._chains.close()

    def prepare_steps(self, tables: torch.Tensor, positions: torch.Tensor) -> Sequence[StepBatch]:
        """What `step` takes, in order, to feed rows with block tables [R, blocks] one token each at positions
        [R, steps] int64, -1 where a row takes no part."""
        count, queries = positions.shape
        whole = AttentionBatch([AttentionSegment(0, count, queries, tables, positions)], self._rows.block_size)
        return [StepBatch(whole, step) for step in range(queries)]

    def step(self, batch: StepBatch, tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Feed tokens [R] int64 with hidden [R, hidden], which is overwritten; the states [R, hidden] behind them."""
        positions = batch.segments[0].positions.reshape(-1).clamp(min=0)
        return self._layers.forward(tokens, positions, hidden, batch, self._store)

    def tables(self, rows: torch.Tensor, context: int) -> torch.Tensor:
        """[rows, blocks] int64: the block tables of `rows` [rows] int64, wide enough for `context` positions."""
        blocks = -(-context // self._rows.block_size)
        if self._chains is not None:
            blocks = self._chains.shapes.blocks(blocks, len(rows))
        return self._rows.tables(rows, blocks)


class ReadingHeads(RunningHeads):
    """Heads that attend in what the target keeps (`speculation.protocols.ReadingHeads`)."""

    def __init__(self, layers: FeatureLayers, fed: HeadRows) -> None:
        """Have `layers` read what the target keeps of the rows `fed`; through graphs where `fed` has any."""
        assert fed.store is not None, "they sit beside the target"
        graphs: ChainGraphs | None = None
        if fed.capture is not None and fed.graph_shapes is not None:
            num_made = count_chain_graphs(fed.graph_shapes, 1 + NUM_KINDS)
            graphs = ChainGraphs(layers, fed.store, fed.capture, fed.graph_shapes, num_made)
        super().__init__(layers, fed, fed.store, graphs)
        self.begin = layers.fuse

    def follow(
        self,
        rows: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        context: int,
        keyed: KeyedRanks | None,
    ) -> torch.Tensor | None:
        """Choose tokens one behind the other, of which the first follows the newest token of each row.

        Args:
            rows: [R] int64 on the device.
            hidden: [R, hidden_size] states that are fed beside the newest tokens.
            positions: [R, steps] int64: at which tokens are fed; -1 where a row takes no part.
            context: upper bound of positions, plus one.
            keyed: how rows choose, the first token at their lengths; None takes the likeliest.

        Returns:
            [R, steps] int64, equal on all ranks; None where steps have to be run one by one.
        """
        if self._chains is None:
            return None
        return self._chains.follow(self.newest(rows), hidden, positions, self.tables(rows, context), keyed)

    def newest(self, rows: torch.Tensor) -> torch.Tensor:
        """[R] int64: the newest token of each of `rows` [R] int64."""
        places = (self._rows.lengths.index_select(0, rows) - 1).clamp(min=0)
        return self._rows.token_ids[rows, places].to(torch.int64)

    @inference
    def warm_up_rows(self, count: int) -> None:
        """Run a step as rounds of so many rows do; nothing is at a position. Collective over the group."""
        rows = cached_range(0, count, self._rows.device)
        hidden = torch.zeros((count, self.hidden_size), dtype=self.dtype, device=rows.device)
        (batch,) = self.prepare_steps(self.tables(rows, 1), torch.full_like(rows, -1).unsqueeze(1))
        logits = self.logits(self.step(batch, self.newest(rows), hidden))
        self.share(torch.empty_like(rows) if logits is None else logits.argmax(dim=1))
