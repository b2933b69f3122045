"""SuffixDecoding on the target ranks: the drafting method `suffix` (Oliaro et al. 2024, arXiv:2411.04975).

Of all the places where a row's last tokens stood before it proposes what followed most often, as far as it is likely;
prompt lookup (ngram.py) takes the first of the longest matches at its word. It needs no model. Every target rank looks
at the same integers in its own copy of the rows, so that all propose the same and nothing has to travel. A corpus is a
further text in which every row is looked up; no row sees another's text.

It knows the target's rows and options. It does not know how places are found, or which continuations are likely.
"""

from __future__ import annotations

import torch

from trtrun.configuration.drafting_methods import SuffixSection
from trtrun.speculation.drafter import DRAFTERS, Drafter, DrafterContext
from trtrun.speculation.found_paths import Continuations, LookupDrafter
from trtrun.speculation.protocols import Rows
from trtrun.speculation.suffixes.continuations import MOST_PLACES, SuffixRule, join_places, likely_paths
from trtrun.speculation.suffixes.corpus import SortedCorpus
from trtrun.speculation.suffixes.own_text import find_in_rows, last_tokens

_MOST_COMPARED = 1 << 21
"""Pairs of tokens that are compared at a time: with many rows of long contexts, memory stays within some tens of
megabytes."""


class SuffixDrafter(LookupDrafter):
    """Proposes what followed the row's last tokens most often; nothing where they are new."""

    def __init__(self, rows: Rows, rule: SuffixRule, max_paths: int = 1, corpus: SortedCorpus | None = None) -> None:
        """Look in `rows` and `corpus`, and propose by `rule` up to `max_paths` continuations of each row."""
        super().__init__(rows)
        self._rule = rule
        self._max_paths = max_paths
        self._corpus = corpus

    def _rows_at_a_time(self, columns: int, draft_len: int) -> int:
        """See LookupDrafter."""
        return _MOST_COMPARED // max(self._rule.most_matched * columns, MOST_PLACES**2 * draft_len)

    def _look_up(self, rows: torch.Tensor, draft_len: int, columns: int) -> Continuations:
        """See LookupDrafter: what is likely."""
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
