"""A server of chats in this process, on a made-up checkpoint that speculates: the real front, reader and engine behind
the real application, for OpenAI's own client. Only the sockets are left out."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import httpx
import openai
from checkpoints import make_checkpoint, make_tokenizer
from fronts import ParsersHere
from pipelines import configuration, noisy_copy
from starlette.applications import Starlette

from launch.serve.application import parts
from launch.serve.application.http_server import make_application
from launch.serve.engine.client import EngineClient
from launch.serve.engine.process import serve_frontend
from launch.serve.http.requests import Keys
from launch.serve.parsing.messages import Facts
from launch.serve.parsing.parsers import LoopParser
from trtrun import AsyncLLM
from trtrun.configuration.config import RuntimeConfig
from trtrun.start.job_spec import JobSpec
from trtrun.tokens.text import read_tokenizer

T = TypeVar("T")
MARKS = (
    "<tool_call>", "</tool_call>", "<think>", "</think>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]",
    "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>",
)  # fmt: skip
"""Special tokens of the checkpoint: texts lack them, unless they are asked for."""

PATIENCE = 120.0


class ServedParsers(ParsersHere):
    """Reads in this process, as a server's own readers are made."""

    def __init__(self, facts: Facts, most_body_bytes: int, in_loop: LoopParser) -> None:
        super().__init__(facts, None if facts.tokenizer is None else read_tokenizer(Path(facts.tokenizer)))


class ChatServer:
    """One engine, and an application for each chat template that is asked for."""

    def __init__(self, config: RuntimeConfig) -> None:
        self._config = config
        self._engine = EngineClient()
        self._loop = asyncio.new_event_loop()
        self._applications: dict[str, Starlette] = {}

    @contextmanager
    def running(self) -> Iterator[ChatServer]:
        """With its event loop in a thread of its own, and the engine loaded."""
        thread = threading.Thread(target=self._loop.run_forever)
        thread.start()
        try:
            with AsyncLLM.open(self._config) as llm:  # type: ignore[union-attr]
                serving = asyncio.run_coroutine_threadsafe(self._serve(llm), self._loop)
                self.run(self._wait_ready())
                yield self
                self._loop.call_soon_threadsafe(self._engine.close)
                serving.result(PATIENCE)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            thread.join(PATIENCE)
            self._loop.close()

    async def _serve(self, llm: AsyncLLM) -> None:
        fronts, own = socket.socketpair()
        hearing = asyncio.create_task(self._engine.serve(*await asyncio.open_unix_connection(sock=fronts)))
        await serve_frontend(llm, own)
        await hearing

    async def _wait_ready(self) -> None:
        while self._engine.limits is None:
            await asyncio.sleep(0)

    def run(self, work: Awaitable[T]) -> T:
        """Do something in the event loop."""

        async def bounded() -> T:
            return await asyncio.wait_for(work, PATIENCE)

        return asyncio.run_coroutine_threadsafe(bounded(), self._loop).result(PATIENCE + 10)

    def token_of(self, text: str) -> int:
        """The token of a letter."""
        tokenizer = read_tokenizer(self._config.target.model)
        assert tokenizer is not None
        (token,) = tokenizer.encode(text)
        return token

    def application(self, template: str, **section: Any) -> Starlette:
        """The application for a chat template, and keys of the server's section."""
        key = f"{template}{section}"
        if key not in self._applications:
            (self._config.target.model / "chat_template.jinja").write_text(template, encoding="utf-8")
            changed = self._config.model_copy(update={"server": self._config.server.model_copy(update=section)})
            with mock.patch.object(parts, "Parsers", ServedParsers):
                made = parts.make_parts(JobSpec(changed), Keys(()), self._engine)
            made.frontend.admission.is_open = True
            self._applications[key] = make_application(made.frontend, made.routes)
        return self._applications[key]

    def ask(self, template: str, work: Callable[[openai.AsyncOpenAI], Awaitable[T]], **section: Any) -> T:
        """Let OpenAI's own client work with a server of a template."""

        async def do() -> T:
            transport = httpx.ASGITransport(self.application(template, **section))  # type: ignore[arg-type]
            async with openai.AsyncOpenAI(
                base_url="http://here/v1",
                api_key="-",
                max_retries=0,
                http_client=httpx.AsyncClient(transport=transport),
            ) as client:
                return await work(client)

        return self.run(do())


def make_chat_server(folder: Path, **settings: Any) -> ChatServer:
    """On a random checkpoint of bytes, pairs of letters and marks, made in `folder`, and a draft near it."""
    vocabulary = 257 + 26 + len(MARKS)
    make_checkpoint(
        folder / "target", seed=1, vocab_size=vocabulary, eos_token_id=0, max_position_embeddings=8192, scale=0.5
    )
    make_tokenizer(folder / "target", merges=26, special=MARKS)
    noisy_copy(folder / "draft", folder / "target", 0.05)
    values: dict[str, Any] = {
        "scheduler": {"max_batch_size": 8},
        "speculation": {"draft_len": 4},
        "kv_cache": {"max_tokens": 32768},
        "server": {"model_name": "chat"},
    }
    return ChatServer(configuration(folder / "target", folder / "draft", **{**values, **settings}))
