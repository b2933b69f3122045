"""Long bodies are counted together, over real sockets: what is too much is told at once, and short ones get in."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Callable, Coroutine
from typing import Any

import grpc
import pytest
from engine_messages import run
from fronts import NoEngine, WatchedTokenizer, make_frontend
from tritonclient.grpc import service_pb2

from launch.serve.admission.refusals import Refusal
from launch.serve.api.kserve import grpc_servicer
from launch.serve.api.kserve.grpc_server import MESSAGE_OVERHEAD, MOST_MESSAGE_BYTES, GrpcServer, most_message_bytes
from launch.serve.api.kserve.grpc_servicer import KServeServicer
from launch.serve.api.kserve.http_api import KServeHttpApi
from launch.serve.api.kserve.service import KServeService
from launch.serve.api.openai.api import OpenAIApi
from launch.serve.application.addresses import listen
from launch.serve.application.http_server import HttpServer, make_application
from launch.serve.http.bodies import Bodies
from launch.serve.http.requests import Keys
from trtrun.configuration.config import make_config
from trtrun.configuration.process_sections import ServerSection
from trtrun.errors import ConfigError

MOST, TOGETHER = 300_000, 500_000
KEY = (("authorization", "Bearer secret"),)
Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Ports:
    """The APIs of a server without an engine, on real sockets."""

    def __init__(self, *keys: str) -> None:
        self.bodies = Bodies(MOST, TOGETHER)
        self.frontend = make_frontend(WatchedTokenizer(), NoEngine())
        service = KServeService(self.frontend, 8, 16)
        routes = OpenAIApi(self.frontend, Keys(()), self.bodies).routes()
        routes += KServeHttpApi(service, Keys(()), self.bodies).routes()
        self.listener = listen("127.0.0.1", 0, "server.http_port")
        self.http = HttpServer(make_application(self.frontend, routes), self.listener, ServerSection(), 64)
        servicer = KServeServicer(service, Keys(keys), self.bodies)
        self.grpc = GrpcServer(servicer, ServerSection(grpc_port=0), self.frontend.metrics)

    async def begin(self, headers: str, body: bytes = b"", path: str = "/v1/completions") -> Stream:
        """Send the head of a request, and some of its body."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.listener.port)
        writer.write(f"POST {path} HTTP/1.1\r\nHost: x\r\n{headers}\r\n\r\n".encode() + body)
        return reader, writer

    async def wait_counted(self, num_bytes: int) -> None:
        while self.bodies.num_bytes != num_bytes:
            await asyncio.sleep(0)


async def answer_of(stream: Stream) -> tuple[int, dict[str, str], Any]:
    """Status, headers and body of an answer."""
    head, *lines = (await stream[0].readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines if line)
    body = json.loads(await stream[0].readexactly(int(headers["content-length"])))
    stream[1].close()
    return int(head.split()[1]), headers, body


def with_ports(check: Callable[[Ports], Coroutine[Any, Any, None]]) -> None:
    async def work() -> None:
        ports = Ports()
        serving = asyncio.gather(ports.http.run_here(), ports.grpc.run_here())
        try:
            await check(ports)
        finally:
            ports.http.cut()
            ports.grpc.cut()
            await serving

    run(work())


def test_many_long_bodies_leave_room_for_short_ones_and_are_refused_in_one_line() -> None:
    async def check(ports: Ports) -> None:
        slow = [await ports.begin(f"Content-Length: {MOST}", b" " * 200_000) for _ in range(2)]
        await ports.wait_counted(400_000)
        # One that says how long it is need not send it.
        status, headers, body = await answer_of(await ports.begin("Content-Length: 200000"))
        assert (status, headers["retry-after"], body["error"]["code"]) == (429, "1", "too_many_bytes")
        assert body["error"]["message"] == (
            "with 200000 bytes of this request more would be read at once than the 500000 that may be "
            "(server.max_total_body_bytes): send the request again later"
        )
        chunk = b"186a0\r\n" + b" " * 100_000 + b"\r\n"
        status, headers, body = await answer_of(await ports.begin("Transfer-Encoding: chunked", chunk * 2))
        assert (status, body["error"]["code"]) == (429, "too_many_bytes")
        status, _, body = await answer_of(await ports.begin("Content-Length: 60000", b" " * 60_000))
        assert (status, body["error"]["code"]) == (400, "invalid_json"), "short ones are always read"
        await ports.wait_counted(400_000)
        slow[0][1].close()
        await ports.wait_counted(200_000)
        status, _, body = await answer_of(await ports.begin("Content-Length: 200000", b" " * 200_000))
        assert (status, body["error"]["code"]) == (400, "invalid_json")
        slow[1][1].write(b" " * 100_000)
        assert (await answer_of(slow[1]))[0] == 400
        await ports.wait_counted(0)

    with_ports(check)


def test_a_body_is_let_go_once_its_request_is_in_work() -> None:
    async def check(ports: Ports) -> None:
        body = json.dumps({"model": "m", "prompt": "x", "user": "y" * 100_000, "stream": True}).encode()
        reader, writer = await ports.begin(f"Content-Length: {len(body)}", body)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        assert ports.frontend.admission.num_requests == 1 and ports.bodies.num_bytes == 0
        writer.close()

    with_ports(check)


def test_what_is_compressed_counts_as_it_was_before() -> None:
    async def check(ports: Ports) -> None:
        packed = gzip.compress(b" " * 200_000)
        headers = f"Content-Encoding: gzip\r\nContent-Length: {len(packed)}"
        path = "/v2/models/ensemble/infer"
        with ports.bodies.hold(400_000):
            status, _, body = await answer_of(await ports.begin(headers, packed, path))
            assert status == 429 and "server.max_total_body_bytes" in body["error"]
        assert (await answer_of(await ports.begin(headers, packed, path)))[0] == 400
        await ports.wait_counted(0)

    with_ports(check)


@pytest.mark.parametrize("is_stream", [False, True])
def test_messages_of_grpc_count_too(is_stream: bool) -> None:
    async def check(ports: Ports) -> None:
        message = service_pb2.ModelInferRequest(model_name="ensemble", raw_input_contents=[b" " * 200_000])
        async with grpc.aio.insecure_channel(f"127.0.0.1:{ports.grpc.port}") as channel:
            with ports.bodies.hold(400_000):
                line = await refused(channel, message)
                assert "server.max_total_body_bytes" in line
            assert "server.max_total_body_bytes" not in await refused(channel, message)
        await ports.wait_counted(0)

    async def refused(channel: Any, message: Any) -> str:
        """What a call is told that is refused for one reason or another."""
        service = "/inference.GRPCInferenceService"
        if is_stream:
            call = channel.stream_stream(f"{service}/ModelStreamInfer")()
            await call.write(message.SerializeToString())
            told = service_pb2.ModelStreamInferResponse.FromString(await call.read())
            call.cancel()
            return str(told.error_message)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary(f"{service}/ModelInfer")(message.SerializeToString())
        if "server.max_total_body_bytes" in caught.value.details():
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert ("retry-after", "1") in list(caught.value.trailing_metadata())
        return str(caught.value.details())

    with_ports(check)


def test_a_message_of_grpc_is_no_longer_than_the_event_loop_may_copy() -> None:
    """Whatever `server.max_body_bytes` is: the library copies a message at a stretch."""

    async def check(ports: Ports) -> None:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{ports.grpc.port}") as channel:
            call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
            with pytest.raises(grpc.aio.AioRpcError, match="larger than max") as caught:
                await call(b" " * (MOST_MESSAGE_BYTES + MESSAGE_OVERHEAD + 1))
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(b" " * (MOST_MESSAGE_BYTES + MESSAGE_OVERHEAD))
            assert "larger than max" not in str(caught.value.details())

    assert ServerSection().max_body_bytes > MOST_MESSAGE_BYTES
    with_ports(check)
    assert most_message_bytes(ServerSection(max_body_bytes=20_000)) == 20_000 + MESSAGE_OVERHEAD


def test_all_bodies_together_may_be_as_long_as_one() -> None:
    bodies = Bodies(MOST, MOST)
    with bodies.hold(MOST) as held:
        for num_bytes in (MOST - 1, MOST):
            held.count(num_bytes)
        with pytest.raises(Refusal, match="max_total_body_bytes"):
            bodies.hold(70_000)
    held.let_go()
    assert bodies.num_bytes == 0
    sections = {"target": {"model": "asset:target", "devices": ["cpu:0"]}, "speculation": {"method": "none"}}
    with pytest.raises(ConfigError, match=r"must be at least server.max_body_bytes \(4096\), not 2048"):
        make_config(sections | {"server": {"max_body_bytes": 4096, "max_total_body_bytes": 2048}})


@pytest.mark.parametrize(
    ("name", "status"),
    [("ModelInfer", grpc.StatusCode.UNAUTHENTICATED), ("ServerLive", grpc.StatusCode.DEADLINE_EXCEEDED)],
)
def test_calls_whose_message_never_comes_do_not_stay(
    monkeypatch: pytest.MonkeyPatch, name: str, status: grpc.StatusCode
) -> None:
    """They are counted, and anybody may begin them: a key comes before the message, and the message has a time."""
    monkeypatch.setattr(grpc_servicer, "SPARE_SECONDS", 0.05)

    async def work() -> None:
        ports = Ports("secret")
        serving = asyncio.create_task(ports.grpc.run_here())
        async with grpc.aio.insecure_channel(f"127.0.0.1:{ports.grpc.port}") as channel:
            call = channel.stream_unary(f"/inference.GRPCInferenceService/{name}")()
            with pytest.raises(grpc.aio.AioRpcError) as told:
                await asyncio.wait_for(call, 60)
            assert told.value.code() == status
            ended = channel.stream_unary(f"/inference.GRPCInferenceService/{name}")(metadata=KEY)
            await ended.done_writing()
            with pytest.raises(grpc.aio.AioRpcError, match="the call has no message"):
                await asyncio.wait_for(ended, 60)
        ports.grpc.finish()
        await serving

    run(work())
