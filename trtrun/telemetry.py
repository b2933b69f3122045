"""Running totals of what rounds did and where their time went.

It adds up numbers that others measured. It knows no rank and opens no port.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from trtrun.core import RequestStatistics


@dataclass
class RunStatistics:
    """Totals since the start or the last reset. Times are seconds.

    Attributes:
        num_rounds: plans that ran.
        num_tokens: tokens committed.
        num_row_rounds: rounds summed over the rows that verified in them.
        num_draft_tokens: draft tokens verified.
        num_accepted_draft_tokens: of these, kept by the target.
        acceptance_histogram: how many row rounds kept 0, 1, … draft tokens.
        drafting, transferring, verifying, committing: time in each phase of the rounds, as its leader saw it.
        orchestrating: the orchestrator's own time: planning, committing, text, sending.
        waiting: the orchestrator's time asleep until a verdict came.
    """

    num_rounds: int = 0
    num_tokens: int = 0
    num_row_rounds: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    acceptance_histogram: list[int] = field(default_factory=list)
    drafting: float = 0.0
    transferring: float = 0.0
    verifying: float = 0.0
    committing: float = 0.0
    orchestrating: float = 0.0
    waiting: float = 0.0

    def add_request(self, statistics: RequestStatistics) -> None:
        """Add a finished request's counts."""
        self.num_row_rounds += statistics.num_rounds
        self.num_draft_tokens += statistics.num_draft_tokens
        self.num_accepted_draft_tokens += statistics.num_accepted_draft_tokens
        histogram = statistics.acceptance_histogram
        self.acceptance_histogram += [0] * (len(histogram) - len(self.acceptance_histogram))
        for accepted, count in enumerate(histogram):
            self.acceptance_histogram[accepted] += count

    @property
    def mean_acceptance_length(self) -> float:
        """Accepted + 1, averaged over row rounds; 0 before the first."""
        return 1 + self.num_accepted_draft_tokens / self.num_row_rounds if self.num_row_rounds else 0.0

    def as_dict(self) -> dict[str, object]:
        """Ready for JSON."""
        times = ("drafting", "transferring", "verifying", "committing", "orchestrating", "waiting")
        return {
            "num_rounds": self.num_rounds,
            "num_tokens": self.num_tokens,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_draft_tokens": self.num_accepted_draft_tokens,
            "mean_acceptance_length": round(self.mean_acceptance_length, 4),
            "acceptance_histogram": list(self.acceptance_histogram),
        } | {f"{name}_s": round(getattr(self, name), 6) for name in times}


def percentile(values: Iterable[float], fraction: float) -> float:
    """The value below which `fraction` of the values lie (nearest rank); 0 for no values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(fraction * len(ordered)))] if ordered else 0.0
