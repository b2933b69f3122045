"""The socket between front and engine: a name that lies in no folder, and a look at who is on the other side.

The kernel forgets the name with its last listener, so that a front that is killed leaves nothing behind. Such names
have no file's permissions; instead each side asks the kernel whose process the other one is. Linux alone has them. It
does not know what is said over the socket.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import struct
from collections.abc import Awaitable, Callable

_CREDENTIALS = struct.Struct("3i")
"""Process, user and group of the other side."""

_MARK = "@"
"""Begins names where people read them; to the kernel it is a zero byte."""


def make_name() -> str:
    """A name that nobody has yet, and that nobody guesses."""
    return f"{_MARK}trtrun-serve-{secrets.token_hex(16)}"


async def listen(
    name: str, serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
) -> asyncio.Server:
    """Serve each connection of this user's own processes; others are closed unheard."""

    async def serve_own(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if is_own(writer.get_extra_info("socket")):
            await serve(reader, writer)
        else:
            writer.close()

    return await asyncio.start_unix_server(serve_own, _address(name))


async def connect(name: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to a process of this user's.

    Raises:
        OSError: nobody listens there, or another user does.
    """
    reader, writer = await asyncio.open_unix_connection(_address(name))
    if not is_own(writer.get_extra_info("socket")):
        writer.close()
        raise PermissionError(None, "another user listens there")
    return reader, writer


def is_own(connection: socket.socket) -> bool:
    """Whether the process on the other side is this user's."""
    told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(told)[1] == os.geteuid())


def _address(name: str) -> str:
    return "\0" + name.removeprefix(_MARK)
