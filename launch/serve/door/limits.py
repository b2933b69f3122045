"""The door: who is let in while how much is in work, and how long a request may take.

Completions that have a row run at once, others wait for one; the front knows how many of both there can be, so the door
answers at once. It knows numbers, and no request.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field

from launch.serve.door.refusals import Kind, Refusal

RETRY_SECONDS = 1
"""After which a client that was turned away may try again: a queue moves with every completion that ends."""

RESTART_RETRY_SECONDS = 5
"""The same while the engine starts, or hangs, and while the server ends: another may stand in for it."""


@dataclass
class Door:
    """Counts what is in work, and turns away what is too much.

    Attributes:
        max_running: completions that have a row, at most.
        max_queue: completions beyond these.
        max_streams: requests in work, at most.
        is_open: whether the engine is there.
        is_hanging: whether it is there and does not get on.
        is_closing: whether the server ends: nobody is let in any more.
        num_completions, num_requests: in work.
    """

    max_running: int
    max_queue: int
    max_streams: int
    is_open: bool = False
    is_hanging: bool = False
    is_closing: bool = False
    num_completions: int = 0
    num_requests: int = 0
    _is_empty: asyncio.Event = field(default_factory=asyncio.Event)

    async def wait_empty(self, seconds: float) -> bool:
        """Wait until nothing is in work; whether that came within so many seconds."""
        self._is_empty.clear()
        if self.num_requests:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._is_empty.wait(), seconds)
        return not self.num_requests

    def leave(self, num_completions: int) -> None:
        """A request with so many completions is over."""
        self.num_requests -= 1
        self.num_completions -= num_completions
        if not self.num_requests:
            self._is_empty.set()

    def check_open(self) -> None:
        """Raise a Refusal while nobody is let in."""
        if self.is_closing:
            raise server_ending()
        if not self.is_open:
            raise engine_starting()
        if self.is_hanging:
            raise Refusal(
                Kind.UNAVAILABLE, "the engine does not get on: send the request again later", code="engine_hanging",
                retry_after=RESTART_RETRY_SECONDS,
            )  # fmt: skip

    def enter(self, num_completions: int) -> Ticket:
        """Let a request in.

        Raises:
            Refusal: there is no room, or nobody is let in.
        """
        self.check_open()
        most = self.max_running + self.max_queue
        if num_completions > most:
            raise Refusal(
                Kind.INVALID,
                f"the request asks for {num_completions} completions, more than the {most} that may be in work at once "
                "(scheduler.max_batch_size and server.max_queue)",
            )
        if self.num_completions + num_completions > most:
            raise Refusal(
                Kind.BUSY,
                f"{self.num_completions} completions are in work, {num_completions} more are asked for, and {most} may "
                "be (scheduler.max_batch_size and server.max_queue): send the request again later",
                code="queue_full",
                retry_after=RETRY_SECONDS,
            )
        if self.num_requests >= self.max_streams:
            raise Refusal(
                Kind.BUSY,
                f"{self.num_requests} requests are in work (server.max_streams): send the request again later",
                code="too_many_streams",
                retry_after=RETRY_SECONDS,
            )
        return Ticket(self, num_completions)


class Ticket:
    """A request's place behind the door, from `enter` until `leave`."""

    def __init__(self, door: Door, num_completions: int) -> None:
        self._door = door
        self._num_completions = num_completions
        door.num_requests += 1
        door.num_completions += num_completions

    def leave(self) -> None:
        """Give the place back; calling it again does nothing."""
        count, self._num_completions = self._num_completions, 0
        if count:
            self._door.leave(count)


def engine_starting() -> Refusal:
    """What a request is told while there is no engine."""
    return Refusal(
        Kind.UNAVAILABLE, "the engine is starting: send the request again later", code="engine_starting",
        retry_after=RESTART_RETRY_SECONDS,
    )  # fmt: skip


def server_ending() -> Refusal:
    """What a request is told that comes too late, or is not done when the server's time is over."""
    return Refusal(Kind.UNAVAILABLE, "the server is ending", code="server_ending", retry_after=RESTART_RETRY_SECONDS)


def out_of_time(seconds: float) -> Refusal:
    """What a request is told that was not done in time."""
    return Refusal(
        Kind.TIMEOUT, f"the request was not done within {seconds:g} s (server.request_timeout_s)", code="timeout"
    )
