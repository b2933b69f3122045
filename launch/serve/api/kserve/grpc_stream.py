"""KServe's bidirectional stream: any number of requests at work at once, each with any number of responses."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from tritonclient.grpc import service_pb2

from launch.serve.admission.limits import PARSED_IN_LOOP_BYTES
from launch.serve.admission.refusals import HTTP_STATUS, Refusal
from launch.serve.api.kserve.grpc_messages import (
    FAILED,
    FINAL,
    WANTS_FINAL,
    Context,
    head,
    read_head,
    read_known_head,
    write_in_turns,
)
from launch.serve.api.kserve.requests import find_model
from launch.serve.api.kserve.runs import Run
from launch.serve.api.kserve.service import Begun, KServeService, Places
from launch.serve.http.bodies import Bodies
from launch.serve.http.connections import STALLED_SECONDS
from launch.serve.parsing.parsers import ParsedAnswer

MOST_AT_ONCE = 1024
"""Requests of one stream that are at work, or whose responses the client has not read: it is read no further then."""

_GONE_SECONDS = 5.0
"""Seconds for the library to cancel a call to whose client nothing can be written any more. A call that ends by itself
before would be told how it ended, which fails, and the library logs that as an error: a client could fill the log
so."""

logger = logging.getLogger(__name__)


class _ClientGoneError(Exception):
    """The client is gone and nothing can be written: the call is about to be cancelled."""


async def _write_responses(work: Run) -> AsyncIterator[tuple[Any, bool]]:
    """Messages of a request at work, each with whether it is the last."""
    async for response in work.responses():
        yield await write_in_turns(response), response.is_last


async def _read_responses(answer: ParsedAnswer) -> AsyncIterator[tuple[Any, bool]]:
    """Yield the one response of a request that is answered already."""
    yield service_pb2.ModelInferResponse.FromString(answer.content), True


class InferStream:
    """Requests of one stream: each has a task that writes what comes of it."""

    def __init__(
        self,
        service: KServeService,
        begin: Callable[[bytes, Any, Places], Awaitable[Begun]],
        bodies: Bodies,
        context: Context,
        places: Places,
    ) -> None:
        """Answer requests.

        Args:
            service: whose metrics count refusals.
            begin: has one begun, beside others of the stream, which it may stop.
            bodies: that hold what is read.
            context: of the call.
            places: of the stream's requests.
        """
        self._service = service
        self._begin = begin
        self._bodies = bodies
        self._context = context
        self._places = places
        self._writing = asyncio.Lock()
        self._room = asyncio.Semaphore(MOST_AT_ONCE)
        self._is_gone = False

    async def run(self, messages: AsyncIterator[Any]) -> None:
        """Answer all requests, until the client has sent its last one; a task that fails ends the stream."""
        async with asyncio.TaskGroup() as tasks:
            async for raw in messages:
                await self._room.acquire()
                tasks.create_task(self._answer(raw)).add_done_callback(lambda task: self._room.release())
        if self._is_gone:
            await asyncio.sleep(_GONE_SECONDS)

    async def _answer(self, raw: bytes) -> None:
        try:
            await self._answer_or_refuse(raw)
        except _ClientGoneError:
            self._is_gone = True

    async def _answer_or_refuse(self, raw: bytes) -> None:
        try:
            message = read_head(raw, PARSED_IN_LOOP_BYTES)
        except Refusal as refusal:
            await self._refuse(read_known_head(raw, PARSED_IN_LOOP_BYTES), refusal)
            return
        try:
            with self._places.take(message.id) as place, self._bodies.hold(len(raw)):
                work = (await self._begin(raw, message, self._places)).work
                if isinstance(work, ParsedAnswer):
                    await self._respond(message, _read_responses(work))
                    return
                place.fill(work.stop)
                try:
                    await self._respond(message, _write_responses(work))
                finally:
                    work.close()
                    work.let_go()
        except Refusal as refusal:
            await self._refuse(message, refusal)
        except (TimeoutError, _ClientGoneError):
            raise
        except Exception:
            logger.exception("a request of a stream failed")
            await self._write_error(message, FAILED)

    async def _respond(self, message: Any, responses: AsyncIterator[tuple[Any, bool]]) -> None:
        """Write the responses to a message, each with whether it is the last."""
        wants_final = message.parameters[WANTS_FINAL].bool_param if WANTS_FINAL in message.parameters else False
        async for told, is_last in responses:
            told.parameters[FINAL].bool_param = is_last and not wants_final
            await self._write(service_pb2.ModelStreamInferResponse(infer_response=told))
        if wants_final:
            told = head(find_model(message.model_name), message.id)
            told.parameters[FINAL].bool_param = True
            await self._write(service_pb2.ModelStreamInferResponse(infer_response=told))

    async def _refuse(self, message: Any, refusal: Refusal) -> None:
        self._service.frontend.metrics.count_refusal(HTTP_STATUS[refusal.kind])
        await self._write_error(message, str(refusal))

    async def _write_error(self, message: Any, line: str) -> None:
        told = service_pb2.ModelInferResponse(
            model_name=message.model_name, model_version=message.model_version, id=message.id
        )
        told.parameters[FINAL].bool_param = True
        await self._write(service_pb2.ModelStreamInferResponse(error_message=line, infer_response=told))

    async def _write(self, message: Any) -> None:
        """Write one response; a client that reads nothing for long is left.

        Raises:
            TimeoutError: it has read nothing.
            _ClientGoneError: it is gone.
        """
        async with self._writing, asyncio.timeout(STALLED_SECONDS):
            try:
                await self._context.write(message)
            except grpc.aio.BaseError as error:
                raise _ClientGoneError from error
