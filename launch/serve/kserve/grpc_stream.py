"""KServe's bidirectional stream: any number of requests at work at once, each with any number of responses.

It knows gRPC's streams and their messages. It does not know how a request is begun.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import suppress
from typing import Any

import grpc
from tritonclient.grpc import service_pb2

from launch.serve.bodies import Bodies
from launch.serve.connections import STALLED_SECONDS
from launch.serve.kserve.grpc_calls import FAILED, Context, check_message
from launch.serve.kserve.grpc_messages import FINAL, WANTS_FINAL, head, write_response
from launch.serve.kserve.requests import find_model
from launch.serve.kserve.service import Answering, KServeService, Stopping
from launch.serve.refusals import HTTP_STATUS, Refusal

MOST_AT_ONCE = 1024
"""Requests of one stream that are at work, or whose responses the client has not read: it is read no further then."""

logger = logging.getLogger(__name__)


class _ClientGoneError(Exception):
    """Nothing can be written any more: the call is about to be cancelled."""


class _Place:
    """A request's place among those of its stream, from the moment that it has come."""

    def __init__(self) -> None:
        self._work: Answering | None = None
        self._is_stopped = False

    def fill(self, work: Answering) -> None:
        """The request has been let in."""
        self._work = work
        if self._is_stopped:
            work.stop()

    def stop(self) -> None:
        """Its client wants no more of it, be it at work or not let in yet."""
        self._is_stopped = True
        if self._work is not None:
            self._work.stop()


class InferStream:
    """One stream's requests: each has a task that writes what comes of it."""

    def __init__(
        self,
        service: KServeService,
        begin: Callable[[Any, Mapping[str, Collection[Stopping]]], Awaitable[Answering]],
        bodies: Bodies,
        context: Context,
    ) -> None:
        self._service = service
        self._begin = begin
        self._bodies = bodies
        self._context = context
        self._places: defaultdict[str, set[_Place]] = defaultdict(set)
        self._writing = asyncio.Lock()
        self._room = asyncio.Semaphore(MOST_AT_ONCE)

    async def run(self, messages: AsyncIterator[Any]) -> None:
        """Answer all requests, until the client has sent its last one; a task that fails ends the stream."""
        async with asyncio.TaskGroup() as tasks:
            async for message in messages:
                check_message(message)
                await self._room.acquire()
                tasks.create_task(self._answer(message)).add_done_callback(lambda task: self._room.release())

    async def _answer(self, message: Any) -> None:
        with suppress(_ClientGoneError):
            await self._answer_or_refuse(message)

    async def _answer_or_refuse(self, message: Any) -> None:
        place = _Place()
        self._places[message.id].add(place)
        try:
            with self._bodies.hold(message.ByteSize()):
                work = await self._begin(message, self._places)
                place.fill(work)
                try:
                    await self._respond(message, work)
                finally:
                    work.close()
        except Refusal as refusal:
            self._service.front.metrics.count_refusal(HTTP_STATUS[refusal.kind])
            await self._write_error(message, str(refusal))
        except (TimeoutError, _ClientGoneError):
            raise
        except Exception:
            logger.exception("a request of a stream failed")
            await self._write_error(message, FAILED)
        finally:
            self._places[message.id].discard(place)
            if not self._places[message.id]:
                del self._places[message.id]

    async def _respond(self, message: Any, work: Answering) -> None:
        wants_final = message.parameters[WANTS_FINAL].bool_param if WANTS_FINAL in message.parameters else False
        async for response in work.responses():
            told = write_response(response)
            told.parameters[FINAL].bool_param = response.is_last and not wants_final
            await self._write(service_pb2.ModelStreamInferResponse(infer_response=told))
        if wants_final:
            told = head(find_model(message.model_name), message.id)
            told.parameters[FINAL].bool_param = True
            await self._write(service_pb2.ModelStreamInferResponse(infer_response=told))

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
