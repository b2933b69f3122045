"""The drafting methods `ngram` and `suffix`: what followed a row's last tokens before is proposed, on the target ranks.

Where texts quote, summarise or rewrite their prompt, and in code, what a row's last tokens were followed by when they
occurred before is likely to follow again. Prompt lookup (`ngram`: Saxena 2023,
github.com/apoorvumang/prompt-lookup-decoding, and vLLM's method of the same name) takes the longest match at its word,
and of equally long ones the first; where several continuations may be proposed, those of the next best matches are
further paths of a draft tree. SuffixDecoding (`suffix`: Oliaro et al. 2024, arXiv:2411.04975) proposes what followed
most often at all places where the last tokens stood, as far as it is likely.

Neither needs a model. Every target rank looks at the same integers in its own copy of the rows, so that all propose the
same and nothing has to travel. A corpus is a further text in which every row is looked up, and so are past answers
where some are kept; in no other way a row sees another's text. How places are found is `suffixes`' business.
"""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from trtrun.configuration.drafting.text_methods import PromptLookupSection, SuffixSection
from trtrun.core.nouns import RoundPlan
from trtrun.speculation.drafter import DRAFTERS, Drafter, DrafterContext
from trtrun.speculation.found_paths import Continuations, LookupDrafter, distinct
from trtrun.speculation.protocols import Rows
from trtrun.speculation.suffixes.search import SuffixSearch

_MOST_POSITIONS = 1 << 20
"""Positions that are compared at a time: with many rows of long contexts, memory stays within twenty megabytes."""

_CANDIDATES = 4
"""Matches that are looked at for each path: what repeats was followed by the same again."""


class NgramDrafter(LookupDrafter):
    """Proposes what followed the row's last tokens before; nothing where they are new."""

    def __init__(self, rows: Rows, fewest: int, most: int, max_paths: int = 1) -> None:
        """Look in `rows` for the last `most` tokens of a row; the longest part of them counts, from `fewest` on. Up to
        `max_paths` continuations are proposed."""
        super().__init__(rows)
        self._fewest = fewest
        self._most = most
        self._max_paths = max_paths

    @override
    def _rows_at_a_time(self, columns: int, draft_len: int) -> int:
        return _MOST_POSITIONS // columns

    @override
    def _look_up(self, rows: torch.Tensor, draft_len: int, columns: int) -> Continuations:
        """Continuations of the longest match first, and of equally long ones of the first; none is the start of
        another."""
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
        scores = matched * columns + (columns - 1 - places)
        if self._max_paths == 1:
            best, end = torch.max(scores, dim=1, keepdim=True)
        else:
            best, end = torch.topk(scores, min(_CANDIDATES * self._max_paths, columns), dim=1)
        counts = torch.where(best >= self._fewest * columns, last - end, 0).clamp(max=draft_len)
        after = end.unsqueeze(2) + 1 + torch.arange(draft_len, device=rows.device)
        # Behind a row's end stands scratch, -1 too, which must be some token: it is fed with the rest.
        tokens = token_ids.gather(1, after.clamp(max=columns - 1).flatten(1)).to(torch.int64).clamp(min=0)
        tokens = tokens.view(after.shape)
        return Continuations(tokens, counts) if self._max_paths == 1 else distinct(tokens, counts, self._max_paths)


@DRAFTERS.register("ngram")
def make_ngram_drafter(context: DrafterContext) -> Drafter:
    """Prompt lookup in the target's rows, with the section's options."""
    section = context.section
    assert isinstance(section, PromptLookupSection) and context.target is not None
    return NgramDrafter(context.target.rows, *section.lookup_range, section.max_paths)


class SuffixDrafter(LookupDrafter):
    """Proposes what followed the row's last tokens most often; nothing where they are new."""

    def __init__(self, rows: Rows, search: SuffixSearch, max_paths: int = 1) -> None:
        """Propose what `search` finds, up to `max_paths` continuations of each of the `rows`."""
        super().__init__(rows)
        self._search = search
        self._max_paths = max_paths

    @override
    def release_rows(self, plan: RoundPlan) -> None:
        self._search.release_rows(plan)

    @override
    def begin_round(self, plan: RoundPlan) -> None:
        super().begin_round(plan)
        self._search.begin_round(plan)

    @override
    def _rows_at_a_time(self, columns: int, draft_len: int) -> int:
        return self._search.rows_at_a_time(columns, draft_len)

    @override
    def _look_up(self, rows: Tensor, draft_len: int, columns: int) -> Continuations:
        return self._search.look_up(rows, draft_len, columns, self._max_paths)


@DRAFTERS.register("suffix")
def make_suffix_drafter(context: DrafterContext) -> Drafter:
    """The longest and likeliest continuations in the target's rows, past answers and the corpus, with the section's
    options."""
    section = context.section
    assert isinstance(section, SuffixSection) and context.target is not None
    rows = context.target.rows
    return SuffixDrafter(rows, SuffixSearch.of_options(section, rows, context.corpus), section.max_paths)
