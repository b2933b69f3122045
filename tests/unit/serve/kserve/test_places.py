"""Who stops whose requests: those of one's own stream or connection, by id."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from tritonclient.grpc import service_pb2

from launch.serve.api.kserve import grpc_servicer, grpc_stream
from launch.serve.api.kserve.grpc_servicer import KServeServicer
from launch.serve.api.kserve.requests import InferResponse, find_model
from launch.serve.api.kserve.service import NOTHING, Begun, Places, PlacesByCaller
from launch.serve.http.bodies import Bodies


class Work:
    """A request that ends when it is stopped."""

    def __init__(self) -> None:
        self.stopped = asyncio.Event()

    def stop(self) -> None:
        self.stopped.set()

    async def whole(self) -> InferResponse:
        await self.stopped.wait()
        return InferResponse(find_model("tensorrt_llm"), "")

    async def responses(self) -> AsyncIterator[InferResponse]:
        yield await self.whole()

    def close(self) -> None:
        pass

    def let_go(self) -> None:
        pass


def test_requests_are_stopped_by_their_id_before_and_behind_the_door() -> None:
    places, early, late, other = Places(), Work(), Work(), Work()
    with places.take("a") as first, places.take("a") as second, places.take("b") as third:
        first.fill(early.stop)
        third.fill(other.stop)
        places.stop("a")
        places.stop("nobody's")
        second.fill(late.stop)
        assert early.stopped.is_set() and late.stopped.is_set() and not other.stopped.is_set()
    assert not len(places)


def test_callers_are_forgotten_with_their_last_request() -> None:
    callers = PlacesByCaller()
    with callers.of("x") as stream:
        with callers.of("x") as call, call.take("1"):
            pass
        with callers.of("x") as later:
            assert later is stream, "that has no request just now"
    with callers.of("x") as mine, mine.take("1"):
        with callers.of("x") as same, callers.of("y") as others:
            assert same is mine and others is not mine
        assert len(callers) == 1
    assert not len(callers)


def test_a_stream_stops_its_own_requests_and_its_connection_all() -> None:
    connection, mine, streamed, other = Places(), Work(), Work(), Work()
    stream = Places(connection)
    with connection.take("a") as first, stream.take("a") as second, Places(connection).take("a") as third:
        for place, work in ((first, mine), (second, streamed), (third, other)):
            place.fill(work.stop)
        stream.stop("a")
        assert streamed.stopped.is_set() and not mine.stopped.is_set() and not other.stopped.is_set()
        connection.stop("a")
        assert mine.stopped.is_set() and other.stopped.is_set()
    assert not len(connection) and not len(stream)


class Context:
    """Of calls of one connection, each with its message."""

    def __init__(self, peer: str, key: str = "", message: bytes = b"") -> None:
        self._peer, self._key, self._message = peer, key, message

    def with_message(self, message: Any) -> Context:
        return Context(self._peer, self._key, message.SerializeToString())

    def add_done_callback(self, callback: Any) -> None:
        pass

    async def read(self) -> bytes:
        return self._message

    async def write(self, message: Any) -> None:
        pass

    def peer(self) -> str:
        return self._peer

    def invocation_metadata(self) -> list[tuple[str, str]]:
        return [("authorization", self._key)] if self._key else []

    async def send_initial_metadata(self, pairs: Any) -> None:
        pass


async def messages_of(*messages: Any) -> AsyncIterator[bytes]:
    for message in messages:
        yield message.SerializeToString()


async def call_and_stop(monkeypatch: Any, mine: Context, theirs: Context, request_id: str, is_streamed: bool) -> bool:
    """Whether a request, of a call or of a stream, ends by a `stop` of its id that comes over another call."""
    work, begun = Work(), list[Work]()

    async def begin(self: Any, raw: bytes, message: Any, beside: Places | None) -> Begun:
        if message.inputs:
            if beside is not None:
                beside.stop(message.id)
            done = Work()
            done.stop()
            return Begun(NOTHING, done)
        begun.append(work)
        return Begun(NOTHING, work)

    monkeypatch.setattr(KServeServicer, "_begin", begin)

    async def write(response: Any) -> Any:
        return service_pb2.ModelInferResponse()

    monkeypatch.setattr(grpc_servicer, "write_in_turns", write)
    monkeypatch.setattr(grpc_stream, "write_in_turns", write)
    keys = SimpleNamespace(check_header=lambda header: None)
    bodies = Bodies(1 << 20, 1 << 20)
    servicer = KServeServicer(SimpleNamespace(frontend=SimpleNamespace(metrics=None)), keys, bodies)  # type: ignore[arg-type]
    asked = service_pb2.ModelInferRequest(id=request_id)
    if is_streamed:
        asking = asyncio.create_task(servicer.handler("ModelStreamInfer")(messages_of(asked), mine))
    else:
        asking = asyncio.create_task(servicer.handler("ModelInfer")(None, mine.with_message(asked)))
    while not begun:
        await asyncio.sleep(0)
    message = service_pb2.ModelInferRequest(id=request_id, inputs=[{"name": "stop"}])
    await servicer.handler("ModelInfer")(None, theirs.with_message(message))
    was_stopped = work.stopped.is_set()
    work.stop()
    await asking
    return was_stopped


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_request_is_stopped_by_a_call_of_its_connection_and_by_nobody_elses(
    monkeypatch: Any, is_streamed: bool
) -> None:
    mine = Context("ipv4:127.0.0.1:5", "k")
    for theirs, request_id, is_stopped in (
        (mine, "a", True),
        (Context("ipv4:127.0.0.1:6", "k"), "a", False),
        (Context("ipv4:127.0.0.1:5", "other"), "a", False),
        (mine, "", False),
    ):
        assert asyncio.run(call_and_stop(monkeypatch, mine, theirs, request_id, is_streamed)) is is_stopped
