"""Engines that stand by: they wait for their turn, have the requests of the one before, and never have two turns.
Processes are played, as in test_restarted_engine.py."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engine_messages import run
from played_engines import KILLED, Play, Played, Process, dying, read, serve, standing_by

from launch.exit_codes import ExitCode, FailedError
from launch.serve.engine import handshake, process
from launch.serve.engine import keeper as engine_keeper
from launch.serve.engine.standby import Standby, _Turn, wait_for_turn
from trtrun.configuration.config import make_config
from trtrun.configuration.model_paths import ASSETS
from trtrun.start.job_spec import JobSpec

WithEngines = Callable[..., Played]


@pytest.fixture
def with_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WithEngines:
    """Have processes played, the second of which stands by, and check what comes of them."""
    for file in (ASSETS / "target").iterdir():
        (tmp_path / file.name).symlink_to(file)

    def play(plays: Sequence[Play], check: Callable[[Played], Coroutine[Any, Any, None]], **settings: Any) -> Played:
        played = Played(tmp_path, plays, **{"max_restarts": 3, "standby": True, **settings})
        monkeypatch.setattr(asyncio, "create_subprocess_exec", played.start)
        monkeypatch.setattr(engine_keeper, "RETRY_SECONDS", 0.05)

        async def work() -> None:
            try:
                await check(played)
            finally:
                await played.engine.close()

        run(work())
        return played

    return play


async def until(played: Played, count: int) -> None:
    """Wait for so many processes."""
    while len(played.processes) < count:
        await asyncio.sleep(0)


def test_the_engine_that_stood_by_has_the_requests_of_the_one_before(with_engines: WithEngines) -> None:
    async def check(played: Played) -> None:
        keeping = asyncio.create_task(played.keep())
        await until(played, 2)
        assert played.processes[1].turns == [], "the first one is there"
        assert await read(played.ask()) == [0, 1, 7]
        await until(played, 3)
        first, second, third = played.processes
        assert second.turns == [b"t"] and second.heard[0].generated == {0: (0, 1), 1: (0, 1)}
        assert "--turn" not in first.words and second.room == third.room is not None
        assert ["--awaited" in engine.words for engine in (first, second, third)] == [False, True, True]
        await played.engine.close()
        assert await keeping == ExitCode.DONE
        assert third.turns == [] and third.returncode is not None, "it is ended, and its turn never came"

    with_engines([dying(2), standing_by(serve), standing_by(serve)], check)


def test_one_that_ended_while_it_stood_by_is_replaced(
    with_engines: WithEngines, caplog: pytest.LogCaptureFixture
) -> None:
    async def end(process: Process) -> int:
        return ExitCode.FAILED

    async def check(played: Played) -> None:
        keeping = asyncio.create_task(played.keep())
        await until(played, 2)
        while played.processes[1].returncode is None:
            await asyncio.sleep(0)
        assert await read(played.ask()) == [7]
        assert await read(played.ask()) == [7]
        assert "--turn" not in played.processes[2].words
        await played.engine.close()
        assert await keeping == ExitCode.DONE

    async def serve_once(process: Process) -> int:
        await process.come_up()
        request = await process.hear()
        assert request is not None
        await process.tell(request, 7, "length")
        return KILLED

    with caplog.at_level(logging.WARNING):
        with_engines([serve_once, end, serve, standing_by(serve)], check)
    assert caplog.text.count("no engine stands by any more: it has ended with status 1") == 1


def test_the_end_of_the_server_ends_what_stands_by(with_engines: WithEngines) -> None:
    async def check(played: Played) -> None:
        keeping = asyncio.create_task(played.keep())
        await until(played, 2)
        played.ask()
        with pytest.raises(FailedError, match="started again 0 of 0"):
            await keeping
        assert played.processes[1].turns == [] and played.processes[1].returncode is not None

    with_engines([dying(), standing_by(serve)], check, max_restarts=0)


@pytest.mark.parametrize("has_come", [True, False])
def test_a_turn_is_told_where_it_has_come_and_else_nothing(has_come: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []
    told: list[str] = []

    async def start(*words: str, **_: Any) -> SimpleNamespace:
        started.extend(words)
        return SimpleNamespace(returncode=None, wait=asyncio.Event().wait)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)

    tell = _Turn.tell

    async def check() -> None:
        is_asked = asyncio.Event()

        async def tell_once_asked(*connection: Any) -> None:
            is_asked.set()
            await tell(*connection)

        monkeypatch.setattr(_Turn, "tell", lambda *words: tell_once_asked(*words))
        standby = Standby(lambda: ["serve-engine"], {}, told.append, 60.0, lambda: told.append("silence"))
        await standby.prepare()
        await standby.prepare()  # one waits already
        assert started.count("--turn") == 1
        reader, writer = await asyncio.open_unix_connection(sock=handshake.connect(started[-1]))
        await is_asked.wait()
        assert (standby.take() if has_come else standby.give_up()) is not None
        assert standby._turn.is_settled == has_come, "one that is given up is ended before it hears anything"
        standby.forget()
        assert await reader.read(1) == (b"t" if has_come else b"")
        writer.close()
        assert standby.take() is None and standby.give_up() is None
        assert told == ["the next engine stands by"]

    run(check())


def test_one_that_does_not_hear_of_its_turn_is_ended(
    with_engines: WithEngines, caplog: pytest.LogCaptureFixture
) -> None:
    """A rank of it was stopped, say, while nobody watched it."""

    async def hang(process: Process) -> int:
        name = process.words[process.words.index("--turn") + 1]
        reader, _ = await asyncio.open_unix_connection(sock=handshake.connect(name))
        assert await reader.readexactly(1) == b"t"
        await asyncio.Event().wait()
        return ExitCode.FAILED

    async def check(played: Played) -> None:
        keeping = asyncio.create_task(played.keep())
        assert await read(played.ask()) == [7]
        assert played.processes[1].returncode == KILLED and "--turn" not in played.processes[2].words
        await played.engine.close()
        assert await keeping == ExitCode.DONE

    with_engines([dying(), hang, serve, standing_by(serve)], check, heartbeat_seconds=0.05)
    assert "hangs: it stood by, and not all of it has heard of its turn within 0.05 s" in caplog.text


def test_an_engine_says_that_it_has_heard() -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        name, heard = handshake.make_name(), list[bytes]()
        listening.bind("\0" + name[1:])
        listening.listen()

        def answer() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.sendall(b"t")
                heard.append(connection.recv(2))

        answering = threading.Thread(target=answer)
        answering.start()
        wait_for_turn(name, has_gpus=False)
        answering.join()
        assert heard == [b"h"]


def test_one_that_ends_with_the_engine_that_serves_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ended = SimpleNamespace(returncode=None)

    async def wait() -> int:
        return KILLED

    async def start(*_: str, **__: Any) -> SimpleNamespace:
        ended.returncode, ended.wait = KILLED, wait
        return ended

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)

    async def check() -> None:
        standby = Standby(lambda: ["serve-engine"], {}, lambda line: None, 60.0, lambda: None)
        await standby.prepare()
        assert standby.take() is None
        assert standby._watching is not None
        await standby._watching
        standby.forget()

    run(check())
    assert "no engine stands by any more" in caplog.text


def test_an_engine_whose_front_is_gone_says_so() -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        name = handshake.make_name()
        listening.bind("\0" + name[1:])
        listening.listen()
        answering = threading.Thread(target=lambda: listening.accept()[0].close())
        answering.start()
        with pytest.raises(FailedError, match="the front has ended before it was this engine's turn"):
            wait_for_turn(name, has_gpus=False)
        answering.join()


@pytest.mark.parametrize("turn_name", [None, "x"])
def test_an_engine_that_stands_by_looks_at_no_device(turn_name: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[object] = []

    def check(spec: JobSpec, *, looks_at_devices: bool = True) -> None:
        done.append(looks_at_devices)

    def wait(name: str, *, has_gpus: bool) -> None:
        done.append(name)

    monkeypatch.setattr(process, "check_before_run", check)
    monkeypatch.setattr(process, "wait_for_turn", wait)
    monkeypatch.setattr(process, "open_engine", lambda spec: None)
    target = {"model": str(ASSETS / "target"), "devices": ["cpu:0"]}
    spec = JobSpec(make_config({"target": target, "speculation": {"method": "none"}}))
    assert process.play_engine(spec, "s", turn_name) == ExitCode.DONE
    assert done == ([True] if turn_name is None else [False, "x"])


def test_nothing_stands_by_unless_it_is_asked_for(with_engines: WithEngines) -> None:
    async def check(played: Played) -> None:
        keeping = asyncio.create_task(played.keep())
        assert await read(played.ask()) == [7]
        await played.engine.close()
        assert await keeping == ExitCode.DONE

    assert len(with_engines([serve], check, standby=False).processes) == 1
