"""Bodies of the OpenAI API on their way to the frontend: what is read beside the event loop."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
from engine_messages import delta_of, run
from fronts import TOKENIZER, NoEngine, WatchedTokenizer, make_frontend, request_of
from starlette.requests import Request

from launch.serve.admission.limits import PARSED_IN_LOOP_BYTES
from launch.serve.admission.refusals import Refusal
from launch.serve.api.openai.api import OpenAIApi
from launch.serve.engine.open_requests import EngineRequest, Inbox
from launch.serve.frontend.frontend import Frontend
from launch.serve.http.bodies import Bodies
from launch.serve.http.requests import Keys


class InboxEngine(NoEngine):
    """Keeps where its one request's deltas go."""

    inbox: Inbox | None = None

    def start(self, requests: Sequence[EngineRequest], inbox: Inbox) -> list[str]:
        self.inbox = inbox
        return super().start(requests, inbox)


def ask(endpoint: str, body: dict[str, Any], engine: NoEngine) -> tuple[list[str], Frontend]:
    """Send a request to whose completions nothing comes; returns which kinds of tasks were read elsewhere."""
    frontend = make_frontend(WatchedTokenizer(), engine, "{{ messages[0].content }}")
    api = OpenAIApi(frontend, Keys(()), Bodies(1 << 24, 1 << 24))
    endpoint_of: Callable[[Request], Awaitable[Any]] = getattr(api, endpoint)

    async def send() -> None:
        asking = asyncio.ensure_future(endpoint_of(request_of(json.dumps(body).encode())))
        while not asking.done() and not engine.requests:
            await asyncio.sleep(0)
        if asking.done():
            asking.result()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)

    asyncio.run(asyncio.wait_for(send(), 60))
    assert frontend.admission.num_requests == 0
    return [task.kind for task in frontend._parsers.tasks], frontend  # type: ignore[attr-defined]


@pytest.mark.parametrize("is_long", [False, True])
def test_a_long_completion_is_read_elsewhere_and_asks_for_the_same(is_long: bool) -> None:
    engine = NoEngine()
    body = {
        "prompt": ["def main(", "x"], "max_tokens": 7, "seed": 3, "stop": ["a", "b"], "bad_words": ["os"],
        "logit_bias": {"5": 1, "7": -2.5}, "stop_token_ids": [1, 2],
        "user": "u" * (PARSED_IN_LOOP_BYTES if is_long else 1),
    }  # fmt: skip
    kinds, _ = ask("completions", body, engine)
    assert kinds == (["completion"] if is_long else [])
    other = NoEngine()
    ask("completions", {**body, "user": ""}, other)
    assert [request.sampling for request in engine.requests] == [request.sampling for request in other.requests]
    tokens = [[list(request.prompt_token_ids) for request in found.requests] for found in (engine, other)]
    assert tokens[0] == tokens[1] and len(tokens[0]) == 2


@pytest.mark.parametrize("endpoint", ["completions", "chat_completions"])
def test_a_request_for_another_model_is_not_pending_and_counts_for_none(endpoint: str) -> None:
    body = {"model": "other", "prompt": "x"} if endpoint == "completions" else {"model": "other", "messages": []}
    frontend = make_frontend(WatchedTokenizer(), NoEngine(), "{{ messages[0].content }}")
    api = OpenAIApi(frontend, Keys(()), Bodies(1 << 24, 1 << 24))
    with pytest.raises(Refusal, match='there is no model "other"'):
        asyncio.run(getattr(api, endpoint)(request_of(json.dumps(body).encode())))
    totals = frontend.metrics.models.read("m")
    assert totals.num_pending == 0 and not totals.num_failures and not totals.num_successes


@pytest.mark.parametrize("streams", [False, True])
def test_a_request_is_pending_until_its_first_token(streams: bool) -> None:
    async def check() -> None:
        engine = InboxEngine()
        frontend = make_frontend(TOKENIZER, engine)
        api = OpenAIApi(frontend, Keys(()), Bodies(1 << 24, 1 << 24))

        async def answer() -> None:
            request = request_of(json.dumps({"prompt": [5], "stream": streams}).encode())

            async def send(message: Any) -> None:
                """What is sent is not looked at."""

            await (await api.completions(request))(request.scope, request.receive, send)

        answering = asyncio.create_task(answer())
        while engine.inbox is None:
            await asyncio.sleep(0)
        totals = frontend.metrics.models.read("m")
        assert totals.num_pending == 1
        engine.inbox.put(0, delta_of((7,)))
        while totals.num_pending and not answering.done():
            await asyncio.sleep(0)
        assert not answering.done() and totals.num_pending == 0
        engine.inbox.put(0, delta_of((8,), "length"))
        await answering
        assert totals.num_successes == 1 and totals.num_pending == 0

    run(check())


def test_a_chat_is_read_elsewhere_however_short_it_is() -> None:
    engine = NoEngine()
    kinds, frontend = ask("chat_completions", {"messages": [{"role": "user", "content": "def main("}]}, engine)
    assert kinds == ["chat"]
    assert list(engine.requests[0].prompt_token_ids) == frontend.tokenizer.encode("def main(", False)  # type: ignore[union-attr]


def test_a_prompt_that_is_too_long_is_refused_without_its_tokens() -> None:
    engine = NoEngine()
    length = engine.limits.max_prompt_length + 1
    with pytest.raises(Refusal, match=f"the prompt is too long: it has {length} tokens") as caught:
        ask("completions", {"prompt": [5] * length}, engine)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(Refusal, match="the prompt is too long") as caught:
        ask("chat_completions", {"messages": [{"role": "user", "content": "a " * length}]}, engine)
    assert (caught.value.code, caught.value.field) == ("context_length_exceeded", "messages")


def test_a_text_that_no_tokens_can_spell_is_refused_before_it_becomes_tokens() -> None:
    engine = NoEngine()
    tokenizer = WatchedTokenizer()
    assert tokenizer.most_bytes_of_a_token is not None
    length = engine.limits.max_prompt_length * tokenizer.most_bytes_of_a_token
    for kind, body in (
        ("completion", {"prompt": "x" * (length + 1)}),
        ("chat", {"messages": [{"role": "user", "content": "x" * (length + 1)}]}),
    ):
        frontend = make_frontend(tokenizer, engine, "{{ messages[0].content }}")
        with pytest.raises(Refusal, match=f"the prompt is too long: it has {length + 1} characters") as caught:
            asyncio.run(frontend.read(kind, json.dumps(body).encode(), time.perf_counter()))
        assert caught.value.code == "context_length_exceeded" and not tokenizer.threads


def test_a_chat_is_not_read_while_nobody_is_let_in() -> None:
    frontend = make_frontend(WatchedTokenizer(), NoEngine(), "{{ messages[0].content }}")
    frontend.admission.is_open = False
    with pytest.raises(Refusal, match="the engine is starting"):
        asyncio.run(frontend.read("chat", b"{}", time.perf_counter()))
    assert not frontend._parsers.tasks  # type: ignore[attr-defined]
