"""Engines in processes that are played: what they say over the socket is what engines say, and they compute nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from engine_messages import LIMITS, SAMPLING, delta_of

from launch.exit_codes import ExitCode
from launch.serve.admission.refusals import Kind, Refusal
from launch.serve.engine import handshake as engine_socket
from launch.serve.engine.client import EngineClient
from launch.serve.engine.handshake import hash_config, hash_files
from launch.serve.engine.messages import Begin, Close, Deltas, Generate, MessageStream, Ready, encode
from launch.serve.engine.open_requests import EngineRequest, Inbox
from launch.serve.engine.restarted_engine import EngineEvents, RestartedEngine
from trtrun import __version__
from trtrun.configuration.config import RuntimeConfig, make_config

KILLED = -9


class Process:
    """One engine: a task in place of a process. What it does is told by its play, which returns the exit status."""

    pid = 1

    def __init__(self, words: Sequence[str], config: RuntimeConfig, client: EngineClient, play: Play) -> None:
        self.words, self.config, self._client = words, config, client
        self.returncode: int | None = None
        self.heard: list[Generate] = []
        self.turns: list[bytes] = []
        self._unheard: list[Generate] = []
        self._messages: MessageStream
        self._writer: asyncio.StreamWriter | None = None
        self._task = asyncio.create_task(self._run(play))

    async def _run(self, play: Play) -> int:
        try:
            self.returncode = await play(self)
        except asyncio.CancelledError:
            self.returncode = KILLED
        finally:
            if self._writer is not None:
                self._writer.close()
        return self.returncode

    async def wait(self) -> int:
        return await asyncio.shield(self._task)

    def kill(self) -> None:
        self._task.cancel()

    def send_signal(self, number: int) -> None:
        self._task.cancel()

    @property
    def room(self) -> int | None:
        """Tokens of the KV store that the command asks for."""
        settings = [word for word in self.words if word.startswith("kv_cache.max_tokens=")]
        return int(settings[-1].partition("=")[2]) if settings else None

    async def come_up(self, num_blocks: int = LIMITS.num_blocks, **changes: Any) -> None:
        """Say what an engine says that has read the configuration, with the settings of the command."""
        cache = self.config.kv_cache.model_copy(update={} if self.room is None else {"max_tokens": self.room})
        config = self.config.model_copy(update={"kv_cache": cache})
        socket = self.words[self.words.index("--socket") + 1]
        reader, self._writer = await asyncio.open_unix_connection(sock=engine_socket.connect(socket))
        self._messages = MessageStream(reader)
        ready = {
            "version": __version__,
            "config_hash": hash_config(config),
            "limits": asdict(replace(LIMITS, num_blocks=num_blocks)),
            "files": hash_files(self.config) | {"the models of rank 1 on far": "f"},
        }
        self.send(Ready(**(ready | changes)))
        while self._client.ready is None and not reader.at_eof():
            await asyncio.sleep(0)

    def send(self, message: Any) -> None:
        assert self._writer is not None
        self._writer.write(encode(message))

    async def hear(self) -> Generate | None:
        """The next request; None once the frontend closes."""
        while not self._unheard:
            message = await self._messages.read()
            if message is None or isinstance(message, Close):
                return None
            if isinstance(message, Begin):
                self._unheard += message.requests
        self.heard.append(self._unheard.pop(0))
        return self.heard[-1]

    async def tell(self, request: Generate, token: int, finish_reason: str | None = None) -> None:
        """A token of each completion of a request, which the frontend has read behind this."""
        deltas = [delta_of((token,), finish_reason, index, request_id=request.request_id) for index in (0, 1)]
        self.send(Deltas(deltas=tuple(deltas)))
        generated = self._client._requests[request.request_id].generated
        count = sum(map(len, generated.values()))
        while generated and sum(map(len, generated.values())) == count:
            await asyncio.sleep(0)


Play = Callable[[Process], Coroutine[Any, Any, int]]


class Played:
    """A `RestartedEngine` whose processes are played, one play after the other, the last one again and again.

    Attributes:
        processes: started so far.
        lines: told of restarts.
        news: told of engines that are up again, or stand by.
        waits: seconds that were waited before restarts.
    """

    def __init__(
        self, model: Path, plays: Sequence[Play], max_restarts: int, standby: bool = False, **launch: Any
    ) -> None:
        self.config = make_config(
            {
                "target": {"model": str(model), "devices": ["cpu:0", "cpu:1"]},
                "speculation": {"method": "none"},
                "server": {"max_restarts": max_restarts, "standby": standby},
                "launch": launch,
            }
        )
        self.processes: list[Process] = []
        self.lines: list[str] = []
        self.news: list[str] = []
        self._plays = plays
        self._is_over = False
        self.engine = RestartedEngine(self.config, ["serve-engine"])

    async def start(self, *words: str, **_: Any) -> Process:
        play = self._plays[min(len(self.processes), len(self._plays) - 1)]
        self.processes.append(Process(words, self.config, self.engine.engine, play))
        return self.processes[-1]

    def ask(self, num_prompts: int = 1) -> Inbox:
        """Start a request."""
        assert not self._is_over, "the server has ended"
        inbox = Inbox()
        self.engine.engine.start([EngineRequest((1, 2), SAMPLING)] * num_prompts, inbox)
        return inbox

    async def keep(self) -> int:
        """Keep the engine; its end ends what is in work, as the server does."""
        events = EngineEvents(*([lambda *_: None] * 4), self.lines.append, self.lines.append, self.news.append)
        try:
            return await self.engine.keep(events)
        finally:
            self._is_over = True
            self.engine.engine.end_all(Refusal(Kind.UNAVAILABLE, "the server ends"))


def standing_by(play: Play) -> Play:
    """Wait for one's turn, and play; without one end."""

    async def wait(process: Process) -> int:
        name = process.words[process.words.index("--turn") + 1]
        reader, writer = await asyncio.open_unix_connection(sock=engine_socket.connect(name))
        turn = await reader.read(1)
        writer.close()
        process.turns.append(turn)
        return await play(process) if turn else ExitCode.FAILED

    return wait


async def serve(process: Process) -> int:
    """Answer each request with one token, which is the last."""
    await process.come_up()
    while (request := await process.hear()) is not None:
        await process.tell(request, 7, "length")
    return ExitCode.DONE


def dying(num_tokens: int = 0) -> Play:
    """Get a request, give it some tokens, and die."""

    async def play(process: Process) -> int:
        await process.come_up()
        request = await process.hear()
        assert request is not None
        for token in range(num_tokens):
            await process.tell(request, token)
        return KILLED

    return play


async def read(inbox: Inbox) -> list[int]:
    """The tokens of the first completion, to its end."""
    tokens: list[int] = []
    while True:
        for _, delta in await inbox.take():
            if delta.index == 0:
                tokens += delta.token_ids
                if delta.finish_reason is not None:
                    return tokens
