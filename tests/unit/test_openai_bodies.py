"""Bodies of the OpenAI API on their way to the front: what is read beside the event loop."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
from fronts import NoEngine, WatchedTokenizer, make_front, request_of
from starlette.requests import Request

from launch.serve.aside import SHORT_BODY
from launch.serve.bodies import Bodies
from launch.serve.http_requests import Keys
from launch.serve.openai_api import OpenAIApi
from launch.serve.refusals import Kind, Refusal


def make_api() -> OpenAIApi:
    return OpenAIApi(make_front(WatchedTokenizer(), NoEngine()), None, Keys(()), Bodies(1 << 24, 1 << 24))


@pytest.mark.parametrize(
    ("endpoint", "reader"), [("completions", "read_completion"), ("chat_completions", "read_chat")]
)
@pytest.mark.parametrize("is_long", [False, True])
def test_long_bodies_are_read_beside_the_streams(
    endpoint: str, reader: str, is_long: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []

    def read(values: Any, model_name: str) -> None:
        threads.append(threading.get_ident())
        assert values.keys() == {"logit_bias"} and model_name == "m"
        raise Refusal(Kind.INVALID, "read")

    monkeypatch.setattr(f"launch.serve.openai_api.{reader}", read)
    bias = {str(token): 1 for token in range(SHORT_BODY // 5 if is_long else 5)}
    body = json.dumps({"logit_bias": bias}).encode()
    assert (len(body) > SHORT_BODY) is is_long
    endpoint_of: Callable[[Request], Any] = getattr(make_api(), endpoint)
    with pytest.raises(Refusal, match="read"):
        asyncio.run(endpoint_of(request_of(body)))
    assert [thread != threading.get_ident() for thread in threads] == [is_long]
