"""What speculation did for a request: how its tokens came, its rounds, its times.

Plain data that adds up. It knows no round, no clock and no rank; `telemetry` has the totals of all requests.
"""

from __future__ import annotations

from functools import cache

import msgspec

ACCEPTED, RECOVERED, BONUS, PLAIN = "a", "r", "b", "p"
"""How a token came: a draft token that the target kept, its own in place of a rejected one, its own behind a draft that
was kept whole, its own where no draft was verified: the first behind a prompt, or in a round without one."""


@cache
def token_origins(num_draft_tokens: int, num_tokens: int) -> str:
    """How each token came that a row gained in a round which verified `num_draft_tokens`: a letter each."""
    if num_draft_tokens == 0:
        return PLAIN * num_tokens
    return ACCEPTED * (num_tokens - 1) + (BONUS if num_tokens > num_draft_tokens else RECOVERED)


class ForesightStatistics(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """How often drafts were ready when their rounds began, where draft ranks draft ahead.

    Attributes:
        due_by_place: rounds in which a draft was due, by the draft tokens that the round before had accepted.
        foreseen_by_place: of these, how often it had been made before that round's verdict.
        num_redrafted_rounds: rounds in which the row waited for a fresh draft instead.
    """

    due_by_place: list[int] = []
    foreseen_by_place: list[int] = []
    num_redrafted_rounds: int = 0

    def record(self, place: int, foreseen: bool, num_draft_tokens: int) -> None:
        """Count a round in which a draft was due, and `num_draft_tokens` were there."""
        for counts in (self.due_by_place, self.foreseen_by_place):
            counts += [0] * (place + 1 - len(counts))
        self.due_by_place[place] += 1
        self.foreseen_by_place[place] += foreseen
        self.num_redrafted_rounds += num_draft_tokens > 0 and not foreseen

    def add(self, other: ForesightStatistics) -> None:
        """Add another's counts."""
        for own, added in (
            (self.due_by_place, other.due_by_place),
            (self.foreseen_by_place, other.foreseen_by_place),
        ):
            own += [0] * (len(added) - len(own))
            for place, count in enumerate(added):
                own[place] += count
        self.num_redrafted_rounds += other.num_redrafted_rounds

    def copy(self) -> ForesightStatistics:
        """A copy that does not change with these counts."""
        return ForesightStatistics([*self.due_by_place], [*self.foreseen_by_place], self.num_redrafted_rounds)

    @property
    def hit_rate(self) -> float | None:
        """Share of the rounds with a draft due in which it was there; None before the first."""
        due = sum(self.due_by_place)
        return sum(self.foreseen_by_place) / due if due else None


class RequestStatistics(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """What speculation did for one request. Times are seconds of `time.perf_counter`, one clock on a host.

    `admitted` is when it first got a row, `first_token` when its first token was committed. `num_drafts` of the
    `num_rounds` verified a draft: pacing, drafters with nothing to offer and lost draft ranks leave rounds without one.
    Of the draft tokens, those called `suffix` were found in texts in place of a model's (`enable_suffix_decoding`).
    """

    arrival: float = 0.0
    admitted: float | None = None
    first_token: float | None = None
    finished: float | None = None
    num_rounds: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    num_cached_prompt_tokens: int = 0
    num_preemptions: int = 0
    acceptance_histogram: list[int] = []
    foresight: ForesightStatistics = msgspec.field(default_factory=ForesightStatistics)
    num_suffix_draft_tokens: int = 0
    num_accepted_suffix_draft_tokens: int = 0

    def record_suffix(self, num_draft_tokens: int, num_accepted: int) -> None:
        """Count those of a round's verified and kept draft tokens that were found in texts."""
        self.num_suffix_draft_tokens += num_draft_tokens
        self.num_accepted_suffix_draft_tokens += num_accepted

    def record_round(self, num_draft_tokens: int, num_accepted: int) -> None:
        """Count one round that verified `num_draft_tokens` and kept `num_accepted` of them."""
        self.num_rounds += 1
        self.num_drafts += num_draft_tokens > 0
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted_draft_tokens += num_accepted
        histogram = self.acceptance_histogram
        while len(histogram) <= num_accepted:
            histogram.append(0)
        histogram[num_accepted] += 1

    def copy(self) -> RequestStatistics:
        """A copy that does not change with these counts and times."""
        own = [*self.acceptance_histogram]
        return msgspec.structs.replace(self, acceptance_histogram=own, foresight=self.foresight.copy())

    @property
    def queue_seconds(self) -> float:
        """From its arrival to its first row; 0 before that."""
        return self.admitted - self.arrival if self.admitted is not None else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens a round yields: accepted + 1, averaged over the rounds; 0 before the first."""
        return 1 + self.num_accepted_draft_tokens / self.num_rounds if self.num_rounds else 0.0
