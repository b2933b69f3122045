"""The front without a protocol: prompts with sampling parameters in, numbered pieces of completions out.

The way of a request: its prompts become tokens here, beside the rounds, for a long one takes longer than a round may
wait; what the model cannot follow is refused; the door lets it in; the engine's client has it completed, over as many
engines as it takes; and the pieces come back under the numbers of its choices. Every protocol is thin over `begin`. It
knows no HTTP and no process.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from launch.serve.aside import SHORT_TEXT
from launch.serve.engines import Engine
from launch.serve.gathering import Gathering
from launch.serve.limits import Door, Ticket, out_of_time
from launch.serve.metrics import FrontMetrics
from launch.serve.open_requests import EngineRequest, Inbox
from launch.serve.prompt_tokens import PromptTokens
from launch.serve.refusals import Kind, Refusal
from launch.serve.words import check_words
from trtrun.errors import InvalidRequestError
from trtrun.outputs import CompletionDelta
from trtrun.prompts import Prompt, PromptReader
from trtrun.request_statistics import RequestStatistics
from trtrun.sampling_params import SamplingParams
from trtrun.text import Tokenizer

MOST_PROMPTS = 1024
"""Of one request."""


@dataclass(frozen=True)
class Piece:
    """What one choice of a request gained.

    Attributes:
        choice: its number: the prompt's place times `n`, plus the completion's.
        delta: text, tokens, log probabilities, end.
    """

    choice: int
    delta: CompletionDelta


@dataclass
class Usage:
    """What a request has taken so far.

    Attributes:
        num_prompt_tokens: over all prompts, each once.
        num_completion_tokens: over all choices.
        statistics: of each choice, over all its engines.
    """

    num_prompt_tokens: int
    num_completion_tokens: int = 0
    statistics: dict[int, RequestStatistics] = field(default_factory=dict)

    @property
    def num_cached_prompt_tokens(self) -> int:
        """Prompt tokens whose keys and values were there already."""
        return sum(statistics.num_cached_prompt_tokens for statistics in self.statistics.values())


class Generation:
    """One request in work. Iterating it yields its pieces; `close` has to be called, however that ends.

    Attributes:
        prompts: the tokens of each prompt.
        usage: so far.
    """

    def __init__(
        self,
        client: Engine,
        requests: Sequence[EngineRequest],
        ticket: Ticket,
        metrics: FrontMetrics,
        arrived: float,
        timeout: float,
        more_follow: bool = False,
    ) -> None:
        """Have requests completed.

        Args:
            client: the engine.
            requests: one for each prompt.
            ticket: given back at the end.
            metrics: that observe it.
            arrived: when it came, in seconds of `time.perf_counter`.
            timeout: seconds from then on.
            more_follow: others begin right behind it.
        """
        self.prompts = [request.prompt_token_ids for request in requests]
        self.usage = Usage(sum(map(len, self.prompts)))
        self._n = requests[0].sampling.n
        self._going_on = set(range(self._n * len(requests)))
        self._client = client
        self._ticket = ticket
        self._inbox = Inbox()
        self._is_closed = False
        sampling = requests[0].sampling
        self._observed = metrics.requests.begin(self.usage.num_prompt_tokens, sampling.n, sampling.max_tokens, arrived)
        self._ids = client.start(requests, self._inbox, more_follow)
        self._timer = asyncio.get_running_loop().call_later(
            max(0.0, arrived + timeout - time.perf_counter()), self.give_up, out_of_time(timeout)
        )

    @property
    def queue_seconds(self) -> float:
        """How long its last completion was without a row, so far."""
        return self._observed.queue_seconds

    async def __aiter__(self) -> AsyncIterator[Piece]:
        """The pieces of all choices as they come, until each has ended.

        Raises:
            Refusal: as of `take`.
        """
        while pieces := await self.take():
            for piece in pieces:
                yield piece

    async def take(self) -> list[Piece]:
        """Wait for pieces: what has come since the last call, one a choice; none once each has ended.

        Raises:
            Refusal: the engine has lost or refused the request, or its time is over.
        """
        pieces: list[Piece] = []
        while self._going_on and not pieces:
            for number, delta in await self._inbox.take():
                choice = number * self._n + delta.index
                if choice not in self._going_on:
                    continue  # its reader has finished it
                if delta.error is not None:
                    raise Refusal(Kind.FAILED, delta.error)
                if delta.finish_reason is not None:
                    self._going_on.discard(choice)
                self.usage.num_completion_tokens += len(delta.token_ids)
                self._observed.observe(choice, delta, self.usage.statistics.get(choice), time.perf_counter())
                self.usage.statistics[choice] = delta.statistics
                pieces.append(Piece(choice, delta))
        return pieces

    @property
    def is_over(self) -> bool:
        """Whether no choice goes on."""
        return not self._going_on

    def finish(self, choice: int) -> None:
        """The reader wants no more of a choice. Once that is so of all of a prompt's, their rows are free."""
        self._going_on.discard(choice)
        number = choice // self._n
        if self._going_on.isdisjoint(range(number * self._n, (number + 1) * self._n)):
            self._client.abort([self._ids[number]])

    def give_up(self, reason: Refusal) -> None:
        """End the request, whose reader is told why: however slow the reader is, the rows are free at once."""
        self._inbox.end(reason)
        self._client.abort(self._ids)

    def close(self) -> None:
        """Give up what has not ended, and make room. Calling it again does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        self._timer.cancel()
        self._client.abort(self._ids)
        self._ticket.leave()
        self._observed.end(is_whole=not self._going_on, now=time.perf_counter())


class Front:
    """What all protocols share.

    Attributes:
        model_name: what clients call the model.
        tokenizer: None where prompts are token ids alone.
        draft_len: tokens drafted in a round, at most; 0 where none are.
        door: who is let in.
        client: the engine.
        metrics: what is counted.
    """

    def __init__(
        self,
        model_name: str,
        prompts: PromptReader,
        tokenizer: Tokenizer | None,
        draft_len: int,
        door: Door,
        client: Engine,
        metrics: FrontMetrics,
        timeout: float,
    ) -> None:
        self.model_name = model_name
        self.tokenizer = tokenizer
        self.draft_len = draft_len
        self.door = door
        self.client = client
        self.metrics = metrics
        self._prompts = prompts
        self._timeout = timeout
        self._tokens = PromptTokens(prompts)
        self._gathering = Gathering(door)

    async def begin(
        self, prompts: Sequence[Prompt], sampling: SamplingParams | Sequence[SamplingParams], arrived: float
    ) -> Generation:
        """Let a request in and have it completed.

        Args:
            prompts: each completed `sampling.n` times.
            sampling: of all of them, or of each, with the same `n`. A seed is drawn for each object without one.
            arrived: when its body was there, in seconds of `time.perf_counter`: its time runs from then on.

        Raises:
            Refusal: it is wrong, or there is no room.
        """
        if not 0 < len(prompts) <= MOST_PROMPTS:
            raise Refusal(Kind.INVALID, f"a request has 1 to {MOST_PROMPTS} prompts, not {len(prompts)}", "prompt")
        # Before anything goes through the words: there may be a million of them, and every stream waits.
        of_each = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else sampling
        distinct = _distinct(of_each)
        for parameters in distinct:
            check_words("stop", parameters.stop)
            check_words("bad_words", parameters.bad_words)
        ticket = self.door.enter(sum(parameters.n for parameters in of_each))
        try:
            is_long = sum(map(len, prompts)) + sum(map(_length, distinct)) > SHORT_TEXT
            with _refusing():
                if is_long:
                    requests = await asyncio.to_thread(self._read, prompts, of_each)
                else:
                    requests = await self._read_soon(prompts, of_each)
            more_follow = await self._gathering.wait()
            self._check(requests)
            generation = Generation(self.client, requests, ticket, self.metrics, arrived, self._timeout, more_follow)
        except BaseException:
            ticket.leave()
            raise
        try:
            await asyncio.sleep(0)  # those that came with it reach the engine before anything else is done for this one
        except BaseException:
            generation.close()
            raise
        return generation

    def _read(self, prompts: Sequence[Prompt], sampling: Sequence[SamplingParams]) -> list[EngineRequest]:
        """Prompts as tokens, with parameters that have seeds and that the model can follow. In any thread."""
        return self._join([self._prompts.encode(prompt) for prompt in prompts], sampling)

    async def _read_soon(self, prompts: Sequence[Prompt], sampling: Sequence[SamplingParams]) -> list[EngineRequest]:
        """The same for short ones: with those of other requests that come now."""
        with self._gathering.coming():
            tokens = await self._tokens.encode(prompts)
        return self._join(tokens, sampling)

    def _join(self, tokens: Sequence[tuple[int, ...]], sampling: Sequence[SamplingParams]) -> list[EngineRequest]:
        seeded = {id(parameters): parameters.with_seed() for parameters in _distinct(sampling)}
        for parameters in seeded.values():
            self._prompts.check(parameters)
        return [EngineRequest(ids, seeded[id(given)]) for ids, given in zip(tokens, sampling, strict=True)]

    def _check(self, requests: Sequence[EngineRequest]) -> None:
        """Raise a Refusal unless the engine will take the requests."""
        self.door.check_open()  # the engine may be gone by now, and its limits with it
        limits = self.client.limits
        assert limits is not None
        with _refusing():
            for request in requests:
                limits.check_prompt(len(request.prompt_token_ids))
                limits.check_draft_len(request.sampling.draft_len)


@contextmanager
def _refusing() -> Iterator[None]:
    """What is found to be wrong with a request refuses it."""
    try:
        yield
    except InvalidRequestError as error:
        raise Refusal(Kind.INVALID, str(error)) from None


def _distinct(sampling: Sequence[SamplingParams]) -> list[SamplingParams]:
    """Each object once: the prompts of a request share theirs."""
    return list({id(parameters): parameters for parameters in sampling}.values())


def _length(sampling: SamplingParams) -> int:
    """Letters of the words that have to become tokens, and tokens that have to be the model's."""
    tokens = (sampling.logit_bias, sampling.stop_token_ids, sampling.draft_token_ids)
    return sum(map(len, sampling.bad_words)) + sum(map(len, tokens))
