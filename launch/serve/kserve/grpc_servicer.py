"""KServe's protocol over gRPC: its calls, with the service of tritonclient's protocol files, and errors as statuses.

A call reads as it works: message → tensors → a run → messages. A client that cancels, or goes away, cancels its call,
which lets its rows go. It knows gRPC, and nothing of engines.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from launch.serve.connections import STALLED_SECONDS
from launch.serve.http_requests import REQUEST_ID, Keys, aside
from launch.serve.kserve.grpc_messages import (
    FINAL,
    WANTS_FINAL,
    head,
    read_outputs,
    read_tensors,
    write_config,
    write_metadata,
    write_response,
    write_statistics,
)
from launch.serve.kserve.models import MODELS
from launch.serve.kserve.requests import find_model
from launch.serve.kserve.service import Answering, KServeService
from launch.serve.refusals import HTTP_STATUS, Kind, Refusal

_STATUS: Mapping[Kind, grpc.StatusCode] = {
    Kind.INVALID: grpc.StatusCode.INVALID_ARGUMENT,
    Kind.UNAUTHORIZED: grpc.StatusCode.UNAUTHENTICATED,
    Kind.UNKNOWN_MODEL: grpc.StatusCode.NOT_FOUND,
    Kind.TOO_LARGE: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Kind.BUSY: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Kind.FAILED: grpc.StatusCode.INTERNAL,
    Kind.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    Kind.GONE: grpc.StatusCode.CANCELLED,
    Kind.TIMEOUT: grpc.StatusCode.DEADLINE_EXCEEDED,
}

MOST_AT_ONCE = 1024
"""Requests of one stream that are at work, or whose responses the client has not read: it is read no further then."""

FAILED = "the server failed; its log says how"

logger = logging.getLogger(__name__)

Context = Any  # grpc.aio.ServicerContext, whose types the library does not tell
Handler = Callable[["KServeServicer", Any, Context], Awaitable[Any]]


def _call(needs_key: bool = True) -> Callable[[Handler], Handler]:
    """What every call with one response goes through: an id, a key, its log line, and errors as statuses."""

    def wrap(handler: Handler) -> Handler:
        async def checked(servicer: KServeServicer, message: Any, context: Context) -> Any:
            async with servicer.observing(context, handler.__name__, needs_key):
                return await handler(servicer, message, context)

        checked.__name__, checked.__doc__ = handler.__name__, handler.__doc__
        return checked

    return wrap


class KServeServicer(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """The calls. Their names are the protocol's."""

    def __init__(self, service: KServeService, keys: Keys) -> None:
        self._service = service
        self._keys = keys

    def observing(self, context: Context, name: str, needs_key: bool = True) -> _Observed:
        """What a call happens within."""
        return _Observed(self._service, self._keys if needs_key else None, context, name)

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
    async def RepositoryModelLoad(self, message: Any, context: Context) -> Any:
        """Refused: the models are the job's."""
        raise _fixed_models(message.model_name)

    @_call()
    async def RepositoryModelUnload(self, message: Any, context: Context) -> Any:
        """Refused: the models are the job's."""
        raise _fixed_models(message.model_name)

    @_call()
    async def SystemSharedMemoryStatus(self, message: Any, context: Context) -> Any:
        """No regions."""
        return service_pb2.SystemSharedMemoryStatusResponse()

    @_call()
    async def SystemSharedMemoryUnregister(self, message: Any, context: Context) -> Any:
        """There is nothing to unregister."""
        return service_pb2.SystemSharedMemoryUnregisterResponse()

    @_call()
    async def SystemSharedMemoryRegister(self, message: Any, context: Context) -> Any:
        """Refused."""
        raise _no_shared_memory()

    @_call()
    async def CudaSharedMemoryStatus(self, message: Any, context: Context) -> Any:
        """No regions."""
        return service_pb2.CudaSharedMemoryStatusResponse()

    @_call()
    async def CudaSharedMemoryUnregister(self, message: Any, context: Context) -> Any:
        """There is nothing to unregister."""
        return service_pb2.CudaSharedMemoryUnregisterResponse()

    @_call()
    async def CudaSharedMemoryRegister(self, message: Any, context: Context) -> Any:
        """Refused."""
        raise _no_shared_memory()

    @_call()
    async def TraceSetting(self, message: Any, context: Context) -> Any:
        """Refused."""
        raise Refusal(Kind.INVALID, "there are no traces of single requests here")

    @_call()
    async def LogSettings(self, message: Any, context: Context) -> Any:
        """Refused."""
        raise Refusal(Kind.INVALID, "the log's settings are the server's options: see -v and --log-dir")

    @_call()
    async def ModelInfer(self, message: Any, context: Context) -> Any:
        """Tensors in, tensors out."""
        work = await self._begin(message)
        try:
            return write_response(await work.whole())
        finally:
            work.close()

    async def ModelStreamInfer(self, messages: AsyncIterator[Any], context: Context) -> None:
        """Requests as they come, all at work at once, and responses as they come. An error ends its request alone."""
        async with self.observing(context, "ModelStreamInfer"):
            await _Stream(self._service, self._begin, context).run(messages)

    async def _begin(self, message: Any) -> Answering:
        model = find_model(message.model_name, message.model_version)
        tensors = await aside(message.ByteSize(), read_tensors, message)
        return await self._service.begin(model, message.id, tensors, read_outputs(message))


class _Stream:
    """One stream's requests: each has a task that writes what comes of it."""

    def __init__(self, service: KServeService, begin: Callable[[Any], Awaitable[Answering]], context: Context) -> None:
        self._service = service
        self._begin = begin
        self._context = context
        self._writing = asyncio.Lock()
        self._room = asyncio.Semaphore(MOST_AT_ONCE)

    async def run(self, messages: AsyncIterator[Any]) -> None:
        """Answer all requests, until the client has sent its last one; a task that fails ends the stream."""
        async with asyncio.TaskGroup() as tasks:
            async for message in messages:
                await self._room.acquire()
                tasks.create_task(self._answer(message)).add_done_callback(lambda task: self._room.release())

    async def _answer(self, message: Any) -> None:
        try:
            work = await self._begin(message)
            try:
                await self._respond(message, work)
            finally:
                work.close()
        except Refusal as refusal:
            self._service.front.metrics.count_refusal(HTTP_STATUS[refusal.kind])
            await self._write_error(message, str(refusal))
        except (TimeoutError, grpc.RpcError):
            raise
        except Exception:
            logger.exception("a request of a stream failed")
            await self._write_error(message, FAILED)

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
        """Write one response; a client that reads nothing for long is left."""
        async with self._writing, asyncio.timeout(STALLED_SECONDS):
            await self._context.write(message)


class _Observed:
    """What a call happens within: its id, key and log line, nothing of its content; errors become its status."""

    def __init__(self, service: KServeService, keys: Keys | None, context: Context, name: str) -> None:
        self._service = service
        self._keys = keys
        self._context = context
        self._name = name
        self._began = time.perf_counter()
        self._request_id = ""
        self._status = grpc.StatusCode.OK

    async def __aenter__(self) -> None:
        sent = {key: value for key, value in self._context.invocation_metadata() or () if isinstance(value, str)}
        given = sent.get(REQUEST_ID, "")
        self._request_id = given if 0 < len(given) <= 128 and given.isprintable() else uuid.uuid4().hex
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
            self._service.front.metrics.count_refusal(500)
            await self._abort(grpc.StatusCode.INTERNAL, FAILED)
        self._log()

    async def _refuse(self, refusal: Refusal) -> None:
        self._service.front.metrics.count_refusal(HTTP_STATUS[refusal.kind])
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


def _fixed_models(name: str) -> Refusal:
    model = find_model(name)
    return Refusal(
        Kind.INVALID, f"{model.name} is one of the job's models: they are not loaded or unloaded by requests"
    )


def _no_shared_memory() -> Refusal:
    return Refusal(Kind.INVALID, "there is no shared memory here: send tensors in the request")
