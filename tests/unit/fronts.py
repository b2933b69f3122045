"""A frontend without an engine: what comes to it is read, checked and let in, and nothing is generated."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable, Sequence
from typing import Any

from starlette.requests import Request
from starlette.types import Message

from launch.serve.admission.control import AdmissionControl
from launch.serve.application.request_parser import RequestParser
from launch.serve.engine.client import EngineClient
from launch.serve.engine.open_requests import EngineRequest, Inbox
from launch.serve.frontend.frontend import Frontend, RequestOptions, ServedModel
from launch.serve.metrics import FrontendMetrics
from launch.serve.parsing.messages import HEAD_BYTES, Facts, Reply, Task, pack, unpack
from launch.serve.parsing.parsers import Parsed, Parsers, parsed_of
from trtrun.api.prompts import PromptReader
from trtrun.configuration.model_paths import ASSETS
from trtrun.models.config import read_model_config
from trtrun.scheduling.limits import SchedulerLimits
from trtrun.tokens.text import read_tokenizer

TOKENIZER = read_tokenizer(ASSETS / "target")


class WatchedTokenizer:
    """Keeps which threads make tokens, and what of."""

    def __init__(self) -> None:
        self.threads: list[int] = []
        self.words: list[Sequence[str]] = []

    most_bytes_of_a_token = TOKENIZER.most_bytes_of_a_token if TOKENIZER is not None else None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        assert TOKENIZER is not None
        self.threads.append(threading.get_ident())
        return TOKENIZER.encode(text, add_special_tokens)

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        assert TOKENIZER is not None
        self.threads += [threading.get_ident()] * len(texts)
        return TOKENIZER.encode_all(texts)

    def bad_word_ids(self, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        assert TOKENIZER is not None
        self.threads.append(threading.get_ident())
        self.words.append(tuple(words))
        return TOKENIZER.bad_word_ids(self.words[-1])


class NoEngine(EngineClient):
    """Takes requests, and nothing comes of them.

    Attributes:
        requests: so far.
        starts: for each start whether it came in the turn of the event loop of the first: those are sent as one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.limits = SchedulerLimits(8, 4096, 100_000, None, draft_len=4, block_size=16, num_blocks=10_000)
        self.requests: list[EngineRequest] = []
        self.starts: list[bool] = []
        self._turns: list[bool] = []

    def start(self, requests: Sequence[EngineRequest], inbox: Inbox) -> list[str]:
        self.requests += requests
        if not self.starts:
            asyncio.get_running_loop().call_soon(self._turns.append, True)
        self.starts.append(not self._turns)
        return [str(number) for number in range(len(requests))]

    def abort(self, request_ids: Sequence[str]) -> None:
        pass


class ParsersHere(Parsers):
    """Reads in this process what others read for a server.

    Attributes:
        tasks: so far.
    """

    def __init__(self, facts: Facts, tokenizer: Any) -> None:
        self.tasks: list[Task] = []
        self._reader = self._in_loop = RequestParser(facts, tokenizer)

    async def _read(self, task: Task, body: bytes) -> Parsed:
        self.tasks.append(task)
        result, blocks = self._reader.read(task, body)
        reply = unpack(pack(Reply(result=result))[HEAD_BYTES:], Reply)  # as it travels
        return parsed_of(reply.result, blocks)


def make_frontend(tokenizer: Any, engine: Any, template: str | None = None) -> Frontend:
    """A front of the model m, whose requests have 60 s; chats have a template, or none."""
    prompts = PromptReader(read_model_config(ASSETS / "target"), tokenizer)
    facts = Facts(
        tokenizer=None, template=template, template_tokens={}, model_name="m", vocab_size=4096, eos_token_ids=(0,),
        draft_len=4, excludes_prompt=None, max_batch_size=8,
    )  # fmt: skip
    admission, reading = AdmissionControl(8, 2048, 16, is_open=True), ParsersHere(facts, tokenizer)
    model = ServedModel("m", prompts, tokenizer, 4)
    return Frontend(model, admission, engine, FrontendMetrics("m", 4), reading, RequestOptions(60.0))


def request_of(body: bytes, **path_params: str) -> Request:
    """A request with a body, as the application gets it, of a client that stays."""
    messages: list[Message] = [{"type": "http.request", "body": body}]

    async def receive() -> Message:
        if not messages:
            await asyncio.Event().wait()
        return messages.pop()

    return Request({"type": "http", "method": "POST", "path": "/", "headers": [], "path_params": path_params}, receive)
