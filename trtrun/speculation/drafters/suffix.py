"""SuffixDecoding on the target ranks: the drafting method `suffix` (Oliaro et al. 2024, arXiv:2411.04975).

Of all the places where a row's last tokens stood before it proposes what followed most often, as far as it is likely;
prompt lookup (ngram.py) takes the first of the longest matches at its word. It needs no model. Every target rank looks
at the same integers in its own copy of the rows, so that all propose the same and nothing has to travel. A corpus is a
further text in which every row is looked up, and so are past answers where some are kept; in no other way a row sees
another's text.

It knows the target's rows and options. It does not know how places are found, or which continuations are likely.
"""

from __future__ import annotations

import torch

from trtrun.configuration.drafting_methods import SuffixSection
from trtrun.core.nouns import RoundPlan
from trtrun.speculation.drafter import DRAFTERS, Drafter, DrafterContext
from trtrun.speculation.found_paths import Continuations, LookupDrafter
from trtrun.speculation.protocols import Rows
from trtrun.speculation.suffixes.answers import PastAnswers
from trtrun.speculation.suffixes.continuations import MOST_PLACES, SuffixRule, join_places, likely_paths
from trtrun.speculation.suffixes.corpus import SortedCorpus
from trtrun.speculation.suffixes.own_text import find_in_rows, last_tokens
from trtrun.tensors import inference

_MOST_COMPARED = 1 << 21
"""Pairs of tokens that are compared at a time: with many rows of long contexts, memory stays within some tens of
megabytes."""


class SuffixDrafter(LookupDrafter):
    """Proposes what followed the row's last tokens most often; nothing where they are new."""

    def __init__(
        self,
        rows: Rows,
        rule: SuffixRule,
        max_paths: int = 1,
        corpus: SortedCorpus | None = None,
        answers: PastAnswers | None = None,
    ) -> None:
        """Look in `rows`, `answers` of the past and `corpus`, and propose by `rule` up to `max_paths` continuations of
        each row."""
        super().__init__(rows)
        self._rule = rule
        self._max_paths = max_paths
        self._corpus = corpus
        self._answers = answers
        self._starts: dict[int, int] = {}

    @inference
    def release_rows(self, plan: RoundPlan) -> None:
        """See Drafter: what they wrote becomes a past answer, and nothing of rows that nobody asked for."""
        for row in plan.dropped_rows:
            start = self._starts.pop(row, None)
            if self._answers is not None and start is not None:
                self._answers.add(self._rows.token_ids[row], start, self._rows.lengths[row])

    def begin_round(self, plan: RoundPlan) -> None:
        """See Drafter."""
        super().begin_round(plan)
        if plan.is_rehearsed:
            return
        for admission in plan.admissions:
            # What a preempted row had written is known, but for what goes on from its last tokens.
            known = len(admission.tokens) - self._rule.most_matched
            self._starts[admission.row] = max(admission.num_prompt_tokens, known)

    def _rows_at_a_time(self, columns: int, draft_len: int) -> int:
        """See LookupDrafter."""
        return _MOST_COMPARED // max(self._rule.most_matched * columns, MOST_PLACES**2 * draft_len)

    def _look_up(self, rows: torch.Tensor, draft_len: int, columns: int) -> Continuations:
        """See LookupDrafter: what is likely."""
        token_ids = self._rows.token_ids[rows, :columns]
        lengths = self._rows.lengths.index_select(0, rows)
        wanted = last_tokens(token_ids, lengths, self._rule.most_matched)
        places = find_in_rows(token_ids, lengths, wanted, draft_len)
        of_answers = None if self._answers is None else self._answers.corpus()
        for texts in (of_answers, self._corpus):
            if texts is not None:
                places = join_places(places, texts.find(wanted, draft_len))
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
    rows, answers = place.target.rows, None
    if section.suffix_decoding_max_cached_requests:
        answers = PastAnswers(
            section.suffix_decoding_max_cached_requests,
            section.suffix_decoding_max_cached_tokens,
            rule.most_matched,
            rows.lengths.device,
        )
    return SuffixDrafter(rows, rule, section.max_paths, place.corpus, answers)
