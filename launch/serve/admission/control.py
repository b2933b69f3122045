"""Admission control: who is let in while how much is in work, whatever the protocol.

Completions that have a row run at once, others wait for one; the numbers of both are bounded and known, so a request is
answered at once. Places, rows of the engine and parser workers are shared between clients (owners) first, and between
requests only then.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from ipaddress import IPv6Address, ip_address
from urllib.parse import unquote

from launch.serve.admission.refusals import (
    RESTART_RETRY_SECONDS,
    RETRY_SECONDS,
    Kind,
    Refusal,
    engine_starting,
    server_ending,
)
from trtrun.scheduling.queue import has_share

OWNER: ContextVar[str] = ContextVar("owner", default="")
"""The owner of the request that is worked for; empty if nobody has said."""

BEHIND_OTHERS = "behind others"
"""Owners begin with it whose requests go behind all others: they wait elsewhere until there is room, take no place of
others, and nobody's share is smaller for them."""

WANTING_SECONDS = 30.0
"""How long somebody counts as one who wants places, behind a request that had one or was refused."""


def owner_of_address(address: str) -> str:
    """The owner of requests from an address, such as "127.0.0.1", or gRPC's "ipv6:%5B::1%5D:1234"."""
    scheme, _, rest = unquote(address).partition(":")
    if scheme in ("ipv4", "ipv6"):
        address = rest.rpartition(":")[0].strip("[]")
    try:
        found = ip_address(address.partition("%")[0])
    except ValueError:
        return f"address {address}"
    if isinstance(found, IPv6Address):
        if found.ipv4_mapped is not None:
            return f"address {found.ipv4_mapped}"
        return f"network {IPv6Address(int(found) >> 64 << 64)}"
    return f"address {found}"


@dataclass(eq=False)
class Owner:
    """What one has of the places of admission.

    Attributes:
        num_completions, num_requests: in work.
        wanted: when a request came last, in seconds of `time.monotonic`.
    """

    num_completions: int = 0
    num_requests: int = 0
    wanted: float = 0.0


@dataclass
class Owners:
    """Owners who want places now, or did not long ago."""

    _known: OrderedDict[str, Owner] = field(default_factory=OrderedDict)

    def ask(self, name: str) -> Owner:
        """Somebody wants places."""
        now = time.monotonic()
        while self._known and next(iter(self._known.values())).wanted < now - WANTING_SECONDS:
            oldest, owner = self._known.popitem(last=False)
            if owner.num_requests:
                owner.wanted = now
                self._known[oldest] = owner
        owner = self._known.setdefault(name, Owner())
        owner.wanted = now
        self._known.move_to_end(name)
        return owner

    @property
    def num(self) -> int:
        """How many there are."""
        return len(self._known)


@dataclass
class AdmissionControl:
    """Counts what is in work, and turns away what is too much.

    Attributes:
        max_running: completions that have a row, at most.
        max_queue: completions beyond these.
        max_streams: requests in work, at most.
        is_open: whether the engine is there.
        is_hanging: whether it is there and does not get on.
        is_closing: whether the server ends: nobody is let in any more.
        successor: where the server that follows listens; None where none does.
        num_completions, num_requests: in work.
        behind: of these, those that go behind all others.
    """

    max_running: int
    max_queue: int
    max_streams: int
    is_open: bool = False
    is_hanging: bool = False
    is_closing: bool = False
    successor: str | None = None
    num_completions: int = 0
    num_requests: int = 0
    behind: Owner = field(default_factory=Owner)
    _owners: Owners = field(default_factory=Owners)
    _is_empty: asyncio.Event = field(default_factory=asyncio.Event)

    async def wait_empty(self, seconds: float) -> bool:
        """Wait until nothing is in work; whether that came within so many seconds."""
        self._is_empty.clear()
        if self.num_requests:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._is_empty.wait(), seconds)
        return not self.num_requests

    def leave(self) -> None:
        """A request is over."""
        self.num_requests -= 1
        if not self.num_requests:
            self._is_empty.set()

    def check_open(self) -> None:
        """Raise a Refusal while nobody is let in."""
        if self.is_closing:
            raise server_ending(self.successor)
        if not self.is_open:
            raise engine_starting()
        if self.is_hanging:
            raise Refusal(
                Kind.UNAVAILABLE, "the engine does not get on: send the request again later", code="engine_hanging",
                retry_after=RESTART_RETRY_SECONDS,
            )  # fmt: skip

    def enter(self, num_completions: int, owner: str = "") -> Ticket:
        """Let a request in. Places are shared by owners (`trtrun.scheduling.queue.has_share`).

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
        of_owner = self._ask(owner)
        if of_owner is self.behind:
            return Ticket(self, num_completions, of_owner)
        others = self._owners.num - 1
        completions = self.num_completions - self.behind.num_completions
        if not has_share(num_completions, of_owner.num_completions, completions, most, others):
            own = f", {of_owner.num_completions} of them yours" if others else ""
            raise Refusal(
                Kind.BUSY,
                f"{completions} completions are in work{own}, {num_completions} more are asked for, and "
                f"{most} may be (scheduler.max_batch_size and server.max_queue): send the request again later",
                code="queue_full",
                retry_after=RETRY_SECONDS,
            )
        requests = self.num_requests - self.behind.num_requests
        if not has_share(1, of_owner.num_requests, requests, self.max_streams, others):
            own = f", {of_owner.num_requests} of them yours" if others else ""
            raise Refusal(
                Kind.BUSY,
                f"{requests} requests are in work{own} (server.max_streams is {self.max_streams}): send the "
                "request again later",
                code="too_many_streams",
                retry_after=RETRY_SECONDS,
            )
        return Ticket(self, num_completions, of_owner)

    def take_over(self, num_completions: int, owner: str) -> Ticket:
        """Count a request that another server has let in: it is not refused."""
        return Ticket(self, num_completions, self._ask(owner))

    def _ask(self, owner: str) -> Owner:
        return self.behind if owner.startswith(BEHIND_OTHERS) else self._owners.ask(owner)


class Ticket:
    """A request's place among those admitted, from `enter` until `leave`, and those of its completions, each until it
    has ended: an answer that is not read yet takes no place of those that are worked for."""

    def __init__(self, admission: AdmissionControl, num_completions: int, owner: Owner) -> None:
        self._admission = admission
        self._owner = owner
        self._num_completions = 0
        self._has_left = False
        admission.num_requests += 1
        owner.num_requests += 1
        self._change(num_completions)

    def _change(self, num_completions: int) -> None:
        for counted in (self._admission, self._owner):
            counted.num_completions += num_completions
        self._num_completions += num_completions

    def end_completion(self) -> None:
        """A completion has ended; more than there are are passed over."""
        if self._num_completions:
            self._change(-1)

    def leave(self) -> None:
        """Give the places back; calling it again does nothing."""
        self._change(-self._num_completions)
        if not self._has_left:
            self._has_left = True
            self._owner.num_requests -= 1
            self._admission.leave()
