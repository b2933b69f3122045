"""Processes that read and are lost: who is told, who reads instead, and what is when no other one can be started."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest
from test_parsers import CHAT, FACTS, PATIENCE, SLOW

from launch.serve.admission.control import OWNER
from launch.serve.admission.refusals import Kind, Refusal
from launch.serve.parsing import parsers, worker_pool
from launch.serve.parsing.messages import Reply, Stops, Task, pack
from launch.serve.parsing.worker_pool import ParserWorker, WorkerPool

TASK = Task(kind="completion", seconds=100.0, most_tokens=100)
BODY = b'{"prompt": [1, 2]}'


def with_pool(check: Callable[[WorkerPool], Awaitable[None]], template: str | None = None) -> None:
    """Check one process, and those that take its place."""

    async def work() -> None:
        facts = msgspec.structs.replace(FACTS, template=template, most_bytes=1 << 32)
        found = WorkerPool(pack(facts), 1)
        found.start_one()
        try:
            await asyncio.wait_for(check(found), PATIENCE)
        finally:
            found.close()

    asyncio.run(work())


def kill(found: WorkerPool) -> ParserWorker:
    """Have the process of a pool killed by somebody else; the pool has not looked yet."""
    (worker,) = found._all
    os.kill(worker.pid, signal.SIGKILL)
    os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
    return worker


async def read(found: WorkerPool) -> bool:
    reply, _ = await found.read(TASK, BODY)
    return isinstance(reply.result, parsers.Read)


def test_one_that_was_killed_while_idle_is_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    async def check(found: WorkerPool) -> None:
        killed = kill(found)
        assert await read(found) and killed not in found._all
        assert not caplog.records  # no request was given to it

    with_pool(check)


def test_a_request_whose_reader_is_killed_is_read_by_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ParserWorker, "has_ended", lambda worker: False)  # the kernel kills it just behind this look

    async def check(found: WorkerPool) -> None:
        kill(found)
        assert await read(found) and len(found._all) == 1

    with_pool(check)


def test_a_request_that_takes_too_much_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Task] = []
    own_read = ParserWorker.read

    async def count(worker: ParserWorker, task: Task, body: bytes) -> Any:
        begun.append(task)
        return await own_read(worker, task, body)

    monkeypatch.setattr(ParserWorker, "read", count)

    async def check(found: WorkerPool) -> None:
        with pytest.raises(Refusal, match="takes more than 0 s"):
            await found.read(Task(kind="chat", seconds=0.2, most_tokens=100), CHAT)
        assert len(begun) == 1

    with_pool(check, SLOW)


def test_one_that_was_killed_when_its_reply_was_there_reads_nothing_more() -> None:
    class Writer:
        def write(self, data: bytes) -> None: ...
        def close(self) -> None: ...

    async def check(found: WorkerPool) -> None:
        (worker,) = found._all
        stream = asyncio.StreamReader()
        worker._streams = (stream, Writer())  # type: ignore[assignment]
        working = asyncio.create_task(worker.read(TASK, BODY))
        await asyncio.sleep(0)  # it waits for the reply
        stream.feed_data(pack(Reply(result=Stops(request_id="x"))))
        worker.kill()
        reply, _ = await working
        assert reply.result == Stops(request_id="x") and not worker.is_fit

    with_pool(check)


def test_where_none_can_be_started_results_stay_waiters_are_told_and_it_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(greeting: bytes) -> ParserWorker:
        raise OSError(24, "Too many open files")

    async def check(found: WorkerPool) -> None:
        monkeypatch.setattr(worker_pool, "ParserWorker", fail)
        first = asyncio.create_task(found.read(Task(kind="chat", seconds=0.2, most_tokens=100), CHAT))
        await asyncio.sleep(0)
        waiting = asyncio.create_task(read(found))
        with pytest.raises(Refusal, match="takes more than 0 s"):  # its own result, and not why none was started
            await first
        for asking in (waiting, read(found)):
            with pytest.raises(Refusal, match="cannot start a process") as caught:
                await asking
            assert (caught.value.kind, caught.value.code) == (Kind.UNAVAILABLE, "no_reader")
        assert {record.getMessage() for record in caplog.records} == {
            "a process that reads requests cannot be started: [Errno 24] Too many open files"
        }
        monkeypatch.undo()
        assert not found._all
        while not found._all:  # nobody asks
            await asyncio.sleep(0.01)
        assert await read(found)

    monkeypatch.setattr(worker_pool, "RETRY_SECONDS", 0.3)
    with_pool(check, SLOW)


def test_those_who_wait_for_a_process_are_served_in_turns_between_owners() -> None:
    async def check(found: WorkerPool) -> None:
        order: list[str] = []

        async def ask(owner: str) -> None:
            OWNER.set(owner)
            assert await read(found)
            order.append(owner)

        asking = [asyncio.create_task(ask(owner)) for owner in ("hog", "hog", "hog", "hog", "small", "other", "small")]
        await asyncio.gather(*asking)
        assert order == ["hog", "hog", "small", "other", "hog", "small", "hog"]

    with_pool(check)
