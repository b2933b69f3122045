"""Heads that keep keys and values of every token, over the rows of the target beside which they sit: a store of their
own, in the target's blocks.

Block b of a row is slot b in the target's store and in this one. So rows, prompts in chunks, preemption and the reuse
of prefixes are the target's; a block is found again by its tokens and the one behind them, as what is kept at a
position depends on the token behind it (kvcache/tables.py). It knows rows, segments and a store. It does not know what
heads compute, or which tokens are chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from trtrun.core.nouns import RoundPlan
from trtrun.engine.rows import RowState
from trtrun.kvcache.formats import KVFormat
from trtrun.kvcache.segments import AttentionBatch, AttentionSegment, StepBatch
from trtrun.kvcache.store import KVStore


class FeatureLayers(Protocol):
    """What heads compute; layers/eagle3_head.py."""

    hidden_size: int
    dtype: torch.dtype
    num_layers: int
    kv_heads: int
    head_dim: int
    has_overflowed: bool

    def reserve_positions(self, positions: int) -> None:
        """Make rotary tables for positions [0, positions) now; free otherwise."""
        ...

    def fuse(self, tapped: torch.Tensor) -> torch.Tensor:
        """Hidden states of the target [n, taps, its hidden] → [n, hidden]."""
        ...

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        hidden: torch.Tensor,
        attention: AttentionBatch,
        store: KVStore,
    ) -> torch.Tensor:
        """Feed tokens [n] at positions [n], with hidden states [n, hidden]; the states [n, hidden] behind them."""
        ...

    def logits(self, state: torch.Tensor) -> torch.Tensor | None:
        """[n, the target's vocab_size] float32 for states [n, hidden]; None on ranks that do not decide."""
        ...

    def share(self, tokens: torch.Tensor) -> torch.Tensor:
        """What the rank that decides has in `tokens`, on all ranks."""
        ...


class StoredHeads:
    """Heads of one rank at work on the target's rows; see `speculation.protocols.FeatureHeads`."""

    def __init__(self, layers: FeatureLayers, rows: RowState, num_blocks: int, kv_format: KVFormat) -> None:
        """Have `layers` keep what they keep of the target's `rows` in a store of `num_blocks` blocks, as the target's
        has for rows, in a format."""
        self._layers = layers
        self._rows = rows
        self._store = KVStore(
            layers.num_layers,
            num_blocks,
            layers.kv_heads,
            rows.block_size,
            layers.head_dim,
            layers.dtype,
            rows.device,
            kv_format,
        )
        if rows.device.type == "cuda":  # where growing would hold up a round
            layers.reserve_positions(-(-rows.token_ids.shape[1] // rows.block_size) * rows.block_size)
        self.hidden_size = layers.hidden_size
        self.dtype = layers.dtype
        self.fuse = layers.fuse
        self.logits = layers.logits
        self.share = layers.share

    def begin_round(self, plan: RoundPlan) -> None:
        """Clear what rows get to write to, where it may hold what is no number: see `Engine.begin_round`."""
        if self._layers.has_overflowed:
            self._store.clear(self._rows.fresh_blocks(plan))

    def feed(
        self,
        parts: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
        hidden: torch.Tensor,
        context: int,
    ) -> torch.Tensor:
        """Feed rows some tokens each.

        Args:
            parts: rows [R] int64, tokens [R, Q] int64 and positions [R, Q] int64 of each, on the device; a position of
                -1 is padding. A row is in one part at most.
            hidden: [tokens, hidden] of all parts' tokens, in order, which is overwritten.
            context: upper bound of positions, plus one.

        Returns:
            [tokens, hidden]: the states behind them.
        """
        segments, start = list[AttentionSegment](), 0
        for rows, tokens, positions in parts:
            count, queries = tokens.shape
            segment = AttentionSegment(start, count, queries, self._tables(rows, context), positions)
            segments.append(segment)
            start = segment.stop
        fed = torch.cat([tokens.reshape(-1) for _, tokens, _ in parts])
        at = torch.cat([positions.reshape(-1) for _, _, positions in parts]).clamp(min=0)
        return self._layers.forward(fed, at, hidden, AttentionBatch(segments, self._rows.block_size), self._store)

    def prepare_steps(self, rows: torch.Tensor, positions: torch.Tensor, context: int) -> Sequence[StepBatch]:
        """What `step` takes, in order, to feed `rows` [R] one token each at positions [R, steps] int64, -1 where a row
        takes no part."""
        count, queries = positions.shape
        segment = AttentionSegment(0, count, queries, self._tables(rows, context), positions)
        whole = AttentionBatch([segment], self._rows.block_size)
        return [StepBatch(whole, step) for step in range(positions.shape[1])]

    def step(self, batch: StepBatch, tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Feed tokens [R] int64 with hidden [R, hidden], which is overwritten; the states [R, hidden] behind them."""
        positions = batch.segments[0].positions.reshape(-1).clamp(min=0)
        return self._layers.forward(tokens, positions, hidden, batch, self._store)

    def _tables(self, rows: torch.Tensor, context: int) -> torch.Tensor:
        return self._rows.tables(rows, -(-context // self._rows.block_size))
