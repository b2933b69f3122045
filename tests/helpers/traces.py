"""What every trace of rounds must be, for tests of ranks and of the command."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from trtrun.timing.spans import ENGINES, RankSpans, Span


def assert_whole(spans: Sequence[Span], rounds: Sequence[int], slack: float = 0.0) -> None:
    """The spans of one rank are in order, none overlaps another by more than `slack` seconds, and every one of
    `rounds` has some."""
    assert all(span.start <= span.end for span in spans)
    assert all(before.end <= after.start + slack for before, after in pairwise(spans))
    assert sorted({span.round_index for span in spans}) == list(rounds)


def assert_rounds_follow(spans: Sequence[Span]) -> None:
    """An engine rank does one round after the other."""
    numbers = [span.round_index for span in spans]
    assert numbers == sorted(numbers)


def spans_named(trace: Sequence[RankSpans], rank: int, name: str) -> dict[int, Span]:
    """Spans of an engine rank with this name, by round."""
    (spans,) = (part.spans for part in trace if (part.rank, part.part) == (rank, ENGINES))
    return {span.round_index: span for span in spans if span.name == name}
