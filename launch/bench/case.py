"""The timed runs of one mode with one number of rows, and their figures.

It knows numbers. It does not know how runs are made or shown.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

from trtrun.core.request_statistics import ForesightStatistics
from trtrun.timing.telemetry import ROUND_PARTS

Prompts = list[list[int]]


@dataclass
class Case:
    """All timed runs of one mode with one number of rows."""

    prompts: list[Prompts] = field(default_factory=list)
    tokens_per_s: list[float] = field(default_factory=list)
    round_s: list[float] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)
    output_token_s: list[float] = field(default_factory=list)
    num_rounds: int = 0
    num_row_rounds: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    num_suffix_draft_tokens: int = 0
    num_accepted_suffix_draft_tokens: int = 0
    draft_losses: int = 0
    num_guesses: int = 0
    foresight: ForesightStatistics = field(default_factory=ForesightStatistics)
    num_captures: int = 0
    num_compilations: int = 0
    anticipating_s: float = 0.0
    elapsed_s: float = 0.0
    parts_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(ROUND_PARTS, 0.0))

    def as_dict(self) -> dict[str, object]:
        """Medians over the runs, and what a round took on average: the parts of `round_ms` add up to `round_wall_ms`,
        which is all the time of the timed runs, prompts and outputs too, shared out over their rounds."""
        rounds = max(1, self.num_rounds)
        return {
            "tokens_per_s": round(statistics.median(self.tokens_per_s), 2),
            "tokens_per_s_runs": [round(value, 2) for value in self.tokens_per_s],
            "round_wall_ms_runs": [round(1e3 * value, 3) for value in self.round_s],
            "time_to_first_token_ms": round(1e3 * statistics.median(self.first_token_s), 3),
            "time_per_output_token_ms": round(1e3 * statistics.median(self.output_token_s), 3),
            "mean_acceptance_length": round(self.mean_acceptance_length, 3),
            "num_rounds": self.num_rounds,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_draft_tokens": self.num_accepted_draft_tokens,
            "num_suffix_draft_tokens": self.num_suffix_draft_tokens,
            "num_accepted_suffix_draft_tokens": self.num_accepted_suffix_draft_tokens,
            "draft_losses": self.draft_losses,
            "num_captures": self.num_captures,
            "num_compilations": self.num_compilations,
            "round_wall_ms": round(1e3 * self.elapsed_s / rounds, 6),
            "round_ms": {name: round(1e3 * seconds / rounds, 6) for name, seconds in self.parts_s.items()},
        } | ({"drafting_ahead": self._foresight_figures()} if self.foresight.due_by_place else {})

    @property
    def first_over_next(self) -> float | None:
        """The first run's tokens a second as a multiple of the median of those that follow; None without any."""
        first, *following = self.tokens_per_s
        return round(first / statistics.median(following), 3) if following else None

    def _foresight_figures(self) -> dict[str, object]:
        """How drafting ahead went; a place is the number of draft tokens that the round before had accepted."""
        due = self.foresight.due_by_place
        places = zip(self.foresight.foreseen_by_place, due, strict=True)
        return {
            "hit_rate": round(self.foresight.hit_rate or 0.0, 4),
            "hit_rate_by_place": [round(hits / count, 4) if count else None for hits, count in places],
            "due_by_place": list(due),
            "guesses_per_row_round": round(self.num_guesses / max(1, sum(due)), 3),
            "redrafted_row_rounds": self.foresight.num_redrafted_rounds,
            "anticipating_ms": round(1e3 * self.anticipating_s / max(1, self.num_rounds), 6),
        }

    @property
    def mean_acceptance_length(self) -> float:
        """Accepted + 1, averaged over the rounds of all rows."""
        return 1 + self.num_accepted_draft_tokens / self.num_row_rounds if self.num_row_rounds else 0.0
