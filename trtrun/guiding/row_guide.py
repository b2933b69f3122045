"""The matcher of one row that is guided, which follows what the row gains, and where it begins.

A matcher that passes a bound goes no further. Where the bound is of its row's text alone, the row ends. Where it is of
what the matchers of one grammar share, or of a round's time, the row waits: it loses its place, and what it goes on
with is built beside the rounds. It knows matchers and tokens. It does not know masks of a round, plans or other rows.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple

import torch
from llguidance import LLMatcher

from trtrun.core.nouns import WAITS, WAITS_ALONE

FEW_TOKENS = 64
"""Between two matchers of a row that share nothing with others: each takes as long as the first."""
SLOW_SECONDS, _MOST_SLOW = 0.05, 4
"""What a mask may take, but for a few: the first ones of a grammar find things out that are kept."""
_LONG_SECONDS, _FEW_LONG = 0.005, 2
"""Masks of a guide that take so long are made last, without those of drafts, once there were so many of them."""
_MOST_UNMASKED = 16
"""Tokens of a text that are followed from one mask to the next."""
_SHARED = ("lexer error", "panic")
"""What errors begin with that are of the lexer, which matchers of one grammar share, or may have left it unfit. Others
any matcher of the grammar would have behind the same text: the parser's state is the matcher's own, and tokens that do
not follow do so for none."""


def take(matcher: LLMatcher, tokens: Sequence[int]) -> bool:
    """Have a matcher follow tokens; whether it could. Other threads of Python wait meanwhile."""
    return all(map(matcher.consume_token, tokens))


def go_on(matcher: LLMatcher, output: Sequence[int], take: Callable[[LLMatcher, Sequence[int]], bool] = take) -> bool:
    """Have a matcher follow what a row has already; whether it could. It is of no more use where it could not.

    What the lexer may take is measured out anew with each mask, and one that has taken all of it never goes on, nor
    do the matchers that share it. So masks are made on the way, as they were when the text came to be.
    """
    for start in range(0, len(output), _MOST_UNMASKED):
        matcher.deep_copy().compute_bitmask()
        if not take(matcher, output[start : start + _MOST_UNMASKED]):
            return False
    return True


def depends_on_others(matcher: LLMatcher) -> bool:
    """Whether a matcher in error passed a bound that one of its own might not."""
    return matcher.get_error().startswith(_SHARED)


class Shares(enum.Enum):
    """Who shares the lexer of a matcher, and its bound with it."""

    ALL = enum.auto()
    FEW = enum.auto()
    NOBODY = enum.auto()


class Begun(NamedTuple):
    """Where a row begins.

    Attributes:
        matcher: behind its output so far, to be copied; None where nothing may follow.
        first: [words] int32, the mask there; None without a matcher.
        shares: with whom its lexer is shared: all rows of the guide, those that were in need of a new one, or nobody.
    """

    matcher: LLMatcher | None = None
    first: torch.Tensor | None = None
    shares: Shares = Shares.ALL


class GuidePace:
    """How long masks of one guide take, which its rows share.

    Attributes:
        is_slow: whether they may hold other rows up.
    """

    def __init__(self) -> None:
        self._num_long = 0

    @property
    def is_slow(self) -> bool:
        """Whether masks are long again and again."""
        return self._num_long >= _FEW_LONG

    def note(self, seconds: float) -> None:
        """One took so long."""
        self._num_long += seconds > _LONG_SECONDS


class RowGuide:
    """The matcher of one row. Whatever goes wrong in it is its row's own: then no token may follow.

    Attributes:
        pace: of its guide.
        num_tokens: output tokens that it follows.
        waits: WAITS or WAITS_ALONE where what the row goes on with is to be built beside the rounds: then nothing is
            followed any more. 0 elsewhere.
        is_ended: whether the row has held the others up: its text ends where it is decided. A clock says so, which
            other ranks do not share: what is drafted, on each of some ranks alike, follows the matcher all the same.
    """

    def __init__(
        self, begun: Begun | Future[Begun] | None = None, num_tokens: int = 0, pace: GuidePace | None = None
    ) -> None:
        """Begin where `begun` says, behind `num_tokens` of output; one that is still built is waited for when it is
        asked. None allows nothing."""
        self.pace = GuidePace() if pace is None else pace
        self.num_tokens = num_tokens
        self.waits = 0
        self.is_ended = False
        self._began_at, self._shares = num_tokens, Shares.ALL
        self._begun = begun
        self._matcher: LLMatcher | None = None
        self._first: torch.Tensor | None = None
        self._num_slow = 0

    @property
    def matcher(self) -> LLMatcher | None:
        """The row's own, to be forked; None where nothing may follow."""
        if self._begun is not None:
            begun = self._begun.result() if isinstance(self._begun, Future) else self._begun
            self._begun = None
            if begun.matcher is not None:
                self._matcher, self._first = begun.matcher.deep_copy(), begun.first
            self._shares = begun.shares
        return self._matcher

    @property
    def first(self) -> torch.Tensor | None:
        """The mask behind the row's output, [words] int32, where it was made before: until the row gains tokens."""
        return self._first if self.matcher is not None else None

    def follow(self, tokens: Sequence[int]) -> None:
        """The row gains tokens."""
        matcher = self.matcher
        self._first = None
        self.num_tokens += len(tokens)
        if matcher is not None and not take(matcher, tokens):
            self.give_up(matcher)

    def give_up(self, failed: LLMatcher) -> None:
        """The row's matcher, or a copy, passed a bound behind the row's output."""
        if not depends_on_others(failed):
            self._matcher = self._first = None
        elif self.num_tokens - self._began_at >= FEW_TOKENS or self._shares is Shares.ALL:
            self.wait(WAITS_ALONE if self._shares is Shares.NOBODY else WAITS)
        elif self._shares is Shares.FEW:
            self.wait(WAITS_ALONE)
        else:  # what one that shares nothing says depends on the row's text alone
            self._matcher = self._first = None

    def wait(self, how: int = WAITS) -> None:
        """The row is to wait."""
        self.waits, self._begun, self._matcher, self._first = how, None, None, None

    def count_slow(self, seconds: float) -> None:
        """A mask took so long, and all rows wait for it: where that is not the exception the row ends."""
        self.pace.note(seconds)
        self._num_slow += seconds > SLOW_SECONDS
        self.is_ended |= self._num_slow > _MOST_SLOW
