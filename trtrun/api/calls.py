"""The prompts of one call, from where they begin to where their outputs are whole; and the engine core that calls of
several threads share.

One thread at a time runs the engine core, and each gets the deltas of its own requests, which are put together to
outputs. Chats become tokens here.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from trtrun.api.interrupts import FairLock, held_interrupts
from trtrun.api.llm_engine import LLMEngine
from trtrun.api.prompts import Prompt
from trtrun.chats.chat import Chat, ChatEncoder
from trtrun.core.nouns import TokenLogprobs
from trtrun.core.outputs import CompletionDelta, CompletionOutput, Logits, RequestId, RequestOutput, join_logits
from trtrun.core.request_statistics import RequestStatistics
from trtrun.core.sampling_params import SamplingParams
from trtrun.errors import InvalidRequestError, QueueFullError


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
        """Run a round for all requests, whoever asked for them."""
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
    """A prompt of a call, from the time that it is queued until its output is whole."""

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


class Call:
    """A call of an `LLM`. Its prompts are one group: prompts of another thread's call take turns with them.

    Attributes:
        pending: prompts that wait or run.
    """

    def __init__(self, shared: SharedEngine, chats: ChatEncoder) -> None:
        """Begin without any prompt.

        Args:
            shared: the engine core, and the inboxes of its requests.
            chats: makes tokens of chats.
        """
        self.pending: dict[RequestId, PendingRequest] = {}
        self._shared = shared
        self._chats = chats

    def complete(
        self,
        prompts: Iterable[tuple[Prompt | Chat, SamplingParams]],
        most_waiting: int,
        seconds_left: Callable[[], float | None] | None,
    ) -> Iterator[RequestOutput]:
        """Complete prompts as `LLM.generate_as_completed` says; at most `most_waiting` of them wait."""
        source = enumerate(prompts)
        held: tuple[int, tuple[Prompt | Chat, SamplingParams]] | None = None
        left: float | None = None
        try:
            while True:
                left = seconds_left() if seconds_left is not None else None
                while left is None and self.has_room(most_waiting):
                    item, held = held or next(source, None), None
                    if item is None:
                        break
                    try:
                        refused = self.begin(item[0], *item[1])
                    except QueueFullError:
                        held = item  # others fill the queue: it is taken up again after a round
                        break
                    if refused is not None:
                        yield refused
                if left is not None:
                    self.wind_down(left)
                if not self.pending and (held is None or left is not None):
                    break
                self._shared.step()
                yield from self.finished()
            self._shared.settle()
        finally:
            self.give_up()

    def has_room(self, most_waiting: int) -> bool:
        """Whether another prompt may wait, of so many; what others have waiting takes none of its turns."""
        return not self.pending or self._shared.num_waiting_of(self) < most_waiting

    def begin(self, index: int, prompt: Prompt | Chat, sampling: SamplingParams) -> RequestOutput | None:
        """Queue a prompt and enter it in `pending`; returns the output of one that is refused.

        Args:
            index: place of the prompt in the call.
            prompt: a text, token ids or a chat.
            sampling: its parameters.

        Raises:
            QueueFullError: there is no room now, but there will be.
            CheckpointError: the model's chat template is none.
        """
        text = prompt if isinstance(prompt, str) else None
        if isinstance(prompt, Chat):  # outside of the turn: rounds do not wait for a template
            try:
                text, prompt = self._chats.read(prompt)
            except InvalidRequestError as error:
                return RequestOutput(index, None, (), (), str(error))
        with self._shared.turn() as engine:  # one turn for all of it: an interrupt would lose the request
            try:
                request_id = engine.add_request(prompt, sampling, group=self)
            except QueueFullError:
                raise
            except InvalidRequestError as error:
                return RequestOutput(index, text, (), (), str(error))
            self._shared.open_inbox(request_id)
            self.pending[request_id] = PendingRequest(index, text, engine.prompt_token_ids(request_id), sampling)
        return None

    def finished(self) -> Iterator[RequestOutput]:
        """The outputs that are whole after a round."""
        inboxes = self._shared.inboxes
        for request_id in [key for key in self.pending if inboxes[key]]:
            output = self.pending[request_id].take(inboxes[request_id])
            if output is not None:
                self.forget(request_id)
                yield output

    def wind_down(self, seconds_left: float) -> None:
        """Give up the prompts that have not begun, and the others too once no time is left.

        A prompt of several completions has begun when one of them has: the others may still be admitted.
        """
        with self._shared.turn() as engine:
            for request_id in list(self.pending):
                if seconds_left <= 0 or not engine.has_begun(request_id):
                    engine.abort_request(request_id)
                    self.forget(request_id)

    def forget(self, request_id: RequestId) -> None:
        """Throw away what is kept of a request that has ended."""
        self._shared.forget(request_id)
        self.pending.pop(request_id, None)

    def give_up(self) -> None:
        """Have all that still goes on aborted. It may be called anywhere, and takes no turn."""
        self._shared.give_up(self.pending)
