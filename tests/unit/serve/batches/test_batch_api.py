"""What may be uploaded and asked for, by OpenAI's own client."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from batch_servers import MOST_BYTES, Front, Rows, begin, end_of, row, running, until, upload

from launch.serve.admission.refusals import Refusal
from launch.serve.batches.rows import RowError, read_row
from launch.serve.batches.store import prepare_directory
from launch.serve.http.multipart import read_boundary, read_pieces
from trtrun.errors import ConfigError


def run(work: Any) -> None:
    asyncio.run(asyncio.wait_for(work, 90))


def form(boundary: str, *parts: tuple[str, bytes]) -> bytes:
    told = b"".join(
        f"--{boundary}\r\nContent-Disposition: form-data; {head}\r\n\r\n".encode() + data + b"\r\n"
        for head, data in parts
    )
    return b"not a part\r\n" + told + f"--{boundary}--\r\nnor this".encode()


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 10_000])
def test_forms_are_read_however_they_are_cut(size: int) -> None:
    content = b"\r\n--bb\r\r\n-\r\n--b\n" * 3
    body = form(
        "bbb", ('name="purpose"', b"batch"), ('name="file"; filename="a\\"b%22.jsonl"', content), ("name=x", b"")
    )

    async def chunks() -> AsyncIterator[bytes]:
        for start in range(0, len(body), size):
            yield body[start : start + size]

    async def work() -> None:
        found: dict[tuple[str, str | None], bytes] = {}
        async for piece in read_pieces(chunks(), read_boundary('Multipart/Form-Data; charset=x; boundary="bbb"')):
            found[piece.name, piece.filename] = found.get((piece.name, piece.filename), b"") + piece.data
        assert found == {("purpose", None): b"batch", ("file", 'a"b".jsonl'): content, ("x", None): b""}

    run(work())


def test_forms_that_are_none_are_refused() -> None:
    async def read(body: bytes) -> None:
        async def chunks() -> AsyncIterator[bytes]:
            yield body

        async for _ in read_pieces(chunks(), b"b"):
            pass

    for body, line in (
        (form("b", ('name="x"', b"y"))[:-12], "ends before"),
        (form("b", ("filename=x", b"y")), "has no name"),
        (form("b", ('name="x"', b"y")).replace(b"form-data", b"a" * 9000), "more than 8192 bytes"),
        (form("b", *[(f'name="x{number}"', b"y") for number in range(65)]), "more than 64 parts"),
        (form("b", ('name="file"', b"y"), ('name="x"', b"y"), ("name=file", b"")), 'two parts called "file": send one'),
    ):
        with pytest.raises(Refusal, match=line):
            run(read(body))
    with pytest.raises(Refusal, match="multipart/form-data"):
        read_boundary("application/json")


def test_files_are_kept_listed_and_deleted(tmp_path: Path) -> None:
    async def work() -> None:
        async with running(tmp_path / "d", Rows()) as front:
            client = front.client()
            content = b"\r\n\x00\xff" * 500
            file = await client.files.create(
                file=("../../etc/passwd", content),
                purpose="batch",
                expires_after={"anchor": "created_at", "seconds": 3600},
            )
            assert (file.filename, file.bytes, file.purpose) == ("passwd", len(content), "batch")
            assert file.expires_at == file.created_at + 3600
            assert (await client.files.content(file.id)).content == content
            others = [await upload(client, row("x")) for _ in range(3)]
            listed = [one.id async for one in client.files.list(limit=2, order="asc")]
            assert listed == [file.id, *others]
            assert (await client.files.list(purpose="batch_output")).data == []
            for name in ("../lock", "lock", f"{file.id}.json", "file-0"):
                with pytest.raises(openai.NotFoundError):
                    await client.files.retrieve(name)
            assert (await client.files.delete(file.id)).deleted
            with pytest.raises(openai.NotFoundError):
                await client.files.content(file.id)
            (tmp_path / "d" / "files" / "file-cut.part").write_bytes(b"of an upload that a kill has cut")
        async with running(tmp_path / "d", Rows(), now=lambda: 1e10):  # all have expired
            await until(lambda: not list((tmp_path / "d" / "files").iterdir()))

    run(work())


def test_lists_have_their_order_after_a_restart(tmp_path: Path) -> None:
    async def work() -> None:
        rows = Rows()
        rows.let()
        lists = []
        for number in range(3):
            async with running(tmp_path / "d", rows) as front:
                client = front.client()
                if not number:
                    for name in range(6):
                        await end_of(client, await begin(client, row(f"{name}")))
                files = [file.id async for file in client.files.list(limit=5)]
                lists.append((files, [batch.id async for batch in client.batches.list(limit=5)]))
        assert len(lists[0][0]) == 12 and lists[0] == lists[1] == lists[2]

    run(work())


def test_uploads_that_are_wrong_leave_nothing(tmp_path: Path) -> None:
    async def work() -> None:
        async with running(tmp_path / "d", Rows()) as front:
            client = front.client()
            with pytest.raises(openai.APIStatusError, match="max_batch_file_bytes") as told:
                await client.files.create(file=("x", b"x" * (MOST_BYTES + 1)), purpose="batch")
            assert told.value.status_code == 413
            for fields, line in (
                ({"purpose": "vision"}, "purpose must be batch"),
                (
                    {"purpose": "batch", "expires_after": {"anchor": "created_at", "seconds": 5}},
                    "expires_after must be",
                ),
                ({"purpose": "batch", "extra_body": {"colour": "red"}}, "unknown field"),
            ):
                with pytest.raises(openai.BadRequestError, match=line):
                    await client.files.create(file=("x", b"x"), **fields)
            transport = httpx.ASGITransport(front.application)
            async with httpx.AsyncClient(transport=transport, base_url="http://x") as plain:
                assert "no file" in (await plain.post("/v1/files", files={"purpose": (None, "batch")})).text
                assert "multipart" in (await plain.post("/v1/files", json={})).text
            (tmp_path / "d" / "files").rename(tmp_path / "away")
            with pytest.raises(
                openai.InternalServerError, match="cannot write to the server's batch directory: No such"
            ):
                await client.files.create(file=("x", b"x"), purpose="batch")
        assert not list((tmp_path / "away").iterdir())

    run(work())


def test_batches_that_are_wrong_are_refused_by_field(tmp_path: Path) -> None:
    async def work() -> None:
        rows = Rows()
        async with running(tmp_path / "d", rows) as front:
            client = front.client()
            file_id = await upload(client, row("x"))
            good: dict[str, Any] = {"endpoint": "/v1/completions", "completion_window": "24h", "input_file_id": file_id}
            for field, value, line in (
                ("endpoint", "/v1/embeddings", "endpoint must be /v1/completions or"),
                ("completion_window", "1h", "completion_window must be 24h"),
                ("metadata", {"x": "y" * 513}, "metadata must be"),
                ("input_file_id", None, "input_file_id must be the id of a file"),
                ("output_expires_after", {"anchor": "created_at", "seconds": 1}, "output_expires_after must be"),
                ("extra_body", {"endpint": 1}, "did you mean 'endpoint'"),
            ):
                with pytest.raises(openai.BadRequestError, match=line):
                    await client.batches.create(**good | {field: value})
            async with httpx.AsyncClient(transport=httpx.ASGITransport(front.application)) as plain:
                half = await plain.post("http://x/v1/batches", content=json.dumps(good | {"metadata": {"\ud800": "x"}}))
                assert half.status_code == 400 and "metadata holds \\\\ud800" in half.text
            rows.let()
            batch_id = await begin(client, row("x"))
            batch = await end_of(client, batch_id)
            with pytest.raises(openai.BadRequestError, match="purpose batch, and"):
                await client.batches.create(**good | {"input_file_id": batch.output_file_id})
            with pytest.raises(openai.BadRequestError, match="is completed"):
                await client.batches.cancel(batch_id)
            for limit in (101, f"1{'0' * 5000}", "0000000019"):
                with pytest.raises(openai.BadRequestError, match="limit must be 1 to 100"):
                    await client.batches.list(extra_query={"limit": limit})
            with pytest.raises(openai.NotFoundError) as missing:
                await client.batches.create(**good | {"input_file_id": "file-0"})
            assert missing.value.param == "input_file_id"

    run(work())


@pytest.mark.parametrize(
    ("content", "code", "line"),
    [
        (row("x").encode("utf-16"), "invalid_file", "the file is UTF-16 text: write it as UTF-8"),
        (gzip.compress(row("x").encode(), mtime=0), "invalid_file", r"the file is compressed \(gzip\): unpack"),
        (b"\n \n", "empty_file", "the file has no rows"),
        (b"\0" * 99, "invalid_json_line", "invalid character"),
    ],
    ids=["UTF-16", "gzip", "empty", "no text"],
)
def test_files_that_are_no_rows_are_told_by_what_they_are(tmp_path: Path, content: bytes, code: str, line: str) -> None:
    async def work() -> None:
        async with running(tmp_path / "d", Rows()) as front:
            client = front.client()
            file = await client.files.create(file=("x", content), purpose="batch")
            batch = await client.batches.create(
                input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
            )
            ended = await end_of(client, batch.id)
            (error,) = ended.errors.data
            assert (ended.status, error.code) == ("failed", code) and re.search(line, error.message)

    run(work())


def test_a_row_that_is_nested_deeply_is_wrong() -> None:
    with pytest.raises(RowError, match="nested too deeply"):
        read_row(row("x", body="[").replace('"["', "[" * 3000 + "]" * 3000).encode())


def test_without_a_directory_the_key_is_named(tmp_path: Path) -> None:
    async def work() -> None:
        client = Front(None, Rows()).client()
        for asked in (client.files.list, client.batches.list):
            with pytest.raises(openai.NotFoundError, match=r"set server\.batch_directory"):
                await asked()

    run(work())
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(ConfigError, match="is open to other users: chmod 700 it"):
        prepare_directory(tmp_path / "open")
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name in ("file", "loop"):
        with pytest.raises(ConfigError, match=rf"{name} is there, and is no directory"):
            prepare_directory(tmp_path / name)
    with pytest.raises(ConfigError, match=r"cannot use /proc/x: No such .*; it must be a directory to write to"):
        prepare_directory(Path("/proc/x"))


def test_a_directory_that_cannot_be_read_is_told_until_it_can(tmp_path: Path) -> None:
    async def work() -> None:
        front = Front(tmp_path / "d", Rows())
        wrong = tmp_path / "d" / "batches" / "batch_0.json"
        wrong.mkdir()
        assert front.runner is not None
        front.runner.start()
        await until(lambda: front.runner is not None and front.runner.failure)
        with pytest.raises(openai.InternalServerError, match=r"batch_directory of this server cannot be read"):
            await front.client().files.list()
        wrong.rmdir()
        await until(lambda: front.runner is not None and front.runner.is_there)
        assert (await front.client().files.list()).data == []
        await front.runner.close()

    run(work())
