"""One engine core that several threads call: one at a time has the turn, and each gets the deltas of its own requests,
of which it puts their output together.

It knows turns, interrupts, deltas and who waits for what. It does not know prompts, rounds or ranks.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from trtrun.api.interrupts import FairLock, held_interrupts
from trtrun.api.llm_engine import LLMEngine
from trtrun.core.nouns import TokenLogprobs
from trtrun.core.outputs import CompletionDelta, CompletionOutput, Logits, RequestId, RequestOutput, join_logits
from trtrun.core.request_statistics import RequestStatistics
from trtrun.core.sampling_params import SamplingParams
from trtrun.errors import InvalidRequestError


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

    def num_waiting_of(self, group: Hashable) -> int:
        """Completions of a group that never had a row."""
        return self._core.num_waiting_of(group)

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
    logits: list[Logits | None] = field(default_factory=list)
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
        self._prompt_logprobs: list[TokenLogprobs | None] | None = None
        self._context_logits: list[Logits | None] = []
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
            if delta.prompt_logprobs is not None:
                self._prompt_logprobs = delta.prompt_logprobs.entries()
            parts.logits.append(delta.generation_logits)
            self._context_logits.append(delta.context_logits)
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
                _whole(parts.logits),
            )
            for index, parts in enumerate(self._completions)
        )
        return RequestOutput(
            self._index,
            self._prompt,
            self._prompt_token_ids,
            completions,
            prompt_logprobs=self._prompt_logprobs,
            context_logits=_whole(self._context_logits),
        )


def _whole(found: list[Logits | None]) -> np.ndarray | None:
    """[positions, vocab] float32 of what came in parts; None where nothing did."""
    logits = join_logits(found)
    return None if logits is None else logits.array()
