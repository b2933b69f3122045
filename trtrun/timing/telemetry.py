"""Running totals of what rounds did and where their time went.

It adds up numbers that others measured. It knows no rank and opens no port.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from trtrun.core.request_statistics import ForesightStatistics, RequestStatistics
from trtrun.warmup_misses import WarmupMisses

ROUND_PARTS = ("drafting", "transferring", "verifying", "planning", "committing", "messages", "between_rounds")
"""What `round_parts` shares the time of rounds out to."""

_TIMES = (
    "drafting",
    "drafting_elsewhere",
    "transferring",
    "verifying",
    "committing",
    "orchestrating",
    "waiting",
    "anticipating",
)

REQUEST_WORK = ("arrivals", "guides", "texts")
"""What requests decide the time of, in the threads of rounds: taking them in; matchers and masks of guided rows, on the
target leader; tokens becoming texts, with stop strings, and the deltas of them."""

REQUEST_BOUND = 0.005
"""Seconds of a round that this may take."""


@dataclass
class RunStatistics:
    """Totals since the start or the last reset. Times are seconds.

    Attributes:
        num_rounds: plans that ran.
        num_tokens: tokens committed.
        num_row_rounds: rounds summed over the rows that verified in them.
        num_draft_tokens: draft tokens verified.
        num_accepted_draft_tokens: of these, kept by the target.
        num_suffix_draft_tokens, num_accepted_suffix_draft_tokens: of both, those that were found in texts in place of a
            model's.
        acceptance_histogram: how many row rounds kept 0, 1, … draft tokens.
        draft_losses: how often the draft engine was lost: 0, or 1 once the target goes on alone. A reset keeps it.
        drafting, transferring, verifying: time in each phase of the rounds, as its leader saw it. Where another process
            drafts, the target leader's `transferring` contains its wait for the draft.
        drafting_elsewhere: of `drafting`, what a process other than the target leader's did.
        committing: the orchestrator's time from a verdict to the tokens and texts of all rows.
        orchestrating: the orchestrator's own time: planning, sending and committing.
        waiting: the orchestrator's time until a verdict came, in which the engines work.

        num_guesses: verdicts that draft ranks of their own drafted for ahead.
        anticipating: their time for that, beside verification.
        foresight: how often drafts were ready.
        request_work, num_over_bound: by REQUEST_WORK, seconds in which rounds waited for it, and how often it took
            longer than REQUEST_BOUND in one round. Parts of the other times, but for arrivals.
        num_guide_waits: how often a row lost its place as its guide had to go on beside the rounds.
        num_captures, num_compilations: CUDA graphs and kernels that were made in rounds, while their rows waited.

    These times overlap; `round_parts` makes disjoint ones of them.
    """

    num_rounds: int = 0
    num_tokens: int = 0
    num_row_rounds: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    num_suffix_draft_tokens: int = 0
    num_accepted_suffix_draft_tokens: int = 0
    acceptance_histogram: list[int] = field(default_factory=list)
    draft_losses: int = 0
    drafting: float = 0.0
    drafting_elsewhere: float = 0.0
    transferring: float = 0.0
    verifying: float = 0.0
    committing: float = 0.0
    orchestrating: float = 0.0
    waiting: float = 0.0
    num_guesses: int = 0
    anticipating: float = 0.0
    foresight: ForesightStatistics = field(default_factory=ForesightStatistics)
    request_work: Counter[str] = field(default_factory=Counter)
    num_over_bound: Counter[str] = field(default_factory=Counter)
    num_guide_waits: int = 0
    num_captures: int = 0
    num_compilations: int = 0

    def add_phases(self, drafting: float, transferring: float, verifying: float, is_verdict: bool) -> None:
        """Add the seconds of one report; the target leader's is the verdict."""
        self.drafting += drafting
        self.drafting_elsewhere += 0.0 if is_verdict else drafting
        self.transferring += transferring
        self.verifying += verifying

    def add_warmup_misses(self, uses: WarmupMisses) -> None:
        """Add what a leader made in rounds."""
        self.num_captures += uses.captures
        self.num_compilations += uses.compilations

    def add_request_work(self, work: str, seconds: float) -> None:
        """Add what one of REQUEST_WORK took of a round."""
        self.request_work[work] += seconds  # type: ignore[assignment]  # as typeshed has counters
        self.num_over_bound[work] += seconds > REQUEST_BOUND

    def add_guesses(self, num_guesses: int, seconds: float) -> None:
        """Add what a draft leader did ahead in a round."""
        self.num_guesses += num_guesses
        self.anticipating += seconds

    def add_request(self, statistics: RequestStatistics) -> None:
        """Add a finished request's counts."""
        self.num_row_rounds += statistics.num_rounds
        self.num_draft_tokens += statistics.num_draft_tokens
        self.num_accepted_draft_tokens += statistics.num_accepted_draft_tokens
        self.num_suffix_draft_tokens += statistics.num_suffix_draft_tokens
        self.num_accepted_suffix_draft_tokens += statistics.num_accepted_suffix_draft_tokens
        histogram = statistics.acceptance_histogram
        self.acceptance_histogram += [0] * (len(histogram) - len(self.acceptance_histogram))
        for accepted, count in enumerate(histogram):
            self.acceptance_histogram[accepted] += count
        self.foresight.add(statistics.foresight)

    @property
    def mean_acceptance_length(self) -> float:
        """Accepted + 1, averaged over row rounds; 0 before the first."""
        return 1 + self.num_accepted_draft_tokens / self.num_row_rounds if self.num_row_rounds else 0.0

    def as_dict(self) -> dict[str, object]:
        """Ready for JSON."""
        return {
            "num_rounds": self.num_rounds,
            "num_tokens": self.num_tokens,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_draft_tokens": self.num_accepted_draft_tokens,
            "num_suffix_draft_tokens": self.num_suffix_draft_tokens,
            "num_accepted_suffix_draft_tokens": self.num_accepted_suffix_draft_tokens,
            "mean_acceptance_length": round(self.mean_acceptance_length, 4),
            "acceptance_histogram": list(self.acceptance_histogram),
            "num_guesses": self.num_guesses,
            "foresight": msgspec.structs.asdict(self.foresight),
            "draft_losses": self.draft_losses,
            "num_guide_waits": self.num_guide_waits,
            "num_captures": self.num_captures,
            "num_compilations": self.num_compilations,
            **{f"{name}_s": round(getattr(self, name), 6) for name in _TIMES},
            **{f"{work}_work_s": round(self.request_work[work], 6) for work in REQUEST_WORK},
            **{f"num_{work}_over_bound": self.num_over_bound[work] for work in REQUEST_WORK},
        }


def round_parts(totals: Mapping[str, float], elapsed: float) -> dict[str, float]:
    """Where `elapsed` seconds of rounds went, in parts that do not overlap and add up to it.

    - drafting: the draft leader drafts and the target waits for it, or is in the same process.
    - transferring: the target leader waits for the draft beyond that.
    - verifying: the target's forward and the acceptance.
    - planning: the orchestrator plans and sends, and the engines stand still.
    - committing: the orchestrator takes a verdict in, and the engines stand still.
    - messages: the orchestrator waits and no engine works: plans and reports are on their way or are read.
    - between_rounds: the caller of the orchestrator has the word: prompts, outputs, the user's program.

    With a plan sent ahead the orchestrator works while the engines do; such time counts as the engines' alone.

    Args:
        totals: of `RunStatistics.as_dict`, over the same rounds.
        elapsed: seconds by the clock from before the first round to after the last.
    """
    # Another process's drafting lies within the target leader's wait for it, as far as it was waited for.
    awaited = min(totals["drafting_elsewhere_s"], totals["transferring_s"])
    engines = {
        "drafting": totals["drafting_s"] - totals["drafting_elsewhere_s"] + awaited,
        "transferring": totals["transferring_s"] - awaited,
        "verifying": totals["verifying_s"],
    }
    parts = engines | {
        "planning": totals["orchestrating_s"] - totals["committing_s"],
        "committing": totals["committing_s"],
        "messages": totals["waiting_s"] - sum(engines.values()),
        "between_rounds": elapsed - totals["orchestrating_s"] - totals["waiting_s"],
    }
    counted_twice = -sum(seconds for seconds in parts.values() if seconds < 0)
    for name in ("messages", "committing", "planning", "between_rounds", *engines):
        seconds = max(0.0, parts[name])
        parts[name] = max(0.0, seconds - counted_twice)
        counted_twice -= seconds - parts[name]
    return {name: parts[name] for name in ROUND_PARTS}
