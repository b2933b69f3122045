"""Batches from their rows to their files: behind others, over restarts, and where something is lost."""

from __future__ import annotations

import asyncio
import errno
import json
import time
from pathlib import Path
from typing import Any

import pytest
from batch_servers import Rows, begin, end_of, lines_of, row, running, until

from launch.serve.admission.refusals import Kind, Refusal, out_of_time
from launch.serve.batches.line_file import LineFile
from launch.serve.batches.records import BatchRecord
from launch.serve.batches.store import BatchStore

IDS = [f"row {number}" for number in range(12)]
ROWS = [row(name) for name in IDS]


def run(work: Any) -> None:
    asyncio.run(asyncio.wait_for(work, 90))


def ids_of(lines: list[Any]) -> list[str]:
    return sorted(line["custom_id"] for line in lines)


@pytest.mark.parametrize("torn", [b'{"id":"batch_req_torn by a k', b"\0\0\0\n", b"\0" * 99, b'{"id": "x"}\n'])
def test_a_server_that_is_started_again_answers_what_is_left(tmp_path: Path, torn: bytes) -> None:
    async def work() -> None:
        rows = Rows()
        async with running(tmp_path / "d", rows) as front:
            batch_id = await begin(front.client(), *ROWS)
            await until(lambda: len(rows.asked) == 8)  # the rows of the running batch
            rows.let(3)
            assert front.runner is not None
            await until(lambda: front.runner.store.batches[batch_id].completed == 3)
        (work_file,) = (tmp_path / "d" / "batches").glob("*.output")
        whole = work_file.read_bytes()
        assert whole.count(b"\n") == 3
        work_file.write_bytes(whole + torn)

        again = Rows()
        again.let()
        async with running(tmp_path / "d", again) as front:
            batch = await end_of(front.client(), batch_id)
            assert batch.status == "completed" and batch.request_counts.completed == len(IDS)
            content = (await front.client().files.content(batch.output_file_id)).content
            assert content.startswith(whole)
            assert ids_of(await lines_of(front.client(), batch.output_file_id)) == sorted(IDS)
            assert len(again.asked) == len(IDS) - 3 and batch.error_file_id is None
        assert not list((tmp_path / "d" / "batches").glob("*.output"))

    run(work())


def test_rows_take_the_places_that_others_leave_and_one_at_least(tmp_path: Path) -> None:
    async def work() -> None:
        for others, most in ((0, 8), (6, 2), (8, 1), (50, 1)):
            rows = Rows()
            async with running(tmp_path / f"{others}", rows) as front:
                tickets = [front.admission.enter(others, "somebody")] if others else []
                batch_id = await begin(front.client(), *ROWS)
                await until(lambda rows=rows, most=most: len(rows.asked) == most)
                assert front.runner is not None
                assert (front.runner.num_running, front.runner.num_waiting) == (most, len(IDS) - most)
                rows.let()
                assert (await end_of(front.client(), batch_id)).status == "completed"
                assert rows.most_at_once == most
                for ticket in tickets:
                    ticket.leave()

    run(work())


def test_batches_of_keys_take_turns(tmp_path: Path) -> None:
    async def work() -> None:
        rows = Rows()
        async with running(tmp_path / "d", rows, keys=("a", "b")) as front:
            front.admission.enter(8, "somebody")  # so that one row is in work at a time
            first = await begin(front.client("a"), *(row(f"first {number}") for number in range(60)))
            await until(lambda: rows.asked)
            second = await begin(front.client("b"), *(row(f"second {number}") for number in range(3)))
            assert front.runner is not None
            await until(lambda: front.runner.store.batches[second].status == "in_progress")
            while sum(name.startswith("second") for name in rows.asked) < 3:
                num_asked = len(rows.asked)
                rows.let(1)
                await until(lambda num_asked=num_asked: len(rows.asked) > num_asked)
            assert len(rows.asked) < 50
            rows.let()
            for key, batch_id in (("a", first), ("b", second)):
                assert (await end_of(front.client(key), batch_id)).status == "completed"

    run(work())


def test_a_batch_whose_time_is_over_keeps_what_is_done(tmp_path: Path) -> None:
    async def work() -> None:
        rows = Rows()
        async with running(tmp_path / "d", rows) as front:
            batch_id = await begin(front.client(), *ROWS)
            rows.let(2)
            assert front.runner is not None
            await until(lambda: front.runner.store.batches[batch_id].completed == 2)
        async with running(tmp_path / "d", Rows(), now=lambda: time.time() + 90_000) as front:
            batch = await end_of(front.client(), batch_id)
            done, left = [await lines_of(front.client(), name) for name in (batch.output_file_id, batch.error_file_id)]
            assert batch.status == "expired" and batch.expired_at and not front.rows.asked
            assert len(done) == 2 and ids_of(done + left) == sorted(IDS)
            assert {line["error"]["code"] for line in left} == {"batch_expired"}
            assert batch.request_counts.failed == len(left)

    run(work())


def test_another_server_waits_for_the_directory(tmp_path: Path) -> None:
    async def work() -> None:
        rows, again = Rows(), Rows()
        again.let()
        async with running(tmp_path / "d", rows) as front:
            batch_id = await begin(front.client(), *ROWS)
            await until(lambda: rows.asked)
            waiting = asyncio.create_task(_finish(tmp_path / "d", again, batch_id))
            await asyncio.wait((waiting,), timeout=0.1)
            assert not again.asked and not waiting.done()
        assert (await waiting).request_counts.completed == len(IDS)

    async def _finish(directory: Path, rows: Rows, batch_id: str) -> Any:
        async with running(directory, rows) as front:
            return await end_of(front.client(), batch_id)

    run(work())


def test_what_is_lost_on_disk_ends_a_batch_with_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        rows = Rows()
        async with running(tmp_path / "gone", rows) as front:
            batch_id = await begin(front.client(), *ROWS)
            await until(lambda: rows.asked)
            (content,) = [path for path in (tmp_path / "gone" / "files").iterdir() if not path.suffix]
            content.unlink()
        rows.let()
        async with running(tmp_path / "gone", rows) as front:
            batch = await end_of(front.client(), batch_id)
            assert batch.status == "failed" and batch.errors.data[0].code == "input_file_missing"
            assert batch.errors.data[0].message == f"cannot read {batch.input_file_id}: No such file or directory"

        def is_full(self: LineFile, line: bytes) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(LineFile, "write", is_full)
        async with running(tmp_path / "full", rows) as front:
            batch = await end_of(front.client(), await begin(front.client(), *ROWS))
            (error,) = batch.errors.data
            assert (batch.status, error.code) == ("failed", "storage_error")
            assert error.message == "cannot write to the server's batch directory: No space left on device"

    run(work())


def test_rows_wait_for_an_engine_and_are_told_what_went_wrong(tmp_path: Path) -> None:
    class Refusing(Rows):
        async def answer(self, path: str, body: bytes) -> bytes:
            answer = await super().answer(path, body)
            name = self.asked[-1]
            if name == "late":
                raise out_of_time(1)
            if name == "broken":
                raise RuntimeError("a defect")
            if name == "wrong":
                raise Refusal(Kind.INVALID, "this is wrong", "prompt")
            if self.asked.count(name) == 1:
                raise Refusal(Kind.UNAVAILABLE, "the engine is starting", retry_after=0)
            return answer

    async def work() -> None:
        rows = Refusing()
        rows.let()
        async with running(tmp_path / "d", rows) as front:
            front.admission.max_running = 1
            front.admission.is_open = False
            batch_id = await begin(front.client(), row("late"), row("broken"), row("wrong"), row("good"))
            assert front.runner is not None
            await until(lambda: front.runner.store.batches[batch_id].status == "in_progress")
            assert not rows.asked
            front.admission.is_open = True
            batch = await end_of(front.client(), batch_id)
            assert ids_of(await lines_of(front.client(), batch.output_file_id)) == ["good"]
            wrong = {line["custom_id"]: line for line in await lines_of(front.client(), batch.error_file_id)}
            assert wrong["late"]["error"]["code"] == "request_timeout" and wrong["late"]["response"] is None
            told = {name: wrong[name]["response"] for name in ("broken", "wrong")}
            assert {name: answer["status_code"] for name, answer in told.items()} == {"broken": 500, "wrong": 400}
            assert told["wrong"]["body"]["error"]["param"] == "prompt" and wrong["wrong"]["error"] is None

    run(work())


@pytest.mark.parametrize("status", ["in_progress", "cancelling", "finalizing"])
def test_a_kill_while_the_files_of_a_batch_are_made_loses_no_row(tmp_path: Path, status: str) -> None:
    async def work() -> None:
        rows = Rows()
        async with running(tmp_path / "d", rows) as front:
            batch_id = await begin(front.client(), *ROWS)
            rows.let(3 if status == "cancelling" else 12)
            assert front.runner is not None
            done = 3 if status == "cancelling" else 12
            await until(lambda: front.runner.store.batches[batch_id].completed == done)
            if status == "cancelling":
                await front.client().batches.cancel(batch_id)
            before = await end_of(front.client(), batch_id)
        record = tmp_path / "d" / "batches" / f"{batch_id}.json"  # as it was before its files were made
        told = json.loads(record.read_bytes()) | {"status": status, "output_file_id": None, "error_file_id": None}
        record.write_text(json.dumps(told))
        again = Rows()
        async with running(tmp_path / "d", again) as front:
            batch = await end_of(front.client(), batch_id)
            assert (batch.status, batch.request_counts) == (before.status, before.request_counts)
            for field in ("output_file_id", "error_file_id"):
                assert getattr(batch, field) == getattr(before, field)
            found = [await lines_of(front.client(), name) for name in (batch.output_file_id, batch.error_file_id)]
            assert (len(found[0]), ids_of(found[0] + found[1])) == (done, sorted(IDS))
            assert not again.asked

    run(work())


def test_an_end_is_told_once_it_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        rows = Rows()
        rows.let()
        may_save = asyncio.Event()
        save = BatchStore.save

        async def save_late(self: BatchStore, batch: BatchRecord) -> None:
            if batch.is_over:
                await may_save.wait()
            await save(self, batch)

        monkeypatch.setattr(BatchStore, "save", save_late)
        async with running(tmp_path / "d", rows) as front:
            batch_id = await begin(front.client(), *ROWS)
            assert front.runner is not None
            batches = front.runner.store.batches
            await until(lambda: batches[batch_id].output_file_id)
            assert (await front.client().batches.retrieve(batch_id)).status == "finalizing"
            may_save.set()
            assert (await end_of(front.client(), batch_id)).status == "completed"
            record = tmp_path / "d" / "batches" / f"{batch_id}.json"
            assert json.loads(record.read_bytes())["status"] == "completed"

    run(work())


def test_ended_batches_are_forgotten_with_their_answers(tmp_path: Path) -> None:
    async def work() -> None:
        rows = Rows()
        rows.let()
        longer = {"anchor": "created_at", "seconds": 180_000}
        async with running(tmp_path / "d", rows) as front:
            client = front.client()
            ids = [await begin(client, row("x"), **given) for given in ({}, {"output_expires_after": longer})]
            ids.append(await begin(client, "no row"))
            batches = [await end_of(client, name) for name in ids]
            outputs = [await client.files.retrieve(batch.output_file_id) for batch in batches[:2]]
            assert [file.expires_at - file.created_at for file in outputs] == [90_000, 180_000]
        for seconds, left in ((89_000, ids), (100_000, ids[1:2]), (181_000, [])):
            async with running(tmp_path / "d", rows, now=lambda seconds=seconds: time.time() + seconds) as front:
                assert front.runner is not None
                kept = tmp_path / "d" / "batches"
                await until(lambda left=left, kept=kept: {path.stem for path in kept.iterdir()} == set(left))
                assert {one.id async for one in front.client().batches.list()} == set(left)

    run(work())
