"""KServe's protocol over gRPC: its calls, with the service of tritonclient's protocol files, and errors as statuses.

A call reads as it works: message → tensors → a run → messages. A client that cancels, or goes away, cancels its call,
which lets its rows go. It knows gRPC, and nothing of engines.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from tritonclient.grpc import service_pb2

from launch.serve.door.counts import READ_HERE
from launch.serve.door.refusals import Kind, Refusal
from launch.serve.http.bodies import BODY_SECONDS, Bodies
from launch.serve.http.connections import SPARE_SECONDS
from launch.serve.http.requests import Keys
from launch.serve.kserve.grpc_calls import Context, ObservedCall, caller_of, read_message
from launch.serve.kserve.grpc_messages import (
    CALL,
    Sent,
    read_head,
    write_config,
    write_metadata,
    write_response,
    write_statistics,
)
from launch.serve.kserve.grpc_stream import InferStream
from launch.serve.kserve.models import MODELS
from launch.serve.kserve.places import Places, PlacesByCaller
from launch.serve.kserve.requests import find_model, fixed_models, no_shared_memory
from launch.serve.kserve.service import Begun, KServeService
from launch.serve.reading.readers import ReadAnswer

Handler = Callable[..., Awaitable[Any]]

STUBS: Mapping[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("RepositoryModelLoad", "RepositoryModelUnload"), lambda message: fixed_models(message.model_name)),
    **dict.fromkeys(("SystemSharedMemoryRegister", "CudaSharedMemoryRegister"), lambda message: no_shared_memory()),
    "SystemSharedMemoryStatus": lambda message: service_pb2.SystemSharedMemoryStatusResponse(),
    "SystemSharedMemoryUnregister": lambda message: service_pb2.SystemSharedMemoryUnregisterResponse(),
    "CudaSharedMemoryStatus": lambda message: service_pb2.CudaSharedMemoryStatusResponse(),
    "CudaSharedMemoryUnregister": lambda message: service_pb2.CudaSharedMemoryUnregisterResponse(),
    "TraceSetting": lambda message: Refusal(Kind.INVALID, "there are no traces of single requests here"),
    "LogSettings": lambda message: Refusal(
        Kind.INVALID, "the log's settings are the server's options: see -v and --log-dir"
    ),
}
"""Calls for what there is not: what each is told, or why it is refused. There are no regions of shared memory, so there
is nothing to unregister."""


def _call(needs_key: bool = True) -> Callable[[Handler], Handler]:
    """What every call with one response goes through: an id, a key, its log line, and errors as statuses.

    Its one message is asked for behind the key, and has its time: calls are counted, and strangers may begin some.
    """

    def wrap(handler: Handler) -> Handler:
        async def checked(servicer: KServeServicer, messages: Any, context: Context) -> Any:
            async with servicer.observing(context, handler.__name__, needs_key):
                message = await read_message(context, BODY_SECONDS if needs_key else SPARE_SECONDS)
                return await handler(servicer, message, context)

        checked.__name__, checked.__doc__ = handler.__name__, handler.__doc__
        return checked

    return wrap


class KServeServicer:
    """The calls. Their names are the protocol's."""

    def __init__(self, service: KServeService, keys: Keys, bodies: Bodies) -> None:
        self._service = service
        self._keys = keys
        self._bodies = bodies
        self._callers = PlacesByCaller()

    def observing(self, context: Context, name: str, needs_key: bool = True) -> ObservedCall:
        """What a call happens within."""
        return ObservedCall(self._service.front.metrics, self._keys if needs_key else None, context, name)

    def handler(self, name: str) -> Handler:
        """The call of this name in the protocol."""
        if name not in STUBS:
            found: Handler = getattr(self, name)
            return found

        async def stub(servicer: KServeServicer, message: Any, context: Context) -> Any:
            told = STUBS[name](message)
            if isinstance(told, Refusal):
                raise told
            return told

        stub.__name__ = name
        return partial(_call()(stub), self)

    @_call(needs_key=False)
    async def ServerLive(self, message: Any, context: Context) -> Any:
        """Whether there is a server."""
        return service_pb2.ServerLiveResponse(live=True)

    @_call(needs_key=False)
    async def ServerReady(self, message: Any, context: Context) -> Any:
        """Whether requests are answered."""
        return service_pb2.ServerReadyResponse(ready=self._service.is_ready())

    @_call(needs_key=False)
    async def ModelReady(self, message: Any, context: Context) -> Any:
        """Whether requests for a model are answered."""
        ready = self._service.is_ready(find_model(message.name, message.version))
        return service_pb2.ModelReadyResponse(ready=ready)

    @_call()
    async def ServerMetadata(self, message: Any, context: Context) -> Any:
        """Name, version and extensions."""
        return service_pb2.ServerMetadataResponse(**self._service.server_metadata())

    @_call()
    async def ModelMetadata(self, message: Any, context: Context) -> Any:
        """A model's inputs and outputs."""
        return write_metadata(find_model(message.name, message.version))

    @_call()
    async def ModelConfig(self, message: Any, context: Context) -> Any:
        """The same as Triton's configuration has them."""
        return write_config(find_model(message.name, message.version), self._service.max_batch_size)

    @_call()
    async def ModelStatistics(self, message: Any, context: Context) -> Any:
        """Of one model, or of all."""
        models = [find_model(message.name, message.version)] if message.name else list(MODELS.values())
        return write_statistics(self._service.statistics(models))

    @_call()
    async def RepositoryIndex(self, message: Any, context: Context) -> Any:
        """The models and their states."""
        return service_pb2.RepositoryIndexResponse(
            models=[
                service_pb2.RepositoryIndexResponse.ModelIndex(**item) for item in self._service.index(message.ready)
            ]
        )

    @_call()
    async def ModelInfer(self, message: Any, context: Context) -> Any:
        """Tensors in, tensors out: bytes of both messages."""
        head = read_head(message, READ_HERE)
        with (
            self._callers.of(caller_of(context)) as places,
            places.take(head.id) as place,
            self._bodies.hold(len(message)),
        ):
            work = (await self._begin(message, head, places if head.id else None)).work
            if isinstance(work, ReadAnswer):
                return work.content
            place.fill(work.stop)
            try:
                told = write_response(await work.whole())
            finally:
                work.close()
        await asyncio.sleep(0)  # it may be long
        return told.SerializeToString()

    async def ModelStreamInfer(self, messages: AsyncIterator[Any], context: Context) -> None:
        """Requests as they come, all at work at once, and responses as they come. An error ends its request alone."""
        async with self.observing(context, "ModelStreamInfer"):
            with self._callers.of(caller_of(context)) as others:
                await InferStream(self._service, self._begin, self._bodies, context, Places(others)).run(messages)

    async def _begin(self, raw: bytes, head: Any, beside: Places | None = None) -> Begun:
        arrived = time.perf_counter()
        model = find_model(head.model_name, head.model_version)
        return await self._service.begin(Sent(CALL, model, raw), arrived, beside)
