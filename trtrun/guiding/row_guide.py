"""The matcher of one row that is guided, which follows what the row gains; begun anew or ended where a bound is passed.

It knows matchers and tokens. It does not know masks, plans or other rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future

from llguidance import LLMatcher

_FEW_TOKENS = 64
"""Between two matchers that are made anew for a row: it takes as long as a round."""
SLOW_SECONDS, _MOST_SLOW = 0.05, 4
"""What a mask may take, but for a few: the first ones of a grammar find things out that are kept."""
_MOST_UNMASKED = 16
"""Tokens of a text that are followed from one mask to the next."""


def go_on(matcher: LLMatcher, output: Sequence[int]) -> bool:
    """Have a matcher follow what a row has already; whether it could. It is of no more use where it could not.

    What the lexer may take is measured out anew with each mask, and one that has taken all of it never goes on, nor
    do the matchers that share it. So masks are made on the way, as they were when the text came to be.
    """
    for start in range(0, len(output), _MOST_UNMASKED):
        matcher.deep_copy().compute_bitmask()
        if not all(map(matcher.consume_token, output[start : start + _MOST_UNMASKED])):
            return False
    return True


class RowGuide:
    """The matcher of one row. Whatever goes wrong in it is its row's own: then no token may follow.

    Attributes:
        is_ended: whether the row has held the others up: its text ends where it is decided. A clock says so, which
            other ranks do not share: what is drafted, on each of some ranks alike, follows the matcher all the same.
    """

    def __init__(
        self,
        begun: LLMatcher | Future[LLMatcher | None] | None,
        output: Sequence[int] = (),
        begin_anew: Callable[[], LLMatcher | None] = lambda: None,
    ) -> None:
        """Begin with a matcher.

        Args:
            begun: behind `output`; None where there is none, as of a grammar that cannot be compiled. One that is still
                compiled is waited for when it is asked.
            output: the row's tokens that it follows.
            begin_anew: makes one of the same grammar that shares nothing with others.
        """
        self._begun = begun
        self._output = [*output]
        self._begin_anew = begin_anew
        self._renewed_at = -_FEW_TOKENS
        self._num_slow = 0
        self.is_ended = False

    @property
    def matcher(self) -> LLMatcher | None:
        """The row's own, to be forked; None where nothing may follow."""
        if isinstance(self._begun, Future):
            self._begun = self._begun.result()
        return self._begun

    def follow(self, tokens: Sequence[int]) -> None:
        """The row gains tokens."""
        matcher = self.matcher
        self._output += tokens
        if matcher is not None and not all(map(matcher.consume_token, tokens)):
            self.renew()

    def renew(self) -> LLMatcher | None:
        """The row's matcher made anew; None where nothing may follow.

        Matchers of one grammar share what their lexer has found out, and its bound with it: so which of them passes it
        depends on the others. What one that shares nothing says depends on the row's text alone.
        """
        matcher = None
        if len(self._output) - self._renewed_at >= _FEW_TOKENS:
            self._renewed_at = len(self._output)
            matcher = self._begin_anew()
        if matcher is not None and not go_on(matcher, self._output):
            matcher = None
        self._begun = matcher
        return matcher

    def count_slow(self, seconds: float) -> None:
        """A mask took so long, and all rows wait for it: where that is not the exception the row ends."""
        self._num_slow += seconds > SLOW_SECONDS
        self.is_ended |= self._num_slow > _MOST_SLOW
