"""Drafts from texts beside a model: what followed a row's last tokens before takes the place of what the model would
say, where enough of them stood there; as a draft that came with a request, which goes first, does.

It knows rows by protocol. It does not know models, nor how anything is found.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from trtrun.configuration.drafting.speculation_section import HybridOptions
from trtrun.core.nouns import RoundPlan
from trtrun.guiding.row_guides import RowGuides
from trtrun.speculation.found_paths import PredictedOutputs
from trtrun.speculation.protocols import Rows
from trtrun.speculation.suffixes.search import SuffixSearch
from trtrun.tensors import cached_range, cached_tensor


class Suggestion(NamedTuple):
    """What is proposed in place of a model's tokens, for the decode rows of a plan, in order.

    Attributes:
        tokens: [rows, draft_len] int64.
        is_given: [rows, draft_len] bool: which of them are proposed; the others are any token.
        num_suffix_tokens: [rows] int64: how many of a row's were found in texts; None where none can be.
    """

    tokens: Tensor
    is_given: Tensor
    num_suffix_tokens: Tensor | None = None

    def of_rows(self, places: Tensor) -> Suggestion:
        """Keep what is suggested for the rows at `places` [n] int64."""
        found = None if self.num_suffix_tokens is None else self.num_suffix_tokens[places]
        return Suggestion(self.tokens[places], self.is_given[places], found)

    def whole_rows(self, most: list[int]) -> list[int]:
        """Rows of which all tokens are given that they need, as many as `most` says. On a GPU, which nothing may wait
        for, it is not known of any."""
        if not self.tokens.is_cpu:
            return []
        counts = self.is_given.cumprod(dim=1).sum(dim=1).tolist()
        return [row for row, (count, wanted) in enumerate(zip(counts, most, strict=True)) if count >= wanted]


class TextDrafts:
    """What requests brought, and where it is looked for, what texts say."""

    def __init__(self, rows: Rows, vocab_size: int | None = None, options: HybridOptions | None = None) -> None:
        """Suggest for `rows` no id from `vocab_size` on; look texts up where `options` say so."""
        self._rows = rows
        self._vocab_size = vocab_size
        self._given = PredictedOutputs(rows, vocab_size)
        self._search: SuffixSearch | None = None
        if options is not None and options.enable_suffix_decoding:
            self._search = SuffixSearch.of_options(options, rows)
            self._min_match = options.suffix_decoding_min_match_len

    def guide(self, guides: RowGuides) -> None:
        """Keep to these guides."""
        self._given.guides = guides

    def release_rows(self, plan: RoundPlan) -> None:
        """Look once more at rows that the plan drops."""
        if self._search is not None:
            self._search.release_rows(plan)

    def begin_round(self, plan: RoundPlan) -> None:
        """Take in rows that come and go."""
        self._given.begin_round(plan)
        if self._search is not None:
            self._search.begin_round(plan)

    def propose(self, plan: RoundPlan) -> Suggestion | None:
        """Suggest tokens for the plan's decode rows; None where there is nothing for any of them."""
        given = self._given.propose(plan)
        if self._search is None or not plan.draft_len:
            return None if given is None else Suggestion(*given)
        tokens, counts = self._look_up(self._search, plan)
        if given is not None:
            is_own = given[1].any(dim=1)
            tokens = torch.where(is_own.unsqueeze(1), given[0], tokens)
            counts = torch.where(is_own, 0, counts)
        elif counts.is_cpu and not counts.any():
            return None
        is_given = cached_range(0, plan.draft_len, tokens.device) < counts.unsqueeze(1)
        return Suggestion(tokens, is_given if given is None else is_given | given[1], counts)

    def _look_up(self, search: SuffixSearch, plan: RoundPlan) -> tuple[Tensor, Tensor]:
        """[rows, draft_len] int64 and how many of them there are, no more than the plan asks for."""
        device, draft_len = self._rows.lengths.device, plan.draft_len
        rows = cached_tensor(plan.decode_rows.tolist(), device)
        columns = min(plan.max_context, self._rows.token_ids.shape[1])
        share = max(1, search.rows_at_a_time(columns, draft_len))
        parts = [
            search.look_up(rows[start : start + share], draft_len, columns, min_match=self._min_match)
            for start in range(0, len(rows), share)
        ]
        tokens = torch.cat([part.tokens[:, 0] for part in parts])
        counts = torch.cat([part.counts[:, 0] for part in parts])
        counts = torch.minimum(counts, cached_tensor(plan.draft_lens.clip(min=0).tolist(), device))
        if self._vocab_size is not None:
            counts = torch.minimum(counts, (tokens < self._vocab_size).cumprod(dim=1).sum(dim=1))
        return tokens, counts
