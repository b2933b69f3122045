"""Prompt lookup on the target ranks: the drafting method `ngram`.

What a row's last tokens were followed by when they occurred before is likely to follow again: in texts that quote,
summarise or rewrite their prompt, and in code. (Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding; vLLM's
method of the same name: the longest match counts, and of equally long ones the first.) It needs no model. Every target
rank looks up the same integers in its own copy of the rows, so that all propose the same and nothing has to travel.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trtrun.configuration.drafting_methods import PromptLookupSection
from trtrun.core.nouns import Draft, RoundPlan
from trtrun.speculation.drafter import DRAFTERS, Drafter, DrafterContext
from trtrun.speculation.given_drafts import GivenDrafts
from trtrun.speculation.protocols import Rows
from trtrun.tensors import inference, kept_integers

_MOST_POSITIONS = 1 << 20
"""Positions that are compared at a time: with many rows of long contexts, memory stays within twenty megabytes."""


class NgramDrafter(Drafter):
    """Proposes what followed the row's last tokens before; nothing where they are new.

    A proposal is no sample, so it has no draft_probs: the target chooses its own token at every position, greedy or
    sampled, and a draft token is kept where it is that token.
    """

    def __init__(self, rows: Rows, fewest: int, most: int) -> None:
        """Look in `rows` for the last `most` tokens of a row; the longest part of them counts, from `fewest` on. What
        came with a request is proposed first."""
        self._rows = rows
        self._given = GivenDrafts(rows)
        self._fewest = fewest
        self._most = most

    @property
    def rows(self) -> Rows:
        """See Drafter."""
        return self._rows

    def begin_round(self, plan: RoundPlan) -> None:
        """See Drafter."""
        self._given.begin_round(plan)

    @inference
    def propose(self, plan: RoundPlan, probability_rows: Sequence[int]) -> Draft:
        """See Drafter."""
        device = self._rows.lengths.device
        rows = kept_integers(plan.decode_rows.tolist(), device)
        most = kept_integers(plan.draft_lens.clip(min=0).tolist(), device)
        if plan.draft_len == 0:
            return Draft(torch.zeros((len(rows), 0), dtype=torch.int64, device=device), most)
        columns = min(plan.max_context, self._rows.token_ids.shape[1])
        share = max(1, _MOST_POSITIONS // columns)
        starts = range(0, len(rows), share)
        found = [self._look_up(rows[start : start + share], plan.draft_len, columns) for start in starts]
        tokens, counts = (torch.cat(parts) for parts in zip(*found, strict=True))
        given = self._given.propose(plan)
        if given is not None:
            num_given = given[1].sum(dim=1)
            tokens = torch.where(num_given.unsqueeze(1) > 0, given[0], tokens)
            counts = torch.where(num_given > 0, num_given, counts)
        return Draft(tokens, torch.minimum(counts, most))

    def _look_up(self, rows: torch.Tensor, draft_len: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What followed the longest earlier occurrence of the rows' last tokens, within the first `columns` tokens.

        Args:
            rows: [R] int64.
            draft_len: K, tokens to return.
            columns: upper bound of the rows' lengths, which the host knows.

        Returns:
            tokens: [R, K] int64.
            counts: [R] int64: how many of them there are, 0 where nothing was found.
        """
        token_ids = self._rows.token_ids[rows, :columns]
        last = self._rows.lengths.index_select(0, rows).unsqueeze(1) - 1
        places = torch.arange(columns, dtype=torch.int32, device=rows.device)
        # agrees[r, e]: the tokens up to place e are those up to the row's last one, as far back as was compared yet.
        agrees = places < last
        matched = torch.zeros_like(token_ids)
        for back in range(self._most):
            wanted = token_ids.gather(1, (last - back).clamp(min=0))
            agrees[:, :back] = False
            agrees[:, back:] &= token_ids[:, : columns - back] == wanted
            matched += agrees
        # The longest match, and of those the first. A product of both bounds fits into an int32.
        best, end = torch.max(matched * columns + (columns - 1 - places), dim=1, keepdim=True)
        is_found = best >= self._fewest * columns
        after = end + 1 + torch.arange(draft_len, device=rows.device)
        # Behind a row's end stands scratch, -1 too, which must be some token: it is fed with the rest.
        tokens = token_ids.gather(1, after.clamp(max=columns - 1)).to(torch.int64).clamp(min=0)
        return tokens, torch.where(is_found, last - end, 0).squeeze(1).clamp(max=draft_len)


@DRAFTERS.register("ngram")
def make_ngram_drafter(place: DrafterContext) -> Drafter:
    """Prompt lookup in the target's rows, with the section's options."""
    section = place.section
    assert isinstance(section, PromptLookupSection) and place.target is not None
    return NgramDrafter(place.target.rows, *section.lookup_range)
