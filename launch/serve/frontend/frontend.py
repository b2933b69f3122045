"""The frontend without a protocol: prompts with sampling parameters in, numbered pieces of completions out.

The way of a request: its prompts become tokens here, beside the rounds, or are tokens already where it was long; what
the model cannot follow is refused; admission lets it in; the engine's client has it completed, over as many engines as
it takes; and the pieces come back under the numbers of its choices. Every protocol is thin over `begin`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import msgspec

from launch.serve.admission.control import OWNER, AdmissionControl, Ticket
from launch.serve.admission.limits import SHORT_BODY, LogitsLimit, LogitsPlace, check_counts, distinct
from launch.serve.admission.refusals import Kind, Refusal, engine_starting, out_of_time, wrap_errors
from launch.serve.engine.client import EngineClient
from launch.serve.engine.open_requests import EngineRequest, Inbox
from launch.serve.frontend.coalescing import PromptTokens, RequestCoalescer
from launch.serve.metrics import FrontendMetrics
from launch.serve.parsing.messages import Stops
from launch.serve.parsing.parsers import Parsed, ParsedRequest, Parsers, UnencodedRequest
from trtrun.api.adapters import check_adapter
from trtrun.api.prompts import PromptReader
from trtrun.core.outputs import OWN_FAULTS, CompletionDelta
from trtrun.core.request_statistics import RequestStatistics
from trtrun.core.sampling_params import SamplingParams
from trtrun.scheduling.limits import SchedulerLimits
from trtrun.tokens.text import Tokenizer


@dataclass
class Usage:
    """What a request has taken so far.

    Attributes:
        num_prompt_tokens: over all prompts, each once.
        n: completions of each prompt.
        num_completion_tokens: over all choices.
        statistics: of each choice, over all its engines.
    """

    num_prompt_tokens: int
    n: int = 1
    num_completion_tokens: int = 0
    statistics: dict[int, RequestStatistics] = field(default_factory=dict)

    @property
    def num_cached_prompt_tokens(self) -> int:
        """Prompt tokens whose keys and values were there already, each prompt once: those that each of its completions
        so far found there. What only one found, another has computed."""
        of_prompts: dict[int, int] = {}
        for choice, statistics in self.statistics.items():
            number = statistics.num_cached_prompt_tokens
            of_prompts[choice // self.n] = min(number, of_prompts.get(choice // self.n, number))
        return sum(of_prompts.values())


class Generation:
    """A request in work. Iterating it yields its pieces; `close` has to be called, however that ends.

    Attributes:
        prompts: the tokens of each prompt.
        usage: so far.
        logits: what is kept of logits; who has asked for some leaves it once the client has read them.
    """

    def __init__(
        self,
        client: EngineClient,
        requests: Sequence[EngineRequest],
        ticket: Ticket,
        logits: LogitsPlace,
        metrics: FrontendMetrics,
        arrived: float,
        timeout: float,
    ) -> None:
        """Have requests completed.

        Args:
            client: the engine.
            requests: one for each prompt.
            ticket: given back at the end.
            logits: counted of these requests.
            metrics: that observe it.
            arrived: when it came, in seconds of `time.perf_counter`.
            timeout: seconds from then on.
        """
        self.prompts = [request.prompt_token_ids for request in requests]
        self._n = requests[0].sampling.n
        self.usage = Usage(sum(map(len, self.prompts)), self._n)
        self._going_on = set(range(self._n * len(requests)))
        self._client = client
        self._ticket = ticket
        self.logits = logits
        self._inbox = Inbox(ticket.end_completion)
        self._is_closed = False
        sampling = requests[0].sampling
        self._observed = metrics.begin(self.usage.num_prompt_tokens, sampling.n, sampling.max_tokens, arrived)
        self._ids = client.start(requests, self._inbox)
        self._timer = asyncio.get_running_loop().call_later(
            max(0.0, arrived + timeout - time.perf_counter()), self.give_up, out_of_time(timeout)
        )

    @property
    def queue_seconds(self) -> float:
        """How long its last completion was without a row, so far."""
        return self._observed.queue_seconds

    async def __aiter__(self) -> AsyncIterator[CompletionDelta]:
        """The pieces of all choices as they come, until each has ended.

        Raises:
            Refusal: as of `take`.
        """
        while pieces := await self.take():
            for piece in pieces:
                yield piece

    async def take(self) -> list[CompletionDelta]:
        """Wait for pieces: what has come since the last call, a delta a choice; none once each has ended. Their `index`
        is the choice's number: the prompt's place times `n`, plus the completion's.

        Raises:
            Refusal: the engine has lost or refused the request, its own parameters forbid all tokens, or its time is
                over.
        """
        pieces: list[CompletionDelta] = []
        while self._going_on and not pieces:
            for number, delta in await self._inbox.take():
                choice = number * self._n + delta.index
                if delta.error is not None:
                    raise Refusal(Kind.INVALID if delta.error in OWN_FAULTS else Kind.FAILED, delta.error)
                if delta.finish_reason is not None:
                    self._going_on.discard(choice)
                self.usage.num_completion_tokens += len(delta.token_ids)
                self._observed.observe(choice, delta, self.usage.statistics.get(choice), time.perf_counter())
                self.usage.statistics[choice] = delta.statistics
                pieces.append(msgspec.structs.replace(delta, index=choice) if number else delta)
        return pieces

    @property
    def is_over(self) -> bool:
        """Whether no choice goes on."""
        return not self._going_on

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


@dataclass(frozen=True)
class ServedModel:
    """The model as clients see it.

    Attributes:
        name: what clients call it.
        prompts: checks and encodes prompts.
        tokenizer: None where prompts are token ids alone.
        draft_len: tokens drafted in a round, at most; 0 where none are.
    """

    name: str
    prompts: PromptReader
    tokenizer: Tokenizer | None
    draft_len: int


@dataclass(frozen=True)
class RequestOptions:
    """How all requests are treated.

    Attributes:
        timeout: seconds that one may take.
        ping_seconds: after so long without news a stream says that it is there; None for never.
        cache_by_client: whether clients share no prefixes in the cache.
    """

    timeout: float
    ping_seconds: float | None = None
    cache_by_client: bool = False


class Frontend:
    """What all protocols share.

    Attributes:
        model_name: what clients call the model.
        tokenizer: None where prompts are token ids alone.
        draft_len: tokens drafted in a round, at most; 0 where none are.
        admission: who is let in.
        client: the engine.
        metrics: what is counted.
        ping_seconds: after so long without news a stream says that it is there; None for never.
    """

    def __init__(
        self,
        model: ServedModel,
        admission: AdmissionControl,
        client: EngineClient,
        metrics: FrontendMetrics,
        parsers: Parsers,
        options: RequestOptions,
        logits_limit: LogitsLimit | None = None,
    ) -> None:
        self._logits_limit = logits_limit or LogitsLimit(0, 0, 0)
        self._cache_by_client = options.cache_by_client
        self._timeout = options.timeout
        self.ping_seconds = options.ping_seconds
        self.model_name = model.name
        self.tokenizer = model.tokenizer
        self.draft_len = model.draft_len
        self.admission = admission
        self.client = client
        self.metrics = metrics
        self._prompts = model.prompts
        self._parsers = parsers
        self._tokens = PromptTokens(model.prompts)
        self._coalescer = RequestCoalescer(admission)

    @property
    def adapters(self) -> list[str]:
        """Names of those that requests may ask for."""
        return self.client.adapters.names

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a text."""
        return self._prompts.end_token_ids

    def parse_in_loop(
        self, kind: str, body: bytes, model: str = "", json_length: int = 0
    ) -> UnencodedRequest | Stops | None:
        """Parse a request at once if it is short and cannot take long; None if `read` has to do it; see there."""
        return self._parsers.parse_in_loop(kind, body, self.most_prompt_tokens, model, json_length, self.adapters)

    async def read(self, kind: str, body: bytes, arrived: float, model: str = "", json_length: int = 0) -> Parsed:
        """Have a request parsed by a worker, beside the event loop.

        Args:
            kind, model, json_length: see `parsing.messages.Task`.
            body: its bytes.
            arrived: as of `begin`.

        Raises:
            Refusal: it is wrong, or its time is over.
        """
        most_tokens = self.most_prompt_tokens()
        # Those that come together begin together, but nobody waits for what may take long.
        is_short = len(body) <= SHORT_BODY
        try:
            async with asyncio.timeout(max(0.0, arrived + self._timeout - time.perf_counter())):
                with self._coalescer.expect_other() if is_short else nullcontext():
                    found = await self._parsers.read(kind, body, most_tokens, model, json_length, self.adapters)
        except TimeoutError:
            raise out_of_time(self._timeout) from None
        if isinstance(found, ParsedRequest) and not found.prompts:
            with wrap_errors():
                self._limits().check_prompt(max(found.lengths))
            raise engine_starting()  # another one, with more room
        return found

    async def begin(
        self,
        request: ParsedRequest | UnencodedRequest,
        arrived: float,
    ) -> Generation:
        """Let a request in and have it completed.

        Args:
            request: each of its prompts is completed `sampling.n` times, which is the same for all. A seed is drawn for
                each object of parameters without one. Of a ParsedRequest all was checked already, whatever its length;
                an UnencodedRequest is short, and nothing guides its text.
            arrived: when its body was there, in seconds of `time.perf_counter`: its time runs from then on.

        Raises:
            Refusal: it is wrong, or there is no room.
        """
        sampling = request.sampling
        if isinstance(request, UnencodedRequest):
            check_counts(request.prompts, sampling)
        ticket = self.admission.enter(sum(parameters.n for parameters in sampling), OWNER.get())
        try:
            tokens = await self._encode(request) if isinstance(request, UnencodedRequest) else request.prompts
            await self._coalescer.wait()
            requests = self._join(tokens, sampling)
            logits = self._check(requests)
            generation = Generation(self.client, requests, ticket, logits, self.metrics, arrived, self._timeout)
        except BaseException:
            ticket.leave()
            raise
        try:
            await asyncio.sleep(0)  # those that came with it reach the engine before anything else is done for this one
        except BaseException:
            generation.close()
            logits.leave()
            raise
        return generation

    async def _encode(self, request: UnencodedRequest) -> Sequence[Sequence[int]]:
        """Check that the model can follow the parameters, and make tokens of the prompts, together with those of other
        requests."""
        with wrap_errors():
            for parameters in distinct(request.sampling):
                # A grammar may take any time and memory, which only another process can be held to.
                assert parameters.guided is None, "guided requests are parsed by workers"
                self._prompts.check(parameters)
            with self._coalescer.expect_admitted():
                return await self._tokens.encode(request.prompts)

    def _join(self, tokens: Sequence[Sequence[int]], sampling: Sequence[SamplingParams]) -> list[EngineRequest]:
        seeded = {id(parameters): parameters.with_seed() for parameters in distinct(sampling)}
        owner = OWNER.get()
        if self._cache_by_client:
            for place, parameters in seeded.items():
                seeded[place] = parameters.with_salt(f"{owner}\n{parameters.cache_salt or ''}")
        return [EngineRequest(ids, seeded[id(given)], owner) for ids, given in zip(tokens, sampling, strict=True)]

    def _check(self, requests: Sequence[EngineRequest]) -> LogitsPlace:
        """Raise a Refusal unless the engine will take the requests, and there is room for their logits."""
        limits = self._limits()
        with wrap_errors():
            for request in requests:
                limits.check_prompt(len(request.prompt_token_ids))
                limits.check_draft_len(request.sampling.draft_len)
                limits.check_lookahead(request.sampling.lookahead_config)
                check_adapter(request.sampling.lora_name, self.adapters)
        lengths = [len(request.prompt_token_ids) for request in requests]
        return self._logits_limit.enter(lengths, [request.sampling for request in requests], limits.max_length)

    def most_prompt_tokens(self) -> int:
        """Tokens of the longest prompt that can run; raises a Refusal where there is no engine."""
        return self._limits().max_prompt_length

    def _limits(self) -> SchedulerLimits:
        """The engine's limits; raises a Refusal if it is gone, and its limits with it."""
        self.admission.check_open()
        assert self.client.limits is not None
        return self.client.limits
