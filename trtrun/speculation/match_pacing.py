"""How many tokens to draft in a round, and for which rows, where what texts repeat is proposed: what pays most.

Whether a draft is worth its time is a question of its match: of how long that is, and of how often matches of such a
length went on (scheduling/matches.py), which is counted where nothing is drafted, too. So drafts begin with the first
match, end where matches are bad, and come back with the next one that is not. What rounds cost is learned and what
drafts may cost at most is bounded as for all drafters (pacing.py). It knows kinds of matches, seconds and counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from trtrun.scheduling.matches import NUM_KINDS, MatchRecord
from trtrun.speculation.acceptance import DraftRecord
from trtrun.speculation.pacing import PLAIN_TOGETHER, WORTH_A_CHANGE, Pacer
from trtrun.speculation.round_costs import RoundCosts

_MEMORY = 0.99
"""What is kept of older drafts with every round."""

_TRUST, _MISTRUST = 1.0, 2.0
"""As many drafts count that matches say the truth of them; and that they do not, where losses are bounded."""


class MatchPacer(Pacer):
    """Paces a job whose drafts are what texts repeat."""

    def __init__(
        self,
        draft_len: int,
        matches: MatchRecord,
        costs: RoundCosts,
        record: DraftRecord | None = None,
        *,
        has_other_texts: bool = False,
    ) -> None:
        """Choose by `matches`, which others fill; `record` is what an earlier run has seen of them. With
        `has_other_texts` drafts may be found for rows without a match of their own."""
        super().__init__(draft_len, costs)
        self._matches = matches
        self._has_other_texts = has_other_texts
        # First tokens of drafts that should have been right by their matches, and those that were: a drafter may choose
        # another of several places.
        self._promised = self._kept = self._hope = 0.0
        if record is not None and len(record.offered) == NUM_KINDS:
            matches.offered[:], matches.accepted[:] = record.offered, record.accepted

    @property
    def seen(self) -> DraftRecord:
        """What was seen of matches, by their kinds."""
        return DraftRecord(tuple(self._matches.offered), tuple(self._matches.accepted), self._stake, True)

    @property
    def pays(self) -> bool:
        """Matches that are not drafted for cost nothing."""
        return True

    def choose_matches(self, kinds: Sequence[int]) -> tuple[int, frozenset[int]]:
        """Tokens to draft in the next round, and for rows with which kinds of matches.

        Args:
            kinds: of the match of each row that decodes and may have drafts; 0 for those without one.
        """
        rows, counts = len(kinds), Counter(kinds)
        if not self._has_other_texts:
            del counts[0]
        elif counts[0]:
            self._matches.forget_some(0)
        if not counts:
            return 0, frozenset()
        expected = {kind: self._matches.expected_tokens(kind, self._most) for kind in counts}
        best = WORTH_A_CHANGE * (PLAIN_TOGETHER if rows > 1 else 1.0)
        length, chosen, self._hope = 0, frozenset[int](), 0.0
        taken, num_drafting, gains = set[int](), 0, [0.0] * (self._most + 1)
        share = min(1.0, (self._kept + _TRUST) / (self._promised + _TRUST))
        least = min(share, self._kept / (self._promised + _MISTRUST))
        for kind in sorted(counts, key=lambda kind: -expected[kind][-1]):
            taken.add(kind)
            num_drafting += counts[kind]
            gains = [gain + counts[kind] * (tokens - 1) for gain, tokens in zip(gains, expected[kind], strict=True)]
            extra = self._load(rows, rows - num_drafting).extra
            for draft_len in range(1, self._most + 1):
                gain = gains[draft_len] / rows
                goodput = (1 + share * gain) / (1 + extra[draft_len])
                if goodput > best and extra[draft_len] <= self._stake + least * gain:
                    best, length, chosen, self._hope = goodput, draft_len, frozenset(taken), gains[1] / num_drafting
        return length, chosen

    def note_plan(self, num_rows: int, num_plain: int, draft_len: int, num_drafting: int) -> None:
        """A plan is out; what its matches promise is kept, to be compared with what comes."""
        super().note_plan(num_rows, num_plain, draft_len, num_drafting)
        self._promised = self._promised * _MEMORY + num_drafting * self._hope

    def record(
        self,
        num_rows: int,
        draft_len: int,
        seconds: float | None,
        acceptances: Sequence[tuple[int, int]],
        num_plain: int = 0,
        is_partial: bool = False,
    ) -> None:
        """Take in a round's result, and how many of its matches went on."""
        super().record(num_rows, draft_len, seconds, acceptances, num_plain, is_partial)
        self._kept = self._kept * _MEMORY + sum(accepted > 0 for _, accepted in acceptances)
