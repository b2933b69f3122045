"""One engine core that several threads call: one at a time has the turn, and each gets the deltas of its own requests,
of which it puts their output together. Ctrl-C is held back while something must not be left half done.

It knows signals, turns, deltas and who waits for what. It does not know prompts, rounds or ranks.
"""

from __future__ import annotations

import signal
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

from trtrun.api.llm_engine import LLMEngine
from trtrun.core.nouns import TokenLogprobs
from trtrun.core.outputs import CompletionDelta, CompletionOutput, RequestId, RequestOutput
from trtrun.core.request_statistics import RequestStatistics
from trtrun.core.sampling_params import SamplingParams
from trtrun.errors import InvalidRequestError


class _Handler:
    """SIGINT's handler while interrupts may be held back.

    Attributes:
        depth: blocks of `held_interrupts` that have begun and not ended.
        held: the signal that came meanwhile, as its handler gets it.
    """

    def __init__(self, before: Callable[[int, FrameType | None], object]) -> None:
        self.before = before
        self.depth = 0
        self.held: tuple[int, FrameType | None] | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.depth and self.held is None:
            self.held = (number, frame)
            return
        self.held = None
        self.before(number, frame)


_handler: _Handler | None = None
"""Set while ours is SIGINT's handler. Only the main thread looks at it: no other hears signals."""


@contextmanager
def listening() -> Iterator[None]:
    """Make `held_interrupts` cheap inside: changing a signal's handler takes microseconds, too long for every round."""
    global _handler
    before = signal.getsignal(signal.SIGINT) if _is_main_thread() and _handler is None else None
    if not callable(before):  # not the main thread; listening already; or SIGINT is ignored, or not Python's
        yield
        return
    handler = _handler = _Handler(before)
    signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        _handler = None
        if signal.getsignal(signal.SIGINT) is handler:  # else the block has set another one, which stays
            signal.signal(signal.SIGINT, before)


@contextmanager
def held_interrupts() -> Iterator[None]:
    """Hold SIGINT back until the end of the block, where its handler runs as usual. A second one gets through at once.

    Only the main thread hears signals: in others this does nothing. So does it where SIGINT is ignored, or where
    something other than Python handles it.
    """
    if not _is_main_thread():
        yield
    elif _handler is None:
        with listening(), _hold():
            yield
    else:
        with _hold():
            yield


@contextmanager
def _hold() -> Iterator[None]:
    handler = _handler
    if handler is None:
        yield
        return
    handler.depth += 1
    try:
        yield
    finally:
        handler.depth -= 1
        if handler.held is not None and not handler.depth:
            held, handler.held = handler.held, None
            handler.before(*held)


def _is_main_thread() -> bool:
    return threading.get_ident() == threading.main_thread().ident


class FairLock:
    """A lock that threads get in the order in which they asked: nobody takes it again and again while others wait."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._is_taken = False
        self._waiting: deque[threading.Lock] = deque()

    def try_acquire(self) -> bool:
        """Take the lock if it is free and nobody waits for it; whether it was taken."""
        with self._guard:
            if self._is_taken or self._waiting:
                return False
            self._is_taken = True
            return True

    def __enter__(self) -> FairLock:
        if self.try_acquire():
            return self
        ticket = threading.Lock()
        ticket.acquire()
        with self._guard:
            if not self._is_taken:
                self._is_taken = True
                return self
            self._waiting.append(ticket)
        try:
            ticket.acquire()  # until `release` hands the lock over
        except BaseException:
            with self._guard:
                was_handed_over = ticket not in self._waiting
                if not was_handed_over:
                    self._waiting.remove(ticket)
            if was_handed_over:
                self.release()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Hand the lock to whoever has waited longest, or leave it free."""
        with self._guard:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._is_taken = False


class SharedEngine:
    """An engine core, and an inbox for each request that somebody waits for.

    Attributes:
        inboxes: the deltas that came for each of these requests and were not read yet.
    """

    def __init__(self, core: LLMEngine) -> None:
        self._core = core
        self._closed = False
        self._turn = FairLock()
        self.inboxes: dict[RequestId, deque[CompletionDelta]] = {}
        # Requests that nobody reads any more. Whoever has the turn next aborts them: an iterator may be thrown away
        # anywhere, also by a garbage collection inside the engine core.
        self._given_up: deque[RequestId] = deque()
        # A program that forgets to close, or dies of an exception, must not leave the other ranks waiting: MPI's own
        # end waits for all of them. This runs before it, and when the object is thrown away.
        self._finalizer = weakref.finalize(self, core.close)

    def close(self) -> None:
        """Let all ranks end; nothing can be asked for afterwards. Calling it again does nothing."""
        with held_interrupts(), self._turn:
            self._closed = True
            self._finalizer()

    def check_open(self) -> None:
        """Raise InvalidRequestError after `close`: the ranks have ended, and nobody would ever answer."""
        if self._closed:
            raise InvalidRequestError("this LLM is closed: make another one")

    @contextmanager
    def turn(self) -> Iterator[LLMEngine]:
        """The engine core to one thread, uninterrupted, once what was given up is aborted.

        Raises:
            InvalidRequestError: it is closed.
        """
        with held_interrupts(), self._turn:
            self.check_open()
            while self._given_up:
                request_id = self._given_up.popleft()
                self._core.abort_request(request_id)
                self.forget(request_id)
            self._core.drain()
            yield self._core

    def open_inbox(self, request_id: RequestId) -> None:
        """Keep the deltas of a request from now on; call it in the turn in which the request is added."""
        self.inboxes[request_id] = deque()

    def step(self) -> None:
        """One round for all requests, whoever asked for them."""
        with self.turn() as core:
            for delta in core.step():
                if delta.request_id in self.inboxes:
                    self.inboxes[delta.request_id].append(delta)

    def settle(self) -> None:
        """Take in what rounds still give for requests that have ended, so that nothing is left for later calls."""
        with self.turn():
            pass

    def give_up(self, request_ids: Iterable[RequestId]) -> None:
        """Have requests aborted by whoever has the turn next. It may be called anywhere, and takes no turn."""
        self._given_up.extend(request_ids)

    def forget(self, request_id: RequestId) -> None:
        """Throw an inbox away: its request has ended."""
        self.inboxes.pop(request_id, None)


@dataclass(slots=True)
class _Parts:
    """What came of one completion so far."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    token_origins: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    statistics: RequestStatistics = field(default_factory=RequestStatistics)
    finish_reason: str | None = None


class PendingRequest:
    """One prompt of a call, from the time that it is queued until its output is whole."""

    def __init__(
        self, index: int, prompt: str | None, prompt_token_ids: tuple[int, ...], sampling: SamplingParams
    ) -> None:
        """Begin without any output.

        Args:
            index: place of the prompt in the call.
            prompt: its text, None where it came as token ids.
            prompt_token_ids: its tokens.
            sampling: says how many completions it has, and whether they have log probabilities.
        """
        self._index = index
        self._prompt = prompt
        self._prompt_token_ids = prompt_token_ids
        self._has_logprobs = sampling.logprobs is not None
        self._completions = [_Parts() for _ in range(sampling.n)]
        self._num_finished = 0
        self._error: str | None = None

    def take(self, inbox: deque[CompletionDelta]) -> RequestOutput | None:
        """Add all deltas of `inbox`, which is empty then; returns the output once it is whole."""
        while inbox:
            delta = inbox.popleft()
            parts = self._completions[delta.index]
            parts.text.append(delta.text)
            parts.token_ids += delta.token_ids
            parts.token_origins.append(delta.token_origins)
            if delta.logprobs is not None:
                parts.logprobs += delta.logprobs
            parts.statistics = delta.statistics
            if delta.error is not None and self._error is None:
                self._error = delta.error
            if delta.finish_reason is not None:
                parts.finish_reason = delta.finish_reason
                self._num_finished += 1
        return self._output() if self._num_finished == len(self._completions) else None

    def _output(self) -> RequestOutput:
        if self._error is not None:
            return RequestOutput(self._index, self._prompt, self._prompt_token_ids, (), self._error)
        completions = tuple(
            CompletionOutput(
                index,
                "".join(parts.text),
                tuple(parts.token_ids),
                str(parts.finish_reason),
                parts.statistics,
                parts.logprobs if self._has_logprobs else None,
                "".join(parts.token_origins),
            )
            for index, parts in enumerate(self._completions)
        )
        return RequestOutput(self._index, self._prompt, self._prompt_token_ids, completions)
