"""KServe's protocol over gRPC: its calls, with the service of tritonclient's protocol files; and what every call
happens within: an id, a key, a log line, and errors as statuses.

A call reads as it works: message → tensors → a run → messages. A client that cancels, or goes away, cancels its call,
which lets its rows go.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import grpc
from tritonclient.grpc import service_pb2

from launch.serve.admission.control import OWNER, owner_of_address
from launch.serve.admission.limits import PARSED_IN_LOOP_BYTES
from launch.serve.admission.refusals import HTTP_STATUS, Kind, Refusal
from launch.serve.api.kserve.grpc_messages import (
    CALL,
    FAILED,
    Context,
    Sent,
    no_message,
    read_head,
    write_config,
    write_in_turns,
    write_metadata,
    write_statistics,
)
from launch.serve.api.kserve.grpc_stream import InferStream
from launch.serve.api.kserve.models import MODELS, Model
from launch.serve.api.kserve.requests import find_model, fixed_models, no_shared_memory
from launch.serve.api.kserve.service import Begun, KServeService, Places, PlacesByCaller
from launch.serve.api.kserve.tensors import MOST_WHOLE_BYTES
from launch.serve.http.bodies import BODY_SECONDS, Bodies
from launch.serve.http.connections import SPARE_SECONDS, STALLED_SECONDS
from launch.serve.http.requests import REQUEST_ID, Keys, choose_id
from launch.serve.metrics import FrontendMetrics
from launch.serve.parsing.parsers import ParsedAnswer

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

logger = logging.getLogger(__name__)


class ObservedCall:
    """What one call happens within. Its log line has nothing of its content."""

    def __init__(self, metrics: FrontendMetrics, keys: Keys | None, context: Context, name: str) -> None:
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
        OWNER.set(owner_of_address(self._context.peer()))
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
    """The name of a caller: the connection, and the key, as a proxy may bring calls of several clients through one
    connection."""
    return context.peer(), _texts_of(context).get("authorization", "")


def _texts_of(context: Context) -> dict[str, str]:
    """What a call says of itself, but for bytes."""
    return {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}


Handler = Callable[..., Awaitable[Any]]


@dataclass(frozen=True)
class SimpleCall:
    """A call whose answer is there at once.

    Attributes:
        answer: of the service, to a message; a Refusal if the call is refused.
        needs_key: whether a key is asked for, where the server has keys.
    """

    answer: Callable[[KServeService, Any], Any]
    needs_key: bool = True


def _asked_models(message: Any) -> list[Model]:
    return [find_model(message.name, message.version)] if message.name else list(MODELS.values())


SIMPLE_CALLS: Mapping[str, SimpleCall] = {
    "ServerLive": SimpleCall(lambda service, message: service_pb2.ServerLiveResponse(live=True), needs_key=False),
    "ServerReady": SimpleCall(
        lambda service, message: service_pb2.ServerReadyResponse(ready=service.is_ready()), needs_key=False
    ),
    "ModelReady": SimpleCall(
        lambda service, message: service_pb2.ModelReadyResponse(
            ready=service.is_ready(find_model(message.name, message.version))
        )
    ),
    "ServerMetadata": SimpleCall(
        lambda service, message: service_pb2.ServerMetadataResponse(**service.server_metadata())
    ),
    "ModelMetadata": SimpleCall(lambda service, message: write_metadata(find_model(message.name, message.version))),
    "ModelConfig": SimpleCall(
        lambda service, message: write_config(find_model(message.name, message.version), service.max_batch_size)
    ),
    "ModelStatistics": SimpleCall(
        lambda service, message: write_statistics(service.statistics(_asked_models(message)))
    ),
    "RepositoryIndex": SimpleCall(
        lambda service, message: service_pb2.RepositoryIndexResponse(
            models=[service_pb2.RepositoryIndexResponse.ModelIndex(**item) for item in service.index(message.ready)]
        )
    ),
    "RepositoryModelLoad": SimpleCall(lambda service, message: fixed_models(message.model_name)),
    "RepositoryModelUnload": SimpleCall(lambda service, message: fixed_models(message.model_name)),
    # There are no regions of shared memory, so there is nothing to unregister.
    "SystemSharedMemoryRegister": SimpleCall(lambda service, message: no_shared_memory()),
    "SystemSharedMemoryStatus": SimpleCall(lambda service, message: service_pb2.SystemSharedMemoryStatusResponse()),
    "SystemSharedMemoryUnregister": SimpleCall(
        lambda service, message: service_pb2.SystemSharedMemoryUnregisterResponse()
    ),
    "CudaSharedMemoryRegister": SimpleCall(lambda service, message: no_shared_memory()),
    "CudaSharedMemoryStatus": SimpleCall(lambda service, message: service_pb2.CudaSharedMemoryStatusResponse()),
    "CudaSharedMemoryUnregister": SimpleCall(lambda service, message: service_pb2.CudaSharedMemoryUnregisterResponse()),
    "TraceSetting": SimpleCall(
        lambda service, message: Refusal(Kind.INVALID, "there are no traces of single requests here")
    ),
    "LogSettings": SimpleCall(
        lambda service, message: Refusal(
            Kind.INVALID, "the log's settings are the server's options: see -v and --log-dir"
        )
    ),
}
"""All calls but those for inference, by their names in the protocol."""


class KServeServicer:
    """Handles the protocol's calls."""

    def __init__(self, service: KServeService, keys: Keys, bodies: Bodies) -> None:
        self._service = service
        self._keys = keys
        self._bodies = bodies
        self._callers = PlacesByCaller()

    def observing(self, context: Context, name: str, needs_key: bool = True) -> ObservedCall:
        """What a call happens within."""
        return ObservedCall(self._service.frontend.metrics, self._keys if needs_key else None, context, name)

    def handler(self, name: str) -> Handler:
        """The handler of the call of this name in the protocol."""
        if name == "ModelStreamInfer":
            return self._stream
        simple = None if name == "ModelInfer" else SIMPLE_CALLS[name]
        needs_key = simple is None or simple.needs_key

        async def handle(messages: Any, context: Context) -> Any:
            async with self.observing(context, name, needs_key):
                # It is asked for behind the key, and has its time: calls are counted, and strangers may begin some.
                message = await read_message(context, BODY_SECONDS if needs_key else SPARE_SECONDS)
                if simple is None:
                    return await self._infer(message, context)
                told = simple.answer(self._service, message)
                if isinstance(told, Refusal):
                    raise told
                return told

        return handle

    async def _infer(self, message: Any, context: Context) -> Any:
        """Answer a request for inference; messages are bytes."""
        head = read_head(message, PARSED_IN_LOOP_BYTES)
        with (
            self._callers.of(caller_of(context)) as places,
            places.take(head.id) as place,
            self._bodies.hold(len(message)),
        ):
            work = (await self._begin(message, head, places if head.id else None)).work
            if isinstance(work, ParsedAnswer):
                return work.content
            place.fill(work.stop)
            context.add_done_callback(lambda _: work.let_go())  # its answer is sent then
            try:
                told = await write_in_turns(await work.whole())
            except BaseException:
                work.let_go()
                raise
            finally:
                work.close()
        if told.ByteSize() > MOST_WHOLE_BYTES:
            return await asyncio.to_thread(told.SerializeToString)
        await asyncio.sleep(0)  # it may be long
        return told.SerializeToString()

    async def _stream(self, messages: AsyncIterator[Any], context: Context) -> None:
        """Answer the requests of a stream as they come, all at once. An error ends its request alone."""
        async with self.observing(context, "ModelStreamInfer"):
            with self._callers.of(caller_of(context)) as others:
                await InferStream(self._service, self._begin, self._bodies, context, Places(others)).run(messages)

    async def _begin(self, raw: bytes, head: Any, beside: Places | None = None) -> Begun:
        arrived = time.perf_counter()
        model = find_model(head.model_name, head.model_version)
        return await self._service.begin(Sent(CALL, model, raw), arrived, beside)
