"""The processes that read for a frontend: which of them reads what, and what it may take.

Short requests and long ones have processes of their own, so that a chat does not wait behind megabytes. One is there
from the start; another one is started when all are busy, up to the most (`pool`). A request that its client has given
up has its process ended, where that is not done with it soon.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from launch.serve.admission.limits import PARSED_IN_LOOP_BYTES, SHORT_BODY
from launch.serve.parsing.messages import Answered, Facts, Read, Refused, Stops, Task, pack
from launch.serve.parsing.worker_pool import WorkerPool
from trtrun.api.prompts import Prompt
from trtrun.core.sampling_params import SamplingParams

LONG_NICENESS = 10
"""Niceness of processes that read long requests: the rounds go first."""

_BASE_SECONDS, _SECONDS_A_MIB = 10.0, 4.0
_BASE_BYTES, _BYTES_A_BYTE = 1 << 30, 64


@dataclass(frozen=True)
class ParsedRequest:
    """A request to complete, checked but for what the engine would have to say.

    Attributes:
        lengths: tokens of each prompt.
        prompts: its tokens; none where one is longer than was asked for.
        sampling: of each prompt.
        others: what else it asks for, by its protocol's names.
    """

    lengths: Sequence[int]
    prompts: Sequence[array[int]]
    sampling: Sequence[SamplingParams]
    others: dict[str, Any]


@dataclass(frozen=True)
class UnencodedRequest:
    """A request that was parsed in the event loop: its prompts are not tokens yet, and not checked.

    Attributes:
        prompts: texts or token ids.
        sampling: of each prompt.
        others: what else it asks for, as its protocol has it.
    """

    prompts: Sequence[Prompt]
    sampling: Sequence[SamplingParams]
    others: Any = None

    @classmethod
    def of(cls, prompts: Sequence[Prompt], sampling: SamplingParams, others: Any = None) -> UnencodedRequest:
        """Make a request whose prompts share their parameters."""
        return cls(prompts, [sampling] * len(prompts), others)


@dataclass(frozen=True)
class ParsedAnswer:
    """A request that is answered already; see `Answered`."""

    num_inferences: int
    content: bytes
    json_length: int | None


Parsed = ParsedRequest | ParsedAnswer | Stops


class LoopParser(Protocol):
    """Parses short requests in the event loop."""

    def parse_in_loop(
        self,
        kind: str,
        body: bytes,
        most_tokens: Callable[[], int],
        model: str = "",
        json_length: int = 0,
        adapters: Sequence[str] = (),
    ) -> UnencodedRequest | Stops | None:
        """Parse a request at once.

        Args:
            kind, model, json_length, adapters: see Task.
            body: its bytes.
            most_tokens: tells how many a prompt may have; called if the request says that prompts are to be cut.

        Returns:
            The request; None if it takes a worker: a chat's template, or a guide, may take any time.

        Raises:
            Refusal: it is wrong.
        """
        ...


class Parsers:
    """Whatever parses a server's requests: the event loop, and two pools of processes. It belongs to one event loop."""

    def __init__(self, facts: Facts, most_body_bytes: int, in_loop: LoopParser) -> None:
        """Begin without processes.

        Args:
            facts: of the served model.
            most_body_bytes: that the longest request has.
            in_loop: parses short requests.
        """
        self._in_loop = in_loop
        most = max(1, min(4, len(os.sched_getaffinity(0)) // 2))
        facts = msgspec.structs.replace(facts, most_bytes=_BASE_BYTES + _BYTES_A_BYTE * most_body_bytes)
        # One guide may take all the time that a request has: other chats do not wait for it.
        self._short = WorkerPool(pack(facts), max(2, most))
        self._long = WorkerPool(pack(msgspec.structs.replace(facts, niceness=LONG_NICENESS)), most)

    def start(self) -> None:
        """Start the first ones, which make themselves ready at once."""
        for pool in (self._short, self._long):
            pool.start_one()

    def parse_in_loop(
        self,
        kind: str,
        body: bytes,
        most_tokens: Callable[[], int],
        model: str = "",
        json_length: int = 0,
        adapters: Sequence[str] = (),
    ) -> UnencodedRequest | Stops | None:
        """Parse a request at once; None if it is long, or may take long: then `read` does it. See LoopParser."""
        if len(body) > PARSED_IN_LOOP_BYTES:
            return None
        return self._in_loop.parse_in_loop(kind, body, most_tokens, model, json_length, adapters)

    async def read(
        self,
        kind: str,
        body: bytes,
        most_tokens: int,
        model: str = "",
        json_length: int = 0,
        adapters: Sequence[str] = (),
    ) -> Parsed:
        """Have a worker parse a request; see Task.

        Raises:
            Refusal: it is wrong, or takes more time or memory than it may.
        """
        seconds = _BASE_SECONDS + _SECONDS_A_MIB * len(body) / (1 << 20)
        task = Task(
            kind=kind,
            seconds=seconds,
            most_tokens=most_tokens,
            model=model,
            json_length=json_length,
            adapters=tuple(adapters),
        )
        return await self._read(task, body)

    async def _read(self, task: Task, body: bytes) -> Parsed:
        pool = self._long if len(body) > SHORT_BODY else self._short
        reply, blocks = await pool.read(task, body)
        return parsed_of(reply.result, blocks)

    def close(self) -> None:
        """End all processes, whatever they do."""
        for pool in (self._short, self._long):
            pool.close()


def parsed_of(result: Read | Answered | Stops | Refused, blocks: Sequence[bytes]) -> Parsed:
    """What a reply tells.

    Raises:
        Refusal: the request is wrong.
    """
    if isinstance(result, Refused):
        raise result.refusal()
    if isinstance(result, Stops):
        return result
    if isinstance(result, Answered):
        return ParsedAnswer(result.num_inferences, blocks[0], result.json_length)
    sampling = [SamplingParams.from_checked(values) for values in result.samplings]
    prompts = [array("i", block) for block in blocks]
    return ParsedRequest(result.lengths, prompts, [sampling[place] for place in result.places], result.others)
