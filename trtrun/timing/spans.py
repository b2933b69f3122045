"""Spans: what a rank did from when to when, round by round, for a trace of rounds.

A log of them is bounded by a number of rounds. It knows names of phases and seconds. It does not know clocks, ranks'
devices or files.
"""

from __future__ import annotations

import json
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

ORCHESTRATOR = "orchestrator"
ENGINES = "engines"


class Span(NamedTuple):
    """A phase of a round, from `start` to `end` in seconds of some clock."""

    name: str
    round_index: int
    start: float
    end: float


class ClockOffset(NamedTuple):
    """How the clock of a rank stands to that of rank 0, in seconds.

    Attributes:
        seconds: rank 0's clock less the rank's.
        error: how far `seconds` may be off at most: half of the round trip that it was measured with.
    """

    seconds: float = 0.0
    error: float = 0.0


@dataclass(frozen=True)
class RankSpans:
    """What one rank did in a run; a process that is orchestrator and engine rank in one has two of these.

    Attributes:
        rank: world rank.
        part: ORCHESTRATOR or ENGINES.
        spans: in order of time, by rank 0's clock.
        num_dropped_rounds: rounds behind those of `spans`, which the log did not take.
        clock: what the rank's own clock was corrected by.
    """

    rank: int
    part: str
    spans: list[Span]
    num_dropped_rounds: int = 0
    clock: ClockOffset = field(default_factory=ClockOffset)


class SpanLog:
    """Spans of the first rounds of a run; later ones are counted, so that a long run takes bounded memory.

    Attributes:
        spans: in order of time.
        num_dropped_rounds: how many rounds went by after the last that was kept.
    """

    def __init__(self, most_rounds: int) -> None:
        """Keep `most_rounds` rounds, from the first that is added. All ranks run the same rounds, so all keep the
        same."""
        self.spans: list[Span] = []
        self.num_dropped_rounds = 0
        self._most_rounds = most_rounds
        self._end: int | None = None

    def add(self, name: str, round_index: int, start: float, end: float) -> None:
        """Keep a span, if its round is among the first. Seconds."""
        if self._end is None:
            self._end = round_index + self._most_rounds
        if round_index < self._end:
            self.spans.append(Span(name, round_index, start, end))
        else:
            self.num_dropped_rounds = max(self.num_dropped_rounds, round_index - self._end + 1)

    def encode(self) -> bytes:
        """The bytes of the log, for rank 0."""
        return json.dumps({"spans": self.spans, "num_dropped_rounds": self.num_dropped_rounds}).encode()


def read_spans(payload: bytes, rank: int, clock: ClockOffset) -> RankSpans:
    """What an engine rank's `SpanLog.encode` gave, by rank 0's clock."""
    log = json.loads(payload)
    shift = clock.seconds
    spans = [Span(name, round_index, start + shift, end + shift) for name, round_index, start, end in log["spans"]]
    return RankSpans(rank, ENGINES, spans, log["num_dropped_rounds"], clock)


@dataclass
class IdleTime:
    """How long a rank had nothing to do, over any number of runs.

    Attributes:
        elapsed: seconds from the first span of a run to the end of its last, summed over runs.
        idle: seconds of these in which the rank waited: in no span, or in one whose name says so.
        num_rounds: rounds of these runs.
    """

    elapsed: float = 0.0
    idle: float = 0.0
    num_rounds: int = 0

    def add_run(self, spans: Sequence[Span], waits: Container[str]) -> None:
        """Add a run.

        Args:
            spans: of one rank, in order of time; none overlaps another.
            waits: names of spans in which this rank waits.
        """
        if not spans:
            return
        elapsed = spans[-1].end - spans[0].start
        busy = sum(span.end - span.start for span in spans if span.name not in waits)
        self.elapsed += elapsed
        self.idle += max(0.0, elapsed - busy)
        self.num_rounds += len({span.round_index for span in spans})

    @property
    def share(self) -> float:
        """Idle share of the time, 0 to 1; 0 before the first run."""
        return self.idle / self.elapsed if self.elapsed else 0.0
