"""When a request's time begins: once its body is there, before it is read, whatever the protocol."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from fronts import NoEngine, WatchedTokenizer, make_frontend, request_of
from tritonclient.grpc import service_pb2

from launch.serve.admission.refusals import Refusal
from launch.serve.api.kserve import grpc_messages as forms
from launch.serve.api.kserve.grpc_servicer import KServeServicer
from launch.serve.api.kserve.http_api import KServeHttpApi
from launch.serve.api.kserve.service import KServeService
from launch.serve.api.openai import calls as openai_calls
from launch.serve.api.openai.api import OpenAIApi
from launch.serve.application import request_parser as reader
from launch.serve.frontend.frontend import Frontend
from launch.serve.http.bodies import Bodies
from launch.serve.http.requests import Keys
from launch.serve.parsing.parsers import ParsedAnswer

CHAT = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
TEXT = {"text_input": "x", "max_tokens": 5}
TENSORS = [
    {"name": "text_input", "datatype": "BYTES", "shape": [1, 1], "data": ["x"]},
    {"name": "max_tokens", "datatype": "INT32", "shape": [1, 1], "data": [5]},
]


def openai(frontend: Frontend) -> OpenAIApi:
    return OpenAIApi(frontend, Keys(()), Bodies(1 << 20, 1 << 20))


def kserve(frontend: Frontend) -> KServeService:
    return KServeService(frontend, 8, 16)


async def call(frontend: Frontend, endpoint: str) -> None:
    """Send one request, and wait for what comes of it."""
    body: dict[str, Any] = {"completions": {"model": "m", "prompt": "x"}, "chat_completions": CHAT, "generate": TEXT}
    if endpoint == "grpc":
        message = service_pb2.ModelInferRequest(model_name="ensemble")
        for given in TENSORS:
            tensor = message.inputs.add(name=given["name"], datatype=given["datatype"], shape=given["shape"])
            if given["datatype"] == "BYTES":
                tensor.contents.bytes_contents.append(b"x")
            else:
                tensor.contents.int_contents.append(5)
        servicer = KServeServicer(kserve(frontend), Keys(()), Bodies(1 << 20, 1 << 20))
        begun = await servicer._begin(message.SerializeToString(), message)
        assert not isinstance(begun.work, ParsedAnswer)
        try:
            await begun.work.whole()
        finally:
            begun.work.close()
        return
    api = (
        openai(frontend)
        if "completions" in endpoint
        else KServeHttpApi(kserve(frontend), Keys(()), Bodies(1 << 20, 1 << 20))
    )
    ask: Callable[[Any], Awaitable[object]] = getattr(api, endpoint)
    await ask(request_of(json.dumps(body.get(endpoint, {"inputs": TENSORS})).encode(), model="ensemble"))


@pytest.mark.parametrize(
    ("endpoint", "where", "slow"),
    [
        ("completions", reader, "read_completion"),
        ("chat_completions", reader, "read_chat"),
        ("chat_completions", openai_calls, "encode_text"),
        ("generate", forms, "read_generate"),
        ("generate", reader, "read_row_requests"),
        ("infer", forms, "read_infer"),
        ("grpc", forms, "read_tensors"),
    ],
)
def test_the_time_of_a_request_runs_from_its_body(
    endpoint: str, where: Any, slow: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr("time.perf_counter", lambda: now)
    work = getattr(where, slow)

    def take_long(*arguments: Any, **options: Any) -> Any:
        nonlocal now
        now += 61.0  # longer than a request may take
        return work(*arguments, **options)

    monkeypatch.setattr(where, slow, take_long)
    frontend = make_frontend(WatchedTokenizer(), NoEngine(), "{{ messages[0].content }}")
    with pytest.raises(Refusal, match="was not done within 60 s"):
        asyncio.run(asyncio.wait_for(call(frontend, endpoint), 30))
    assert now == 61.0 and frontend.admission.num_requests == 0
