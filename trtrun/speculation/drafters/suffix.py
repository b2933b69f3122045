"""SuffixDecoding on the target ranks: the drafting method `suffix` (Oliaro et al. 2024, arXiv:2411.04975).

Of all the places where a row's last tokens stood before it proposes what followed most often, as far as it is likely;
prompt lookup (ngram.py) takes the first of the longest matches at its word. It needs no model. Every target rank looks
at the same integers in its own copy of the rows, so that all propose the same and nothing has to travel. A corpus is a
further text in which every row is looked up; no row sees another's text.

It knows the target's rows and options. It does not know how places are found, or which continuations are likely.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trtrun.configuration.drafting_methods import SuffixSection
from trtrun.core.nouns import Draft, RoundPlan
from trtrun.speculation.drafter import DRAFTERS, Drafter, DrafterContext
from trtrun.speculation.found_paths import Continuations, draft_of_paths, no_draft
from trtrun.speculation.given_drafts import GivenDrafts
from trtrun.speculation.protocols import Rows
from trtrun.speculation.suffixes.continuations import MOST_PLACES, SuffixRule, join_places, likely_paths
from trtrun.speculation.suffixes.corpus import SortedCorpus
from trtrun.speculation.suffixes.own_text import find_in_rows, last_tokens
from trtrun.tensors import inference, kept_integers

_MOST_COMPARED = 1 << 21
"""Pairs of tokens that are compared at a time: with many rows of long contexts, memory stays within some tens of
megabytes."""


class SuffixDrafter(Drafter):
    """Proposes what followed the row's last tokens most often; nothing where they are new.

    A proposal is no sample, so it has no draft_probs: the target chooses its own token at every position, greedy or
    sampled, and a draft token is kept where it is that token.
    """

    def __init__(self, rows: Rows, rule: SuffixRule, max_paths: int = 1, corpus: SortedCorpus | None = None) -> None:
        """Look in `rows` and `corpus`, and propose by `rule` up to `max_paths` continuations of each row. What came
        with a request is proposed first."""
        self._rows = rows
        self._given = GivenDrafts(rows)
        self._rule = rule
        self._max_paths = max_paths
        self._corpus = corpus

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
        if plan.draft_len == 0:
            return no_draft(plan, device)
        rows = kept_integers(plan.decode_rows.tolist(), device)
        columns = min(plan.max_context, self._rows.token_ids.shape[1])
        compared = max(self._rule.most_matched * columns, MOST_PLACES**2 * plan.draft_len)
        share = max(1, _MOST_COMPARED // compared)
        starts = range(0, len(rows), share)
        found = [self._look_up(rows[start : start + share], plan.draft_len, columns) for start in starts]
        tokens, counts = (torch.cat(parts) for parts in zip(*found, strict=True))
        return draft_of_paths(plan, Continuations(tokens, counts), self._given.propose(plan))

    def _look_up(self, rows: torch.Tensor, draft_len: int, columns: int) -> Continuations:
        """What is likely to follow `rows` [R] int64 of at most `columns` tokens."""
        token_ids = self._rows.token_ids[rows, :columns]
        lengths = self._rows.lengths.index_select(0, rows)
        wanted = last_tokens(token_ids, lengths, self._rule.most_matched)
        places = find_in_rows(token_ids, lengths, wanted, draft_len)
        if self._corpus is not None:
            places = join_places(places, self._corpus.find(wanted, draft_len))
        return likely_paths(places, self._rule, self._max_paths)


@DRAFTERS.register("suffix")
def make_suffix_drafter(place: DrafterContext) -> Drafter:
    """The longest and likeliest continuations in the target's rows and the corpus, with the section's options."""
    section = place.section
    assert isinstance(section, SuffixSection) and place.target is not None
    rule = SuffixRule(
        section.suffix_decoding_max_tree_depth,
        section.suffix_decoding_max_spec_factor,
        section.suffix_decoding_max_spec_offset,
        section.suffix_decoding_min_token_prob,
    )
    return SuffixDrafter(place.target.rows, rule, section.max_paths, place.corpus)
