"""The matcher of one guided row, which follows the row's tokens; and how it begins: built in threads beside the rounds.

To begin, the grammar is compiled, the row's output is followed, and the mask behind it is made. One guide is built by
one thread at a time, however many rows ask for it: what the first has compiled is there for the next, also where a
matcher has to be made anew. While the grammar engine computes, other threads of Python go on.

A matcher that passes a bound goes no further. If the bound is on its row's text alone, the row ends. If it is on what
the matchers of one grammar share, or on a round's time, the row waits: it loses its place, and its continuation is
built beside the rounds.
"""

from __future__ import annotations

import enum
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import NamedTuple

import torch
from llguidance import LLExecutor, LLMatcher

from parallel.watchdog.activity import Activity
from trtrun.core.guide import Guide, GuideStart
from trtrun.core.nouns import WAITS, WAITS_ALONE
from trtrun.errors import InvalidRequestError
from trtrun.guiding.grammars import Grammars

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
    """Rows that share the lexer of a matcher, and its bound with it."""

    ALL = enum.auto()
    FEW = enum.auto()
    NOBODY = enum.auto()


class Begun(NamedTuple):
    """The beginning of a row.

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
        """Note how long a mask took."""
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


logger = logging.getLogger(__name__)

_FEWEST_BUILDERS, _MOST_BUILDERS = 2, 4
"""Threads that build guides: as many as make masks, but a large guide never keeps all others waiting."""


_SHORT_SECONDS = 0.003
"""What some tokens may take in which other threads of Python wait."""


class GuideBuilds:
    """What one rank builds for its rows.

    Attributes:
        grammars: of the vocabulary; None until it has been read.
    """

    def __init__(
        self,
        make_grammars: Callable[[], Grammars],
        num_threads: int,
        activity: Activity | None = None,
        seconds: float = float("inf"),
    ) -> None:
        """Build nothing yet.

        Args:
            make_grammars: called when a guide is first built; may raise InvalidRequestError.
            num_threads: that build, within reason.
            activity: where the process says what its threads are doing; None where nobody looks.
            seconds: that a start may take to build.
        """
        self.grammars: Grammars | None = None
        self._activity, self._seconds = activity or Activity(), seconds
        self._make_grammars = make_grammars
        self._num_threads = max(_FEWEST_BUILDERS, min(_MOST_BUILDERS, num_threads))
        self._pool: ThreadPoolExecutor | None = None
        self._lock = Lock()
        self._waiting: dict[Guide, deque[tuple[GuideStart, Future[Begun]]]] = {}

    def submit(self, start: GuideStart) -> Future[Begun]:
        """Have a start built. Does not wait, and is done at once where the grammar is kept and nothing has to be
        followed."""
        done = Future[Begun]()
        if self.grammars is not None and not start.output and self.grammars.has(start.guide):
            kept = self.grammars.kept(start.guide)
            if kept is not None:
                matcher, first = kept
                done.set_result(Begun(matcher, torch.from_numpy(first)))
                return done
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._num_threads, thread_name_prefix="guides")
        with self._lock:
            is_first = start.guide not in self._waiting
            self._waiting.setdefault(start.guide, deque()).append((start, done))
        if is_first:
            self._pool.submit(self._build_next, start.guide)
        return done

    def close(self) -> None:
        """Begin no build that has not begun: the process's end would wait for all of them."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _build_next(self, guide: Guide) -> None:
        start, done = self._waiting[guide][0]
        if done.set_running_or_notify_cancel():
            with self._activity.beside("guides", "compiling a guide", self._seconds):
                done.set_result(self._build(start))
        with self._lock:
            self._waiting[guide].popleft()
            if not self._waiting[guide]:
                del self._waiting[guide]
                return
        assert self._pool is not None
        try:
            self._pool.submit(self._build_next, guide)  # behind others' guides
        except RuntimeError:  # it is closed
            return

    def _build(self, start: GuideStart) -> Begun:
        try:
            if self.grammars is None:
                self.grammars = self._make_grammars()
            words, follow = -(-self.grammars.vocab_size // 32), _Follower(self.grammars)
            if start.is_alone:
                own = self.grammars.own_matcher(start.guide)
                return _behind(own, start.output, words, Shares.NOBODY, follow) or Begun()
            shares = Shares.FEW if start.output else Shares.ALL
            found = _behind(self.grammars.matcher(start.guide), start.output, words, shares, follow)
            if found is None:
                # Matchers of one grammar share what their lexer has found out, and its bound with it: so which of them
                # passes it depends on the others.
                matcher = self.grammars.matcher(start.guide, anew=True)
                found = _behind(matcher, start.output, words, Shares.FEW, follow)
        except InvalidRequestError:  # which checks have let nobody in with; the row ends with an error
            return Begun()
        except BaseException:  # among them the grammar engine's own panics; no other row is to lose by it
            logger.exception("a guide could not be built")
            return Begun()
        return found or Begun()


class _Follower:
    """Has matchers follow tokens, so that other threads of Python go on where that takes long.

    To take a token the grammar engine keeps others from running, unless it does so for several matchers: so beside the
    one there is another, which takes none. That costs more than most tokens do."""

    def __init__(self, grammars: Grammars) -> None:
        self._executor, self._idle, self._lets_go = LLExecutor(1), grammars.idle_matcher(), True

    def __call__(self, matcher: LLMatcher, tokens: Sequence[int]) -> bool:
        started = time.perf_counter()
        if self._lets_go:
            could = all(self._executor.consume_token_par([(matcher, one), (self._idle, one)])[0] for one in tokens)
        else:
            could = take(matcher, tokens)
        self._lets_go = time.perf_counter() - started > _SHORT_SECONDS
        return could


def _behind(
    matcher: LLMatcher,
    output: Sequence[int],
    words: int,
    shares: Shares,
    follow: Callable[[LLMatcher, Sequence[int]], bool],
) -> Begun | None:
    """A matcher behind a row's output, and the mask there; None where a bound was passed that others may have used
    up."""
    if go_on(matcher, output, follow):
        first, fork = torch.zeros(words, dtype=torch.int32), matcher.deep_copy()
        fork.unsafe_compute_mask_ptr(first.data_ptr(), 4 * len(first))
        if not fork.is_error():
            return Begun(matcher, first, shares)
        matcher = fork
    return None if depends_on_others(matcher) else Begun()
