"""What every call over gRPC happens within: an id, a key, a log line, and errors as statuses.

It knows gRPC's contexts and Refusals. It does not know what calls do.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Any

import grpc

from launch.serve.door.refusals import HTTP_STATUS, Kind, Refusal
from launch.serve.http.connections import STALLED_SECONDS
from launch.serve.http.requests import REQUEST_ID, Keys, choose_id
from launch.serve.kserve.grpc_messages import no_message
from launch.serve.metrics import FrontMetrics

_STATUS: Mapping[Kind, grpc.StatusCode] = {
    Kind.INVALID: grpc.StatusCode.INVALID_ARGUMENT,
    Kind.UNAUTHORIZED: grpc.StatusCode.UNAUTHENTICATED,
    Kind.UNKNOWN_MODEL: grpc.StatusCode.NOT_FOUND,
    Kind.TOO_LARGE: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Kind.BUSY: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Kind.FAILED: grpc.StatusCode.INTERNAL,
    Kind.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    Kind.TIMEOUT: grpc.StatusCode.DEADLINE_EXCEEDED,
}

FAILED = "the server failed; its log says how"

Context = Any
"""grpc.aio.ServicerContext, whose types the library does not tell."""

logger = logging.getLogger(__name__)


class ObservedCall:
    """What one call happens within. Its log line has nothing of its content."""

    def __init__(self, metrics: FrontMetrics, keys: Keys | None, context: Context, name: str) -> None:
        self._metrics = metrics
        self._keys = keys
        self._context = context
        self._name = name
        self._began = time.perf_counter()
        self._request_id = ""
        self._status = grpc.StatusCode.OK

    async def __aenter__(self) -> None:
        sent = _texts_of(self._context)
        self._request_id = choose_id(sent.get(REQUEST_ID, ""))
        await self._context.send_initial_metadata(((REQUEST_ID, self._request_id),))
        if self._keys is not None:
            try:
                self._keys.check_header(sent.get("authorization", ""))
            except Refusal as refusal:
                await self._refuse(refusal)

    async def __aexit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]  # a stream's, of which the first one ended the others
        if isinstance(error, asyncio.CancelledError):
            self._status = grpc.StatusCode.CANCELLED
            self._log()
            return
        if isinstance(error, Refusal):
            await self._refuse(error)
        elif isinstance(error, TimeoutError):
            logger.info("a client has read nothing for %g s, and is left", STALLED_SECONDS)
            await self._abort(grpc.StatusCode.DEADLINE_EXCEEDED, f"nothing was read for {STALLED_SECONDS:g} s")
        elif isinstance(error, Exception):
            logger.error("%s failed", self._name, exc_info=error)
            self._metrics.count_refusal(500)
            await self._abort(grpc.StatusCode.INTERNAL, FAILED)
        self._log()

    async def _refuse(self, refusal: Refusal) -> None:
        self._metrics.count_refusal(HTTP_STATUS[refusal.kind])
        if refusal.retry_after is not None:
            self._context.set_trailing_metadata((("retry-after", str(refusal.retry_after)),))
        await self._abort(_STATUS[refusal.kind], str(refusal))

    async def _abort(self, status: grpc.StatusCode, line: str) -> None:
        self._status = status
        self._log()
        await self._context.abort(status, line)

    def _log(self) -> None:
        seconds = time.perf_counter() - self._began
        logger.info("%s: gRPC %s: %s after %.3f s", self._request_id, self._name, self._status.name, seconds)


def check_message(message: Any) -> None:
    """Raise a Refusal for what came in place of a message."""
    if message is None:
        raise no_message()


async def read_message(context: Context, seconds: float) -> Any:
    """The message of a call that has one.

    Raises:
        Refusal: it is none, or not there in time.
    """
    try:
        async with asyncio.timeout(seconds):
            message = await context.read()
    except TimeoutError:
        raise Refusal(Kind.TIMEOUT, f"the call's message was not there within {seconds:g} s") from None
    if message is grpc.aio.EOF:
        raise Refusal(Kind.INVALID, "the call has no message")
    check_message(message)
    return message


def caller_of(context: Context) -> tuple[str, str]:
    """Who calls: the connection, and the key, as a proxy may bring calls of several clients through one connection."""
    return context.peer(), _texts_of(context).get("authorization", "")


def _texts_of(context: Context) -> dict[str, str]:
    """What a call says of itself, but for bytes."""
    return {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
