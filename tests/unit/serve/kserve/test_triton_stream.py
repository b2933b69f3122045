"""Triton's gRPC stream without a server: requests that are stopped before they are let in; and clients that vanish."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2

from launch.serve.admission.limits import PARSED_IN_LOOP_BYTES
from launch.serve.api.kserve import grpc_server
from launch.serve.api.kserve.grpc_messages import FINAL
from launch.serve.api.kserve.grpc_server import GrpcServer
from launch.serve.api.kserve.grpc_stream import InferStream
from launch.serve.api.kserve.models import DRAFT, MODELS
from launch.serve.api.kserve.requests import InferResponse
from launch.serve.api.kserve.service import NOTHING, Begun, Places
from launch.serve.http.bodies import Bodies
from launch.serve.metrics import FrontendMetrics
from trtrun.configuration.process_sections import ServerSection


class Work:
    """A request at work, that goes on until it is stopped."""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._stopped = asyncio.Event()
        self.is_closed = False

    async def whole(self) -> InferResponse:
        raise NotImplementedError

    async def responses(self) -> AsyncIterator[InferResponse]:
        await self._stopped.wait()
        yield InferResponse(MODELS[DRAFT], self._request_id)

    def stop(self) -> None:
        self._stopped.set()

    def close(self) -> None:
        self.is_closed = True

    def let_go(self) -> None:
        assert self.is_closed


class Context:
    """Keeps what is written."""

    def __init__(self) -> None:
        self.written: list[Any] = []

    async def write(self, message: Any) -> None:
        self.written.append(message)


async def requests(*request_ids: str) -> AsyncIterator[Any]:
    for request_id in request_ids:
        yield service_pb2.ModelInferRequest(model_name=DRAFT, id=request_id).SerializeToString()


def test_a_request_is_stopped_that_is_not_let_in_yet() -> None:
    async def work() -> None:
        context, works, is_let_in = Context(), [], asyncio.Event()

        async def begin(raw: bytes, message: Any, beside: Places) -> Begun:
            works.append(Work(message.id))
            found = works[-1]
            if len(works) == 1:
                await is_let_in.wait()
            else:  # stops those of its own id
                beside.stop(message.id)
                is_let_in.set()
            return Begun(NOTHING, found)

        service: Any = None  # asked for where requests are refused, which none is here
        await asyncio.wait_for(
            InferStream(service, begin, Bodies(1 << 20, 1 << 20), context, Places()).run(requests("a", "a")), 60
        )
        assert [told.infer_response.id for told in context.written] == ["a", "a"]
        assert all(found.is_closed for found in works)

    asyncio.run(work())


def test_a_message_that_is_none_ends_itself_alone() -> None:
    long = service_pb2.ModelInferRequest(model_name=DRAFT, id="long")
    long.parameters["x"].string_param = "y" * PARSED_IN_LOOP_BYTES
    refused = [b"\xff" * 10, b"\x0a" + b"\xff" * PARSED_IN_LOOP_BYTES, long.SerializeToString()]

    async def work() -> None:
        context, works, metrics = Context(), [], FrontendMetrics("m", 4)

        async def messages() -> AsyncIterator[bytes]:
            for raw in (*[each async for each in requests("a")], *refused):
                yield raw
            while len(context.written) < len(refused):
                await asyncio.sleep(0)
            works[0].stop()

        async def begin(raw: bytes, message: Any, beside: Places) -> Begun:
            works.append(Work(message.id))
            return Begun(NOTHING, works[-1])

        service: Any = SimpleNamespace(frontend=SimpleNamespace(metrics=metrics))
        stream = InferStream(service, begin, Bodies(1 << 20, 1 << 20), context, Places())
        await asyncio.wait_for(stream.run(messages()), 60)
        *errors, answer = context.written
        assert [told.infer_response.id for told in errors] == ["", "", "long"]
        assert all(told.infer_response.parameters[FINAL].bool_param for told in errors)
        assert ["no message" in told.error_message for told in errors] == [True, True, False]
        assert f"{PARSED_IN_LOOP_BYTES} bytes at most" in errors[-1].error_message
        assert answer.infer_response.id == "a" and not answer.error_message
        assert b'requests_refused_total{model_name="m",status="400"} 3' in metrics.render(None, None)

    asyncio.run(work())


class Servicer:
    """Answers no call, and sees it end."""

    def __init__(self) -> None:
        self.has_begun, self.has_ended = asyncio.Event(), asyncio.Event()

    def handler(self, name: str) -> Any:
        return self._serve

    async def _serve(self, messages: AsyncIterator[Any], context: Any) -> None:
        self.has_begun.set()
        try:
            async for _ in messages:
                pass
        finally:
            self.has_ended.set()


def test_a_call_ends_whose_client_has_vanished(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_server, "PING_SECONDS", 0.1)
    monkeypatch.setattr(grpc_server, "ANSWER_SECONDS", 0.1)

    async def work() -> None:
        is_silent = asyncio.Event()
        relays: list[asyncio.Task[Any] | None] = []

        async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while data := await reader.read(1 << 16):
                if not is_silent.is_set():
                    writer.write(data)
            writer.close()

        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            relays.append(asyncio.current_task())
            behind, before = await asyncio.open_connection("127.0.0.1", server.port)
            await asyncio.gather(pass_on(reader, before), pass_on(behind, writer))

        servicer: Any = Servicer()
        server = GrpcServer(servicer, ServerSection(grpc_port=0), FrontendMetrics("m", 4))
        serving = asyncio.create_task(server.run_here())
        between = await asyncio.start_server(relay, "127.0.0.1", 0)
        address = f"127.0.0.1:{between.sockets[0].getsockname()[1]}"
        async with grpc.aio.insecure_channel(address) as channel:
            stream = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")()
            await stream.write(b"")
            await asyncio.wait_for(servicer.has_begun.wait(), 60)
            is_silent.set()  # nothing is closed, and nothing comes any more
            await asyncio.wait_for(servicer.has_ended.wait(), 60)
        between.close()
        await asyncio.gather(*filter(None, relays))
        server.finish()
        await serving

    asyncio.run(work())


def test_a_connection_without_calls_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_server, "IDLE_SECONDS", 0.1)

    async def work() -> None:
        servicer: Any = Servicer()
        server = GrpcServer(servicer, ServerSection(grpc_port=0), FrontendMetrics("m", 4))
        serving = asyncio.create_task(server.run_here())
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)))  # and no settings
        await asyncio.wait_for(reader.read(), 60)
        writer.close()
        server.finish()
        await serving

    asyncio.run(work())


def test_a_call_whose_client_is_gone_waits_to_be_cancelled() -> None:
    """The library would tell the client how it ended, fail, and log a traceback."""

    class Gone(Context):
        async def write(self, message: Any) -> None:
            raise grpc.aio.UsageError("the call is over")

    async def work() -> None:
        works = []

        async def begin(raw: bytes, message: Any, beside: Places) -> Begun:
            works.append(Work(message.id))
            works[-1].stop()
            return Begun(NOTHING, works[-1])

        service: Any = None
        stream = InferStream(service, begin, Bodies(1 << 20, 1 << 20), Gone(), Places())
        call = asyncio.create_task(stream.run(requests("a")))
        while not (works and works[0].is_closed):
            await asyncio.sleep(0)
        for _ in range(20):
            await asyncio.sleep(0)
        assert not call.done()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    asyncio.run(work())


def test_clients_that_go_away_write_no_lines(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        servicer, metrics = Servicer(), FrontendMetrics("m", 4)
        server = GrpcServer(servicer, ServerSection(grpc_port=0), metrics)  # type: ignore[arg-type]
        library = logging.getLogger("grpc._cython.cygrpc")
        library.error("ExecuteBatchError raised in core by servicer method [%s]", "x")
        library.error("Unexpected [KeyError] raised by servicer method [x]")
        assert metrics.totals.num_calls_cut == 1
        server.finish()
        await server.run_here()

    asyncio.run(work())
    assert [record.getMessage() for record in caplog.records] == ["Unexpected [KeyError] raised by servicer method [x]"]
