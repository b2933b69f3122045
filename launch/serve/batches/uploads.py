"""Files as they are uploaded: from the form of a request to the disk, a piece in memory at a time."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

from starlette.requests import Request

from launch.serve.admission.refusals import Kind, Refusal
from launch.serve.batches.records import FileRecord, new_file_id
from launch.serve.batches.store import BatchStore
from launch.serve.http.bodies import BODY_SECONDS, is_compressed
from launch.serve.http.multipart import read_boundary, read_pieces
from trtrun.core.values import show_value
from trtrun.files import write_all

_PURPOSE = "batch"
_FIELDS = ("purpose", "expires_after[anchor]", "expires_after[seconds]")
_LONGEST_FIELD, _LONGEST_NAME = 256, 255
_FORM_BYTES = 1 << 16
"""Of a form, beside its file."""

_WRITTEN_BYTES = 1 << 20
_KEPT_SECONDS = 30 * 86400
"""How long an uploaded file is kept that does not say it, as OpenAI has it."""

_SHORTEST, _LONGEST = 3600, 30 * 86400


class Uploads:
    """Takes in files."""

    def __init__(self, most_bytes: int) -> None:
        """Take files of so many bytes, at most."""
        self._most_bytes = most_bytes

    async def take(self, request: Request, store: BatchStore, owner: str) -> FileRecord:
        """Keep the file of a request.

        Raises:
            Refusal: it is no such form, or too large, or does not come.
            OSError: it cannot be written.
        """
        if is_compressed(request.headers.get("content-encoding", "")):
            raise Refusal(Kind.INVALID, "a file is sent as it is, without Content-Encoding")
        boundary = read_boundary(request.headers.get("content-type", ""))
        length = request.headers.get("content-length", "")
        if length.isdecimal() and int(length) > self._most_bytes + _FORM_BYTES:
            raise self._too_large()
        file_id = new_file_id()
        path = store.upload_path(file_id)
        try:
            fields, filename, size = await self._read(request, boundary, store, path)
            seconds = _KEPT_SECONDS
            if any(name.startswith("expires_after") for name in fields):
                given = fields.get("expires_after[seconds]", "")
                asked = {
                    "anchor": fields.get("expires_after[anchor]"),
                    "seconds": int(given) if given.isdecimal() else given,
                }
                seconds = read_expiry(asked, "expires_after") or seconds
            if fields.get("purpose") != _PURPOSE:
                line = f"purpose must be {_PURPOSE}, not {show_value(fields.get('purpose'))}"
                raise Refusal(Kind.INVALID, line, "purpose")
            if filename is None:
                raise Refusal(Kind.INVALID, "the form has no file: send one as the field file", "file")
            now = int(store.now())
            file = FileRecord(file_id, filename, _PURPOSE, size, now, owner, now + seconds)
            await store.add_file(file, path)
            return file
        finally:
            await store.aside(path.unlink, True)

    async def _read(
        self, request: Request, boundary: bytes, store: BatchStore, path: Path
    ) -> tuple[dict[str, str], str | None, int]:
        """The fields of a form, the name of its file, and how long that is."""
        fields: dict[str, str] = {}
        filename: str | None = None
        size, unwritten = 0, bytearray()
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            async with aclosing(read_pieces(_chunks_of(request), boundary)) as pieces:
                async for piece in pieces:
                    if piece.name == "file":
                        filename = filename or _clean_name(piece.filename)
                        size += len(piece.data)
                        unwritten += piece.data
                        if size > self._most_bytes:
                            raise self._too_large()
                        if len(unwritten) >= _WRITTEN_BYTES:
                            await store.aside(write_all, file, bytes(unwritten))
                            unwritten.clear()
                        continue
                    if piece.name not in _FIELDS:
                        line = f"unknown field {show_value(piece.name)} (known: file, {', '.join(_FIELDS)})"
                        raise Refusal(Kind.INVALID, line, piece.name[:100], "unknown_field")
                    value = fields.get(piece.name, "") + piece.data.decode(errors="replace")
                    if len(value) > _LONGEST_FIELD:
                        raise Refusal(Kind.INVALID, f"{piece.name} is too long", piece.name)
                    fields[piece.name] = value
            await store.aside(write_all, file, bytes(unwritten))
            await store.aside(os.fsync, file)
        finally:
            os.close(file)
        return fields, filename, size

    def _too_large(self) -> Refusal:
        line = f"the file is larger than {self._most_bytes} bytes (server.max_batch_file_bytes)"
        return Refusal(Kind.TOO_LARGE, line, "file")


def read_expiry(value: object, name: str) -> int | None:
    """Seconds from the making of a file to its end; None where none are asked for.

    Args:
        value: as a client has sent it.
        name: of the field.

    Raises:
        Refusal: it is none that may be.
    """
    if value is None:
        return None
    seconds = value.get("seconds") if isinstance(value, dict) else None
    is_known = isinstance(value, dict) and value.keys() == {"anchor", "seconds"} and value["anchor"] == "created_at"
    if not is_known or type(seconds) is not int or not _SHORTEST <= seconds <= _LONGEST:
        line = f'{name} must be {{"anchor": "created_at", "seconds": {_SHORTEST} to {_LONGEST}}}'
        raise Refusal(Kind.INVALID, line, name)
    return seconds


async def _chunks_of(request: Request) -> AsyncIterator[bytes]:
    """The chunks of a body, each of which has its time to come."""
    async with aclosing(request.stream()) as chunks:
        while True:
            try:
                async with asyncio.timeout(BODY_SECONDS):
                    chunk = await anext(chunks)
            except StopAsyncIteration:
                return
            except TimeoutError:
                line = f"nothing more of the file has come for {BODY_SECONDS:g} s"
                raise Refusal(Kind.TIMEOUT, line, code="timeout") from None
            yield chunk


def _clean_name(name: str | None) -> str:
    """A file's name as clients are told it: never a path."""
    last = (name or "").replace("\\", "/").rpartition("/")[2]
    return "".join(letter for letter in last if letter.isprintable())[:_LONGEST_NAME] or "rows.jsonl"
