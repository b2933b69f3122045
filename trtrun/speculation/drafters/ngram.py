"""Prompt lookup on the target ranks: the drafting method `ngram`.

What a row's last tokens were followed by when they occurred before is likely to follow again: in texts that quote,
summarise or rewrite their prompt, and in code. (Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding; vLLM's
method of the same name: the longest match counts, and of equally long ones the first.) Where several continuations may
be proposed, those of the next best matches are further paths of a draft tree. It needs no model. Every target rank
looks up the same integers in its own copy of the rows, so that all propose the same and nothing has to travel.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from trtrun.configuration.drafting_methods import PromptLookupSection
from trtrun.speculation.drafter import DRAFTERS, Drafter, DrafterContext
from trtrun.speculation.found_paths import Continuations, LookupDrafter
from trtrun.speculation.protocols import Rows

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

    def _rows_at_a_time(self, columns: int, draft_len: int) -> int:
        """See LookupDrafter."""
        return _MOST_POSITIONS // columns

    def _look_up(self, rows: torch.Tensor, draft_len: int, columns: int) -> Continuations:
        """See LookupDrafter: of the longest match first, and of equally long ones of the first; none is the start of
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
        return Continuations(tokens, counts) if self._max_paths == 1 else _distinct(tokens, counts, self._max_paths)


def _distinct(tokens: torch.Tensor, counts: torch.Tensor, most: int) -> Continuations:
    """The first `most` of continuations [R, candidates, K] that say something new, with their counts [R, candidates].

    One that is the start of another says nothing; of equal ones the first stays.
    """
    num_candidates, draft_len = tokens.shape[1:]
    order = torch.arange(num_candidates, device=tokens.device)
    steps = torch.arange(draft_len, device=tokens.device)
    # starts[r, a, b]: continuation a is the start of b.
    behind = steps >= counts.unsqueeze(2)
    starts = ((tokens.unsqueeze(2) == tokens.unsqueeze(1)) | behind.unsqueeze(2)).all(dim=3)
    starts &= counts.unsqueeze(2) <= counts.unsqueeze(1)
    equal = counts.unsqueeze(2) == counts.unsqueeze(1)
    is_said = (starts & (~equal | (order.unsqueeze(1) > order))).any(dim=2) | (counts == 0)
    kept = torch.sort(is_said.to(torch.int8), dim=1, stable=True).indices[:, :most]
    counts = counts.masked_fill(is_said, 0).gather(1, kept)
    tokens = tokens.gather(1, kept.unsqueeze(2).expand(-1, -1, draft_len))
    missing = most - kept.shape[1]
    return Continuations(pad(tokens, (0, 0, 0, missing)), pad(counts, (0, missing)))


@DRAFTERS.register("ngram")
def make_ngram_drafter(place: DrafterContext) -> Drafter:
    """Prompt lookup in the target's rows, with the section's options."""
    section = place.section
    assert isinstance(section, PromptLookupSection) and place.target is not None
    return NgramDrafter(place.target.rows, *section.lookup_range, section.max_paths)
