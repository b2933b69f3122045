"""What drafters share whose heads go on from token to token and choose as the target will, with its random numbers of
each position (Daliri et al. 2024, arXiv:2408.07978). The rank that has the heads' logits chooses, and the others are
told. It does not know what heads are fed, or what they keep.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from trtrun.configuration.drafting.speculation_section import HybridOptions
from trtrun.core.nouns import Draft, RoundPlan
from trtrun.guiding.row_guides import RowGuides
from trtrun.sampling.distributions import KeyedRanks, distributions_of
from trtrun.sampling.random import Stream
from trtrun.speculation.drafter import Drafter
from trtrun.speculation.protocols import Rows, RunningHeads
from trtrun.speculation.text_drafts import TextDrafts

Heads = TypeVar("Heads", bound=RunningHeads[Any])


class RunningHeadDrafter(Drafter, Generic[Heads]):
    """A drafter of such heads, for their rows. Its drafts are no samples, so they have no draft_probs: the target
    chooses its own token at every position.

    Args:
        heads: that draft.
        options: how texts are looked up, whose tokens take the place of the heads'; None where they are not.
    """

    def __init__(self, heads: Heads, options: HybridOptions | None) -> None:
        self._heads, self._rows = heads, heads.rows
        self._given = TextDrafts(heads.rows, options=options)
        self._proposed: Draft | None = None
        lengths = heads.rows.lengths
        self._states = torch.zeros((len(lengths), heads.hidden_size), dtype=heads.dtype, device=lengths.device)

    @property
    @override
    def rows(self) -> Rows:
        return self._rows

    @override
    def guide(self, guides: RowGuides) -> None:
        self._given.guide(guides)

    @override
    def release_rows(self, plan: RoundPlan) -> None:
        self._given.release_rows(plan)

    @property
    @override
    def num_graphs(self) -> int:
        return self._heads.num_graphs

    @override
    def close(self) -> None:
        self._heads.close()

    def _chain(
        self, listed: list[int], lengths: Tensor, draft: Callable[[KeyedRanks | None], Tensor | None]
    ) -> Tensor | None:
        """All tokens of rows as one piece of work, which `draft` does: the likeliest, or as it is told. None where
        choices look at a row's tokens, or there is no such."""
        sampling = self._rows.sampling
        if sampling.needs_history(listed):
            return None
        keyed = None
        if sampling.sampled_indices(listed):
            keyed = KeyedRanks.of(sampling, listed, lengths, Stream.TARGET)
            if keyed is None:
                return None
        return draft(keyed)

    def _choose(self, plan: RoundPlan, listed: list[int], where: Tensor, hidden: Tensor) -> Tensor:
        """[R] int64 on all ranks: what the heads put at places `where` [R] of the rows, behind states [R, hidden]."""
        logits = self._heads.logits(hidden)
        if logits is None:
            return self._heads.share(torch.empty_like(where))
        state, raw = self._rows, logits.unsqueeze(1)
        found = distributions_of(state.sampling, raw, listed, where, state.token_ids, None, plan.max_context)
        return self._heads.share(found.choose(Stream.TARGET).squeeze(1))
