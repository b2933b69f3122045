"""What front and engine say to each other over their socket: a few kinds of messages, each JSON behind its length.

    4 bytes, big-endian: length │ {"kind": "generate", "request_id": "…", …}

The front sends Generate, Abort, AskStatus and Close; the engine sends Ready, Delta, Ended and Status. Messages are
plain values, checked as they are read: a field that is missing, unknown or of another type ends the connection. It does
not know who sends what when.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from trtrun.core import RequestStatistics, TokenLogprobs
from trtrun.errors import TrtrunError
from trtrun.outputs import CompletionDelta
from trtrun.sampling_params import SamplingParams
from trtrun.scheduling.limits import SchedulerLimits

MOST_BYTES = 1 << 28
"""Of one message: many times the tokens of the longest request."""

_LENGTH_BYTES = 4


class MessageError(TrtrunError):
    """What came over the socket is no message, or a message is too large for it."""


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Generate(_Message):
    """Complete a prompt, from its start or behind the tokens `generated`, in turns with those of other groups (see
    `LLMEngine.add_request`)."""

    kind: Literal["generate"] = "generate"
    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: dict[str, Any]
    generated: dict[int, tuple[int, ...]] | None = None
    group: str | None = None

    @classmethod
    def of(
        cls,
        request_id: str,
        prompt_token_ids: tuple[int, ...],
        sampling: SamplingParams,
        generated: dict[int, tuple[int, ...]] | None,
        group: str | None = None,
    ) -> Generate:
        """The message for one request."""
        return cls(
            request_id=request_id,
            prompt_token_ids=prompt_token_ids,
            sampling=asdict(sampling),
            generated=generated,
            group=group,
        )

    def sampling_params(self) -> SamplingParams:
        """The parameters, checked once more."""
        return SamplingParams.from_mapping(self.sampling)


class Abort(_Message):
    """End a request; nothing more is said of it."""

    kind: Literal["abort"] = "abort"
    request_id: str


class AskStatus(_Message):
    """Asks for a Status."""

    kind: Literal["ask_status"] = "ask_status"


class Close(_Message):
    """End the engine, and all its ranks."""

    kind: Literal["close"] = "close"


class Ready(_Message):
    """The engine is loaded; its first message.

    Attributes:
        version: of trtrun, the same on both sides.
        config_hash: of the configuration that the engine has read.
        limits: fields of SchedulerLimits.
    """

    kind: Literal["ready"] = "ready"
    version: str
    config_hash: str
    limits: dict[str, int | bool | None]

    def scheduler_limits(self) -> SchedulerLimits:
        """The engine's limits, by which prompts are refused before they are sent."""
        return SchedulerLimits(**self.limits)  # type: ignore[arg-type]


class Counters(_Message):
    """What speculation did for a completion, since the engine got it."""

    num_rounds: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    num_cached_prompt_tokens: int
    acceptance_histogram: tuple[int, ...]


class Delta(_Message):
    """What a round, or several, added to a completion; see CompletionDelta.

    Attributes:
        logprobs: for each token its id, its log probability, and (id, log probability) of the likeliest ones.
    """

    kind: Literal["delta"] = "delta"
    request_id: str
    index: int
    token_ids: tuple[int, ...]
    text: str
    counters: Counters
    logprobs: tuple[tuple[int, float, tuple[tuple[int, float], ...]], ...] | None = None
    finish_reason: str | None = None
    error: str | None = None
    token_origins: str = ""

    @classmethod
    def of(cls, delta: CompletionDelta) -> Delta:
        """The message for a delta of the engine."""
        logprobs = None
        if delta.logprobs is not None:
            logprobs = tuple(
                (entry.token_id, entry.logprob, tuple((token, value) for token, value in entry.alternatives))
                for entry in delta.logprobs
            )
        statistics = delta.statistics
        return cls(
            request_id=str(delta.request_id),
            index=delta.index,
            token_ids=delta.token_ids,
            text=delta.text,
            counters=Counters(
                num_rounds=statistics.num_rounds,
                num_draft_tokens=statistics.num_draft_tokens,
                num_accepted_draft_tokens=statistics.num_accepted_draft_tokens,
                num_cached_prompt_tokens=statistics.num_cached_prompt_tokens,
                acceptance_histogram=tuple(statistics.acceptance_histogram),
            ),
            logprobs=logprobs,
            finish_reason=delta.finish_reason,
            error=delta.error,
            token_origins=delta.token_origins,
        )

    def completion_delta(self) -> CompletionDelta:
        """The delta, with statistics that hold the counters and no times."""
        counters = self.counters.model_dump()
        counters["acceptance_histogram"] = list(self.counters.acceptance_histogram)
        logprobs = None
        if self.logprobs is not None:
            logprobs = tuple(TokenLogprobs(token, value, others) for token, value, others in self.logprobs)
        return CompletionDelta(
            self.request_id,
            self.index,
            self.token_ids,
            self.text,
            RequestStatistics(**counters),
            logprobs,
            self.finish_reason,
            self.error,
            self.token_origins,
        )


class Ended(_Message):
    """The engine has not taken a request, and says why."""

    kind: Literal["ended"] = "ended"
    request_id: str
    error: str


class Status(_Message):
    """How full the engine is, and its totals since its start.

    Attributes:
        num_running, num_waiting: completions with and without a row.
        num_free_blocks, num_blocks: of the KV store.
        totals: of `LLMEngine.statistics`.
    """

    kind: Literal["status"] = "status"
    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_blocks: int
    totals: dict[str, Any]


Message = Generate | Abort | AskStatus | Close | Ready | Delta | Ended | Status
_READER: TypeAdapter[Message] = TypeAdapter(Annotated[Message, Field(discriminator="kind")])


def encode(message: Message) -> bytes:
    """A message with its length before it.

    Raises:
        MessageError: it is too large.
    """
    body = message.model_dump_json().encode()
    if len(body) > MOST_BYTES:
        raise MessageError(f"a message of {len(body)} bytes is larger than {MOST_BYTES}, the most that is sent")
    return len(body).to_bytes(_LENGTH_BYTES, "big") + body


async def read_message(reader: asyncio.StreamReader) -> Message | None:
    """The next message; None where the other side has ended the connection.

    Raises:
        MessageError: it is too large, or no message.
    """
    try:
        length = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "big")
        if length > MOST_BYTES:
            raise MessageError(f"the other side announces a message of {length} bytes; {MOST_BYTES} are the most")
        body = await reader.readexactly(length)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    try:
        return _READER.validate_json(body)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, problem["loc"]))
        raise MessageError(f"the other side sent no message that is known: {where}: {problem['msg']}") from None
