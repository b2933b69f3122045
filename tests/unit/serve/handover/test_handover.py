"""Servers that follow each other: whose requests go on where, and with which tokens. The engines here count."""

from __future__ import annotations

import asyncio
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from engine_messages import LIMITS, SAMPLING, delta_of, run

from launch.serve.admission.control import AdmissionControl
from launch.serve.admission.refusals import Refusal
from launch.serve.engine.client import EngineClient
from launch.serve.engine.messages import Abort, AskStatus, Begin, Deltas, MessageStream, Ready, Status, encode
from launch.serve.engine.open_requests import EngineRequest, Inbox
from launch.serve.handover.door import Greeting, knock
from launch.serve.handover.handover import Handover
from launch.serve.handover.name_file import DoorAddress, NameFile, ServedName, describe_server
from parallel.watchdog.message_socket import make_nonce, make_seals
from trtrun.configuration.config import make_config
from trtrun.errors import ConfigError

COUNTED = {index: tuple(range(100 * index, 100 * index + 9)) for index in range(2)}
"""What engines make of SAMPLING: each token says its completion and its place."""


class CountingEngine:
    """Another token for each completion whenever it is told to; `rows` are those of each, by request and completion."""

    def __init__(self, limits: Any = LIMITS) -> None:
        self.rows: dict[tuple[str, int], list[int]] = {}
        self._limits = limits

    async def serve(self, client: EngineClient) -> None:
        """Be the engine of a client."""
        ours, theirs = socket.socketpair()
        hearing = asyncio.create_task(client.serve(*await asyncio.open_unix_connection(sock=theirs)))
        reader, self._writer = await asyncio.open_unix_connection(sock=ours)
        ready = Ready(version="1", config_hash="h", limits=asdict(self._limits), files={"the target's model": "f"})
        self._writer.write(encode(ready))
        try:
            async for message in MessageStream(reader):
                match message:
                    case Begin():
                        for one in message.requests:
                            begun = one.generated or dict.fromkeys(range(2), ())
                            self.rows |= {(one.request_id, index): list(row) for index, row in begun.items()}
                    case Abort():
                        self.rows = {key: row for key, row in self.rows.items() if key[0] != message.request_id}
                    case AskStatus():
                        status = Status(
                            num_running=len(self.rows), num_waiting=0, num_free_blocks=1, num_blocks=2, totals={}
                        )
                        self._writer.write(encode(status))
        finally:
            hearing.cancel()

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            deltas = []
            for (request_id, index), row in list(self.rows.items()):
                row.append(100 * index + len(row))
                reason = "length" if len(row) == SAMPLING.max_tokens else None
                deltas.append(delta_of((row[-1],), reason, index, request_id=request_id))
                if reason:
                    del self.rows[request_id, index]
            self._writer.write(encode(Deltas(deltas=tuple(deltas))))


class PlayedServer:
    """As much of a server as a handover knows."""

    def __init__(self, name_file: Path, number: int, limits: Any = LIMITS, **sections: Any) -> None:
        server = sections.pop("server", {})
        engines = {
            name: {"model": f"asset:{name}", "devices": {f"node{number}": ["cpu:0"]}} for name in ("target", "draft")
        }
        config = make_config({**engines, "server": {"name_file": str(name_file), **server}, **sections})
        self.own, self.engine = EngineClient(), CountingEngine(limits)
        self.admission, self.lines = AdmissionControl(8, 8, 8), []
        self.name = ServedName(url=f"http://{number}", host=f"node{number}", model="m", since="now", job=str(number))
        self.handover = Handover(config, self.own, self.admission, lambda client: None, self.lines.append)
        self.own.on_ready = self.handover.note_ready

    @asynccontextmanager
    async def running(self) -> AsyncIterator[PlayedServer]:
        serving = asyncio.create_task(self.engine.serve(self.own))
        try:
            await until(lambda: self.own.ready is not None)
            await self.handover.take_name(self.name, is_loopback=True)
            yield self
        finally:
            self.handover.end()
            await self.handover.close()
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)

    def ask(self) -> Asked:
        return Asked(self.handover.client)

    async def is_followed(self) -> None:
        await until(lambda: self.handover.client is not self.own)


class Asked:
    """A request, and what has come of it."""

    def __init__(self, client: EngineClient) -> None:
        self.inbox, self.client = Inbox(), client
        self.ids = client.start([EngineRequest((1, 2), SAMPLING)], self.inbox)
        self.tokens: dict[int, list[int]] = {0: [], 1: []}

    async def read(self, count: int) -> None:
        """Until so many tokens of each completion are there."""
        while min(map(len, self.tokens.values())) < count:
            for _, delta in await self.inbox.take():
                self.tokens[delta.index] += delta.token_ids

    async def check(self) -> None:
        """It has the tokens of one that nobody has disturbed."""
        await self.read(9)
        assert {index: tuple(tokens) for index, tokens in self.tokens.items()} == COUNTED


def url_in(file: Path) -> str | None:
    name = NameFile(file).read_name()
    return None if name is None else name.url


async def until(holds: Callable[[], object]) -> None:
    while not holds():
        await asyncio.sleep(0)


def test_new_requests_go_on_in_the_next_server_at_once_and_those_in_work_at_the_end(tmp_path: Path) -> None:
    async def check() -> None:
        file = tmp_path / "name.json"
        async with PlayedServer(file, 1).running() as first:
            begun = first.ask()
            await until(lambda: first.engine.rows)
            first.engine.step(3)
            await begun.read(3)
            # More blocks, on another node: it may have its requests all the same.
            async with PlayedServer(file, 2, replace(LIMITS, num_blocks=40)).running() as second:
                assert url_in(file) == "http://2"
                await first.is_followed()
                new = first.ask()
                await until(lambda: second.engine.rows)
                assert (len(first.engine.rows), len(second.engine.rows), second.admission.num_requests) == (2, 2, 1)
                status = await first.handover.client.ask_status()
                assert status is not None and status.num_running == 2
                second.engine.step(4)
                await new.read(4)

                first.handover.end()
                await until(lambda: len(second.engine.rows) == 4 and not first.engine.rows)
                assert sorted(map(len, second.engine.rows.values())) == [3, 3, 4, 4]
                first.admission.is_closing = True
                with pytest.raises(Refusal, match="the server is ending: send the request again to http://2"):
                    first.admission.check_open()
                second.engine.step(6)
                await begun.check()
                await new.check()
                await until(lambda: not second.admission.num_requests)
                assert "1 requests go on in job 2 at http://2" in first.lines

                given_up = first.ask()
                await until(lambda: second.engine.rows)
                given_up.client.abort(given_up.ids)
                await until(lambda: not second.engine.rows and not second.admission.num_requests)

    run(check())


def test_requests_and_the_name_come_back_where_the_next_server_ends(tmp_path: Path) -> None:
    async def check() -> None:
        file = tmp_path / "name.json"
        async with PlayedServer(file, 1).running() as first:
            begun = first.ask()
            await until(lambda: first.engine.rows)
            async with PlayedServer(file, 2).running() as second:
                await first.is_followed()
                new = first.ask()
                first.handover.end()
                await until(lambda: len(second.engine.rows) == 4)
                second.engine.step(5)
                await new.read(5)
                await begun.read(5)
            await until(lambda: len(first.engine.rows) == 4)
            assert first.handover.client is first.own and first.admission.successor is None
            await until(lambda: url_in(file) == "http://1")
            new.client.abort(new.ids)  # as its reader knows it
            await until(lambda: len(first.engine.rows) == 2)
            first.engine.step(4)
            await begun.check()
            assert "job 2 at http://2 follows no more: 2 requests go on here" in first.lines
            async with PlayedServer(file, 3).running():
                await first.is_followed()
        assert not list(tmp_path.iterdir())

    run(check())


def test_a_request_goes_on_through_a_chain_of_three(tmp_path: Path) -> None:
    async def check() -> None:
        file = tmp_path / "name.json"
        async with PlayedServer(file, 1).running() as first, PlayedServer(file, 2).running() as second:
            await first.is_followed()
            assert second.own.ready is not None
            reader, writer = await knock(first.handover._door.address, Greeting(url="http://late", texts="t"))
            writer.write(encode(second.own.ready))
            assert await reader.read() == b""
            writer.close()
            assert first.lines[-1] == "http://late wants to follow, and job 2 at http://2 does so already"
            begun = first.ask()
            await until(lambda: second.engine.rows)
            second.engine.step(2)
            async with PlayedServer(file, 3).running() as third:
                await second.is_followed()
                second.handover.end()
                await until(lambda: third.engine.rows)
                new = first.ask()
                await until(lambda: len(third.engine.rows) == 4)
                third.engine.step(9)
                await begun.check()
                await new.check()

    run(check())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"scheduler": {"max_batch_size": 3}}, "its configuration makes other texts"),
        ({"limits": replace(LIMITS, num_blocks=8)}, "its requests may have 112 tokens, and those here 256"),
        ({"limits": replace(LIMITS, max_num_tokens=32)}, "its rounds have other limits"),
    ],
)
def test_a_server_that_makes_other_texts_gets_the_name_and_no_requests(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    async def check() -> None:
        file = tmp_path / "name.json"
        async with PlayedServer(file, 1).running() as first, PlayedServer(file, 2, **changes).running():
            await until(lambda: len(first.lines) > 1)
            assert (
                first.lines[-1]
                == f"job 2 at http://2 has the name from now on, but {said}: requests end where they began"
            )
            assert first.handover.client is first.own
            assert url_in(file) == "http://2"

    run(check())


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl: install the package openssl")
def test_with_a_certificate_the_door_is_the_one_that_its_file_tells(tmp_path: Path) -> None:
    files = {"tls_cert": tmp_path / "cert.pem", "tls_key": tmp_path / "key.pem"}
    words = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj", "/CN=x"]
    outputs = ["-keyout", str(files["tls_key"]), "-out", str(files["tls_cert"])]
    subprocess.run(["openssl", *words, *outputs], check=True, capture_output=True, timeout=60)
    server = {name: str(path) for name, path in files.items()}

    async def check() -> None:
        file = tmp_path / "name.json"
        async with PlayedServer(file, 1, server=server).running() as first:
            async with PlayedServer(file, 2, server=server).running() as second:
                await first.is_followed()
                begun = first.ask()
                await until(lambda: second.engine.rows)
                second.engine.step(9)
                await begun.check()
            await until(lambda: url_in(file) == "http://1")
            door = NameFile(file).read_door()
            assert door is not None and door.certificate is not None
            other = msgspec.structs.replace(door, certificate="0" * 64)
            with pytest.raises(OSError, match="it has another certificate than its file says"):
                await knock(other, Greeting(url="http://x", texts="t"))

    run(check())


def test_who_does_not_know_the_token_is_not_let_in(tmp_path: Path) -> None:
    async def check() -> None:
        file = tmp_path / "name.json"
        async with PlayedServer(file, 1).running() as first:
            (hidden,) = (path for path in tmp_path.iterdir() if path != file)
            assert hidden.stat().st_mode & 0o777 == 0o600
            assert "token" not in file.read_text()
            door = NameFile(file).read_door()
            assert door is not None
            greeting = Greeting(url="http://x", texts="t")
            guess = msgspec.structs.replace(door, token="0" * 64)
            with pytest.raises(OSError, match=r"127\.0\.0\.1: "):
                await knock(guess, greeting)
            reader, writer = await asyncio.open_connection("127.0.0.1", door.port)
            theirs, own = (await reader.readline())[:-1], make_nonce()
            _, outward = make_seals(guess.token, theirs, own)
            writer.write(own + b"\n" + outward.close(msgspec.json.encode(greeting)) + b"\n")
            assert await reader.read() == b""
            writer.close()
            assert first.handover.client is first.own
            _, writer = await knock(door, greeting)
            writer.close()

    run(check())


def test_the_name_tells_the_job_of_either_batch_system() -> None:
    jobs = ({"SLURM_JOB_ID": "7"}, {"PBS_JOBID": "12.server"}, {})
    assert [describe_server("m", "http://n:1", None, True, job).job for job in jobs] == ["7", "12", None]


def test_a_server_that_ends_leaves_the_name_that_another_one_takes_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = NameFile(tmp_path / "name.json")
    door = DoorAddress(hosts=("h",), port=1, token="t")
    old, new = (ServedName(url=url, host="h", model="m", since="now") for url in ("http://old", "http://new"))
    file.take(old, door)
    rename = Path.rename

    def rename_late(self: Path, target: Path) -> Path:
        monkeypatch.undo()
        file.take(new, door)
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", rename_late)
    file.leave(old, door)
    assert file.read_name() == new
    file.take_back("http://lost", old, door)
    assert file.read_name() == new
    file.take_back("http://new", old, door)
    assert file.read_name() == old
    file.leave(old, door)
    assert not list(tmp_path.iterdir())


def test_a_file_that_cannot_be_written_is_told_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"server\.name_file: .*nowhere is no directory to write to"):
        PlayedServer(tmp_path / "nowhere" / "name.json", 1)
    (tmp_path / "notes").write_text("of somebody")
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "notes", tmp_path / "folder", Path("/")):
        with pytest.raises(ConfigError, match=rf"{path} is there, and is none that a server has written"):
            PlayedServer(path, 1)
        assert NameFile(path).read_name() is None
    for path, line in ((tmp_path / ("x" * 300), "File name too long"), (Path("/proc/x"), "No such file")):
        with pytest.raises(ConfigError, match=rf"cannot write .*: {line}"):
            PlayedServer(path, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "notes"]
