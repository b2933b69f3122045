"""Heads that draft all tokens of a row in one forward, over the target's rows: the row's newest token and mask tokens
behind it, which see what is kept of the tokens before, and each other.

The store and what is fed to it are as of other heads (stored_heads.py). What a draft writes lies behind what is kept,
where the next round writes over it. It knows rows, segments and a store. It does not know what heads compute, or which
tokens are chosen.
"""

from __future__ import annotations

from typing import Protocol

import torch

from trtrun.core.nouns import FedPart
from trtrun.engine.heads.feature_layers import FeatureLayers
from trtrun.engine.heads.head_paths import HeadSpace
from trtrun.engine.heads.head_rows import HeadRows
from trtrun.engine.heads.stored_heads import StoredHeads
from trtrun.heads.dflash_head import DraftedBlocks
from trtrun.kvcache.formats import KVFormat
from trtrun.kvcache.segments import AttentionBatch, AttentionSegment
from trtrun.kvcache.store import KVStore
from trtrun.tensors import inference, kept_integers, kept_range


class MaskedLayers(FeatureLayers, Protocol):
    """Heads of one rank; heads/dflash_head.py."""

    mask_token: int
    from_newest: bool
    looks_back: bool

    def guess(
        self, tokens: torch.Tensor, positions: torch.Tensor, drafted: DraftedBlocks, store: KVStore
    ) -> torch.Tensor:
        """Run drafts; the states [n, hidden] behind tokens [n] at positions [n]."""
        ...

    def logits(self, state: torch.Tensor, before: torch.Tensor | None = None) -> torch.Tensor | None:
        """[n, the target's vocab_size] float32 for states [n, hidden], behind tokens `before` [n] where they look back;
        None on ranks that do not decide."""
        ...


class MaskedHeads(StoredHeads):
    """See `speculation.protocols.MaskedHeads`."""

    def __init__(self, layers: MaskedLayers, fed: HeadRows, space: HeadSpace, kv_format: KVFormat) -> None:
        """Have `layers` keep what they keep of the rows `fed`, in a store of as many blocks as the target's, in a
        format."""
        super().__init__(layers, fed, space, kv_format)
        self._masked = layers
        self.looks_back = layers.looks_back
        self.logits_behind = layers.logits

    @inference
    def guess(self, rows: torch.Tensor, asked: list[int], draft_len: int, context: int) -> torch.Tensor:
        """Run a draft of each row.

        Args:
            rows: [R] int64 on the device.
            asked: of each how many tokens it needs; a row that needs none takes no part.
            draft_len: the most of them.
            context: upper bound of positions, plus one.

        Returns:
            [R, draft_len, hidden]: what says the first token, the second, and so on.
        """
        device, count, first = rows.device, len(asked), 0 if self._masked.from_newest else 1
        width = draft_len + first
        lengths = self.rows.lengths.index_select(0, rows).unsqueeze(1)
        counts = kept_integers([needed + first if needed else 0 for needed in asked], device).unsqueeze(1)
        steps = kept_range(0, width, device)
        positions = torch.where(steps < counts, lengths - 1 + steps, -1)
        ends = torch.where(steps < counts, lengths - 2 + counts, -1)
        last = kept_range(0, count, device).unsqueeze(1) * width + (counts - 1).clamp(min=0)
        newest = self.rows.token_ids[rows, (lengths[:, 0] - 1).clamp(min=0)].to(torch.int64)
        tokens = newest.new_full((count, width), self._masked.mask_token)
        tokens[:, 0] = newest
        tables = self.tables(rows, context)
        own, whole = (
            AttentionBatch([AttentionSegment(0, count, width, tables, at)], self.block_size) for at in (positions, ends)
        )
        drafted = DraftedBlocks(own, whole, last.expand(-1, width).reshape(-1))
        at = positions.reshape(-1).clamp(min=0)
        states = self._masked.guess(tokens.reshape(-1), at, drafted, self._store)
        return states.view(count, width, -1)[:, first:]

    def warm_up_rows(self, count: int, draft_len: int) -> None:
        """Feed and draft as rounds of so many rows do; nothing is at a position, so that all is written to the null
        block. Collective over the group."""
        rows = kept_range(0, count, self.rows.lengths.device)
        nothing = torch.zeros((count, draft_len + 1), dtype=torch.int64, device=rows.device)
        tapped = torch.zeros((*nothing.shape, *self.tapped_shape), dtype=self.dtype, device=rows.device)
        self.feed([FedPart(rows, nothing, nothing - 1, tapped)], 1)
        states = self.guess(rows, [0] * count, draft_len, 1).flatten(0, 1)
        logits = self.logits_behind(states, nothing[:, 1:].reshape(-1) if self.looks_back else None)
        self.share(torch.empty_like(nothing[:, 1:]) if logits is None else logits.argmax(dim=1).view(count, -1))
