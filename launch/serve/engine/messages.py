"""What frontend and engine say to each other: a few kinds of messages, each MessagePack behind its length.

    4 bytes, big-endian: length │ {"kind": "begin", "requests": […]}

The frontend sends Begin, Abort, AskStatus, LoadAdapter, DropAdapter and Close; the engine sends Ready, Deltas, Ended,
AdapterChanged, Status and Heartbeat. They are plain values, checked as they are read: a field that is missing, unknown
or of another type ends the connection.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec

from trtrun.configuration.drafting.speculation_section import MatchRule
from trtrun.core.outputs import CompletionDelta
from trtrun.core.sampling_params import SamplingParams
from trtrun.errors import TrtrunError, one_line
from trtrun.scheduling.limits import SchedulerLimits

MOST_BYTES = 1 << 28
"""The most bytes of one message: many times the tokens of the longest request."""

_LENGTH_BYTES = 4
_READ_BYTES = 1 << 18


class _Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind"):
    """A message says its kind."""


class Generate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Complete a prompt, from its start or behind the tokens `generated`, in turns with those of other groups and
    owners (see `LLMEngine.add_request`). The frontend has checked it.

    Attributes:
        prompt: its tokens, 32 bits each: there may be a hundred thousand.
    """

    request_id: str
    prompt: bytes
    sampling: dict[str, Any]
    generated: dict[int, tuple[int, ...]] | None = None
    group: str | None = None
    owner: str | None = None

    @classmethod
    def of(
        cls,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        generated: dict[int, tuple[int, ...]] | None,
        group: str | None = None,
        owner: str | None = None,
    ) -> Generate:
        """The message for one request."""
        return cls(
            request_id=request_id,
            prompt=array("i", prompt_token_ids).tobytes(),
            sampling=sampling.as_mapping(),
            generated=generated,
            group=group,
            owner=owner,
        )

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        """The prompt's tokens."""
        return tuple(array("i", self.prompt))

    def sampling_params(self) -> SamplingParams:
        """The parameters."""
        return SamplingParams.from_checked(self.sampling)


class Begin(_Message, frozen=True, tag="begin"):
    """Requests that came together, and begin together."""

    requests: tuple[Generate, ...]


class Abort(_Message, frozen=True, tag="abort"):
    """End a request; nothing more is said of it."""

    request_id: str


class AskStatus(_Message, frozen=True, tag="ask_status"):
    """Asks for a Status."""


class Close(_Message, frozen=True, tag="close"):
    """End the engine, and all its ranks."""


class Ready(_Message, frozen=True, tag="ready"):
    """The engine is loaded; its first message.

    Attributes:
        version: of trtrun, the same on both sides.
        config_hash: of the configuration that the engine has read.
        limits: fields of SchedulerLimits.
        memory: bytes that its ranks hold, by "gpu" and "cpu": weights, KV store and the largest round.
        files: tell the files that it was read from, by what they are, from others (`hash_files`).
        start_seconds: since rank 0's process began, or its turn.
        start_phases: of these what phases took, in order, by name; what comes before the first is not named.
    """

    version: str
    config_hash: str
    limits: dict[str, int | bool | tuple[int | bool, ...] | None]
    memory: dict[str, int] = {}
    files: dict[str, str] = {}
    start_seconds: float = 0.0
    start_phases: dict[str, float] = {}

    def scheduler_limits(self) -> SchedulerLimits:
        """The engine's limits, by which prompts are refused before they are sent."""
        rule = self.limits.get("match_rule")
        match_rule = msgspec.convert(rule, MatchRule | None)
        return SchedulerLimits(**{**self.limits, "match_rule": match_rule})  # type: ignore[arg-type]


class LoadAdapter(_Message, frozen=True, tag="load_adapter"):
    """Load an adapter from a directory, before whatever is sent behind it. AdapterChanged answers."""

    lora_name: str
    path: str


class DropAdapter(_Message, frozen=True, tag="drop_adapter"):
    """Forget an adapter; requests that have it go on. AdapterChanged answers."""

    lora_name: str


class AdapterChanged(_Message, frozen=True, tag="adapter_changed"):
    """What came of a LoadAdapter or DropAdapter, in their order; with an `error` nothing has changed."""

    error: str | None = None


class Deltas(_Message, frozen=True, tag="deltas"):
    """What a round added, to all its completions: one message, however many rows there are."""

    deltas: tuple[CompletionDelta, ...]


class Ended(_Message, frozen=True, tag="ended"):
    """The engine has not taken a request, and says why."""

    request_id: str
    error: str


class Status(_Message, frozen=True, tag="status"):
    """How full the engine is, and its totals since its start.

    Attributes:
        num_running, num_waiting: completions with and without a row.
        num_free_blocks, num_blocks: of the KV store.
        totals: of `LLMEngine.statistics`.
        num_prefilling: of the completions with a row, those whose prompt is still computed.
        num_prefill_tokens: what they have to compute, reused tokens among them.
        num_preempted: of the completions without a row, those that had one.
    """

    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_blocks: int
    totals: dict[str, Any]
    num_prefilling: int = 0
    num_prefill_tokens: int = 0
    num_preempted: int = 0

    @property
    def kv_usage(self) -> float:
        """Share of the KV blocks that rows hold."""
        return 1 - self.num_free_blocks / self.num_blocks if self.num_blocks else 0.0

    @property
    def drafts_due(self) -> int:
        """Drafts that were due where draft ranks draft ahead."""
        return sum(self.totals.get("foresight", {}).get("due_by_place", ()))

    @property
    def drafts_foreseen(self) -> int:
        """The number of these that were ready before their verdict."""
        return sum(self.totals.get("foresight", {}).get("foreseen_by_place", ()))

    @property
    def draft_hit_rate(self) -> float | None:
        """The share of these; None before the first, and where nothing is drafted ahead."""
        return self.drafts_foreseen / self.drafts_due if self.drafts_due else None


class Standing(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The state of a thread of a rank.

    Attributes:
        rank: world rank.
        phase: its kind, for programs: "start", "idle", "orders", "adapters", "guides", "end", "round".
        doing: the same for people, as in "it stands still …".
        seconds: since the phase began.
        still_seconds: since it last got on in it.
        limit: seconds that it may stand still; None where it may for ever, or is watched elsewhere.
    """

    rank: int
    phase: str
    doing: str
    seconds: float
    still_seconds: float
    limit: float | None = None


class Heartbeat(_Message, frozen=True, tag="beat"):
    """A sign of life of an engine, again and again.

    Attributes:
        standings: of the thread that runs the rounds, first of rank 0, and of those that work beside it.
    """

    standings: tuple[Standing, ...]


_OfFront = Begin | Abort | AskStatus | LoadAdapter | DropAdapter | Close
_OfEngine = Ready | Deltas | Ended | AdapterChanged | Status | Heartbeat
Message = _OfFront | _OfEngine

_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


class MessageError(TrtrunError):
    """What came over the socket is no message, or a message is too large for it."""


def encode(message: Message) -> bytes:
    """A message with its length before it.

    Raises:
        MessageError: it is too large.
    """
    body = _ENCODER.encode(message)
    if len(body) > MOST_BYTES:
        raise MessageError(f"a message of {len(body)} bytes is larger than {MOST_BYTES}, the most that is sent")
    return len(body).to_bytes(_LENGTH_BYTES, "big") + body


class MessageStream:
    """The messages that come over a connection, in their order. It reads what there is, not message by message."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader
        self._received = bytearray()
        self._messages: deque[Message] = deque()
        self._error: MessageError | None = None

    async def __aiter__(self) -> AsyncIterator[Message]:
        """Messages until the other side ends the connection.

        Raises:
            MessageError: as of `read`.
        """
        while (message := await self.read()) is not None:
            yield message

    async def read(self) -> Message | None:
        """The next message; None where the other side has ended the connection.

        Raises:
            MessageError: it is too large, or no message.
        """
        while not self._messages:
            if self._error is not None:
                raise self._error
            try:
                data = await self._reader.read(_READ_BYTES)
            except ConnectionError:
                return None
            if not data:
                return None
            self._received += data
            self._split()
        return self._messages.popleft()

    def _split(self) -> None:
        """Take whole messages off what has been received. What is wrong is told behind the messages before it."""
        received, begin = self._received, 0
        try:
            while len(received) >= begin + _LENGTH_BYTES:
                length = int.from_bytes(received[begin : begin + _LENGTH_BYTES], "big")
                if length > MOST_BYTES:
                    raise MessageError(
                        f"the other side announces a message of {length} bytes; {MOST_BYTES} are the most"
                    )
                end = begin + _LENGTH_BYTES + length
                if len(received) < end:
                    break
                self._messages.append(_decode(bytes(received[begin + _LENGTH_BYTES : end])))
                begin = end
        except MessageError as error:
            self._error = error
        del received[:begin]


def _decode(body: bytes) -> Message:
    try:
        return _DECODER.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MessageError(f"the other side sent no message that is known: {one_line(error)}") from None
