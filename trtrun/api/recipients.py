"""Where what comes of a request goes from the engine's thread: each has a recipient, and each way out is an outlet.

A round's deltas are put into their recipients, and then every outlet is told once, whatever the number of its
recipients. `Mailbox` is the recipient of event loops. It does not know engines, or who reads.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from trtrun.core.outputs import CompletionDelta, merge_deltas


class Outlet(ABC):
    """A way out of the engine's thread."""

    @abstractmethod
    def flush(self, recipients: Sequence[Any]) -> None:
        """These of its recipients have got something. Once a round, in the engine's thread: it must not wait."""


class Recipient(ABC):
    """What becomes of one request. The engine's thread calls it, or whoever orders when there is no engine any more.

    Attributes:
        outlet: flushed after the recipient got something.
        is_over: whether nothing will be put any more.
    """

    def __init__(self, outlet: Outlet) -> None:
        self.outlet = outlet
        self.is_over = False
        self._num_going_on = 0

    def begin(self, num_completions: int) -> None:
        """The request has been added."""
        self._num_going_on = num_completions

    def put(self, delta: CompletionDelta) -> None:
        """Keep a delta, whose statistics go on counting once the outlet is flushed."""
        self._keep(delta)
        self._num_going_on -= delta.finish_reason is not None
        self.is_over = self._num_going_on == 0

    def end(self, error: BaseException | None = None) -> None:
        """Nothing will come any more, and why not: None where it was aborted."""
        self._keep_error(error)
        self.is_over = True

    @abstractmethod
    def _keep(self, delta: CompletionDelta) -> None:
        """A delta came."""

    @abstractmethod
    def _keep_error(self, error: BaseException | None) -> None:
        """The request ended before its completions had."""


def flush(recipients: Iterable[Recipient]) -> None:
    """Tell the outlets of recipients that got something, each once."""
    outlets: dict[Outlet, list[Recipient]] = {}
    for recipient in recipients:
        outlets.setdefault(recipient.outlet, []).append(recipient)
    for outlet, told in outlets.items():
        outlet.flush(told)


@dataclass(frozen=True)
class LoopOutlet(Outlet):
    """Wakes readers in an event loop; one call wakes all of a round."""

    loop: asyncio.AbstractEventLoop

    def flush(self, recipients: Sequence[Mailbox]) -> None:
        """Wake the readers of mailboxes."""
        with suppress(RuntimeError):  # the loop is closed, and nobody reads
            self.loop.call_soon_threadsafe(_wake, recipients)


class Mailbox(Recipient):
    """What one reader in an event loop has not taken yet. The engine's thread puts, the reader takes."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(LoopOutlet(loop))
        self._deltas: deque[CompletionDelta] = deque()
        self._error: BaseException | None = None
        self._has_news = asyncio.Event()

    def _keep(self, delta: CompletionDelta) -> None:
        self._deltas.append(msgspec.structs.replace(delta, statistics=delta.statistics.copy()))

    def _keep_error(self, error: BaseException | None) -> None:
        self._error = error

    def wake(self) -> None:
        """Tell the reader that there is news. In the reader's loop."""
        self._has_news.set()

    async def take(self) -> list[CompletionDelta]:
        """Wait for news and return them, one delta a completion; none once the request is over.

        Raises:
            TrtrunError: what ended the request, once all deltas before it are taken.
        """
        while True:
            self._has_news.clear()
            is_over = self.is_over  # looked at before the deltas, as it comes after them
            if self._deltas:
                break
            if is_over and self._error is not None:
                raise self._error
            if is_over:
                return []
            await self._has_news.wait()
        found: dict[int, list[CompletionDelta]] = {}
        while self._deltas:
            delta = self._deltas.popleft()
            found.setdefault(delta.index, []).append(delta)
        return [merge_deltas(deltas) for deltas in found.values()]


def _wake(mailboxes: Sequence[Mailbox]) -> None:
    for mailbox in mailboxes:
        mailbox.wake()
