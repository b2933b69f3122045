"""SuffixDecoding on the target ranks: the drafting method `suffix` (Oliaro et al. 2024, arXiv:2411.04975).

Of all the places where a row's last tokens stood before it proposes what followed most often, as far as it is likely;
prompt lookup (ngram.py) takes the first of the longest matches at its word. It needs no model. Every target rank looks
at the same integers in its own copy of the rows, so that all propose the same and nothing has to travel. A corpus is a
further text in which every row is looked up, and so are past answers where some are kept; in no other way a row sees
another's text.

It knows the target's rows and options. It does not know how places are found, or which continuations are likely.
"""

from __future__ import annotations

from torch import Tensor

from trtrun.configuration.drafting.text_methods import SuffixSection
from trtrun.core.nouns import RoundPlan
from trtrun.speculation.drafter import DRAFTERS, Drafter, DrafterContext
from trtrun.speculation.found_paths import Continuations, LookupDrafter
from trtrun.speculation.protocols import Rows
from trtrun.speculation.suffixes.search import SuffixSearch


class SuffixDrafter(LookupDrafter):
    """Proposes what followed the row's last tokens most often; nothing where they are new."""

    def __init__(self, rows: Rows, search: SuffixSearch, max_paths: int = 1) -> None:
        """Propose what `search` finds, up to `max_paths` continuations of each of the `rows`."""
        super().__init__(rows)
        self._search = search
        self._max_paths = max_paths

    def release_rows(self, plan: RoundPlan) -> None:
        """See Drafter."""
        self._search.release_rows(plan)

    def begin_round(self, plan: RoundPlan) -> None:
        """See Drafter."""
        super().begin_round(plan)
        self._search.begin_round(plan)

    def _rows_at_a_time(self, columns: int, draft_len: int) -> int:
        """See LookupDrafter."""
        return self._search.rows_at_a_time(columns, draft_len)

    def _look_up(self, rows: Tensor, draft_len: int, columns: int) -> Continuations:
        """See LookupDrafter: what is likely."""
        return self._search.look_up(rows, draft_len, columns, self._max_paths)


@DRAFTERS.register("suffix")
def make_suffix_drafter(place: DrafterContext) -> Drafter:
    """The longest and likeliest continuations in the target's rows, past answers and the corpus, with the section's
    options."""
    section = place.section
    assert isinstance(section, SuffixSection) and place.target is not None
    rows = place.target.rows
    return SuffixDrafter(rows, SuffixSearch.of_options(section, rows, place.corpus), section.max_paths)
