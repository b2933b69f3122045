"""A stream of events over HTTP (Server-Sent Events), for every protocol that has one.

It knows HTTP through Starlette. It does not know what events hold.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Protocol

from sse_starlette import EventSourceResponse
from sse_starlette.sse import SendTimeoutError
from starlette.types import Receive, Scope, Send

STALLED_SECONDS = 60.0
"""How long a client may read nothing of a stream while there is more than its connection holds."""

logger = logging.getLogger(__name__)


class Closing(Protocol):
    """A request at work."""

    def close(self) -> None:
        """Give up what has not ended."""
        ...


class EventStream(EventSourceResponse):
    """A stream of events that lets its request go, whether it was read to its end, given up, or never begun."""

    def __init__(self, work: Closing, events: AsyncIterator[str]) -> None:
        super().__init__(events, sep="\n", send_timeout=STALLED_SECONDS)
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI calls it."""
        try:
            await super().__call__(scope, receive, send)
        except SendTimeoutError:
            logger.info("a client has read nothing for %g s, and is left", STALLED_SECONDS)
        finally:
            self._work.close()
