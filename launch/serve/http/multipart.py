"""Bodies of forms with files (multipart/form-data, RFC 7578), read piece by piece: a file of any size takes the memory
of one piece.

It knows the format, not which fields a form has or where a file goes.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from urllib.parse import unquote_to_bytes

from launch.serve.admission.refusals import Kind, Refusal
from trtrun.core.values import show_value

MOST_HEAD_BYTES = 1 << 13
"""Bytes of the header fields of one part."""

MOST_PARTS = 64
"""Parts of a form."""

_BOUNDARY = re.compile(r'multipart/form-data\s*;(?:.*;)?\s*boundary=(?:"([^"]{1,70})"|([^\s;"]{1,70}))', re.IGNORECASE)
_DISPOSITION = re.compile(rb"^content-disposition:\s*form-data\s*;(.*)$", re.IGNORECASE | re.MULTILINE)
_PARAMETER = re.compile(rb';\s*(name|filename)=(?:"((?:\\.|[^"\\])*)"|([^\s;"]+))', re.IGNORECASE)


@dataclass(frozen=True)
class Piece:
    """A piece of one part of a form.

    Attributes:
        name: of the field.
        filename: None where the field is no file.
        data: the next bytes of its value; each part has at least one piece.
    """

    name: str
    filename: str | None
    data: bytes


def read_boundary(content_type: str) -> bytes:
    """What stands between the parts, by the header Content-Type.

    Raises:
        Refusal: the body is no form.
    """
    found = _BOUNDARY.match(content_type.strip())
    if found is None:
        raise _wrong("send the file as multipart/form-data, with the fields file and purpose")
    return (found[1] or found[2]).encode("latin-1", errors="replace")


async def read_pieces(chunks: AsyncIterator[bytes], boundary: bytes) -> AsyncGenerator[Piece]:
    """The parts of a form, in order.

    Args:
        chunks: of the body.
        boundary: between the parts.

    Raises:
        Refusal: the body is not such a form, has two parts of one name, or ends early.
    """
    between, buffer, names = b"\r\n--" + boundary, bytearray(b"\r\n"), set[str]()
    part: Piece | None = None  # before the first part there may be anything
    is_in_head = False
    async for chunk in chunks:
        buffer += chunk
        while True:
            if is_in_head:
                if buffer.startswith(b"--"):
                    return  # what follows the end is nothing
                end = buffer.find(b"\r\n\r\n")
                if end > MOST_HEAD_BYTES or (end < 0 and len(buffer) > MOST_HEAD_BYTES):
                    raise _wrong(f"the header fields of a part have more than {MOST_HEAD_BYTES} bytes")
                if end < 0:
                    break
                if len(names) == MOST_PARTS:
                    raise _wrong(f"the form has more than {MOST_PARTS} parts")
                part, is_in_head = _read_head(bytes(buffer[:end])), False
                if part.name in names:
                    line = f"the form has two parts called {show_value(part.name)}: send one"
                    raise Refusal(Kind.INVALID, line, part.name[:100])
                names.add(part.name)
                del buffer[: end + 4]
            end = buffer.find(between)
            data = bytes(buffer[: end if end >= 0 else max(0, len(buffer) - len(between))])
            if part is not None and (data or end >= 0):
                yield Piece(part.name, part.filename, data)
            if end < 0:
                del buffer[: len(data)]
                break
            del buffer[: end + len(between)]
            is_in_head = True
    raise _wrong("the form ends before its last boundary")


def _read_head(head: bytes) -> Piece:
    """A part without data, by its header fields."""
    disposition = _DISPOSITION.search(head)
    values = {} if disposition is None else _parameters(b";" + disposition[1])
    if "name" not in values:
        raise _wrong("a part of the form has no name")
    return Piece(values["name"], values.get("filename"), b"")


def _parameters(text: bytes) -> dict[str, str]:
    found = {}
    for name, quoted, plain in _PARAMETER.findall(text):
        value = re.sub(rb"\\(.)", rb"\1", quoted) or plain
        found[name.decode().lower()] = unquote_to_bytes(value).decode(errors="replace")
    return found


def _wrong(line: str) -> Refusal:
    return Refusal(Kind.INVALID, line)
