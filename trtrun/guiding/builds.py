"""Starts of guided rows, built in threads beside the rounds: the grammar compiled, the row's output followed, and the
mask behind it made.

One guide is built by one thread at a time, whatever many rows ask for: what the first has compiled is there for the
next, also where a matcher has to be made anew. While the grammar engine computes, other threads of Python go on. It
knows grammars and starts. It does not know rows or rounds.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock

import torch
from llguidance import LLExecutor, LLMatcher

from parallel.watchdog.activity import Activity
from trtrun.core.guide import Guide, GuideStart
from trtrun.errors import InvalidRequestError
from trtrun.guiding.grammars import Grammars
from trtrun.guiding.row_guide import Begun, Shares, depends_on_others, go_on, take

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
        except InvalidRequestError:  # which the door lets nobody in with; the row ends with an error
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
