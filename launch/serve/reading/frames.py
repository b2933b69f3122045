"""Messages between the front and its readers, as bytes: MessagePack behind its length, and blocks behind that.

    4 bytes, big-endian: length of the message │ the message │ 8 bytes: length of the block │ the block     a task
    4 bytes, big-endian: length of the message │ the message │ its blocks, as long as it says               a reply

Both ends are this program's own. It does not know what messages mean.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from launch.serve.reading.messages import Facts, Reply, Task

HEAD_BYTES = 4
"""Of the length of a message."""

BLOCK_HEAD_BYTES = 8
"""Of the length of a task's block."""

_ENCODER = msgspec.msgpack.Encoder()
M = TypeVar("M", Facts, Task, Reply)


def pack(message: Facts | Task | Reply) -> bytes:
    """A message behind its length."""
    body = _ENCODER.encode(message)
    return len(body).to_bytes(HEAD_BYTES, "big") + body


def unpack(body: bytes, kind: type[M]) -> M:
    """A message again; the process that sent it is one of this program's.

    Raises:
        msgspec.DecodeError: it is none of that kind.
    """
    return msgspec.msgpack.decode(body, type=kind)
