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
        # A socket object of its own: that of an event loop does not know every option.
        with socket.socket(fileno=os.dup(writer.get_extra_info("socket").fileno())) as connection:
            is_stranger = not is_own(connection)
        if is_stranger:
            writer.close()
        else:
            await serve(reader, writer)

    listening = socket.socket(socket.AF_UNIX)
    listening.bind(_address(name))
    return await asyncio.start_unix_server(serve_own, sock=listening)


def connect(name: str) -> socket.socket:
    """Connect to a process of this user's.

    Raises:
        OSError: nobody listens there, or another user does.
    """
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(_address(name))
        if not is_own(connection):
            raise PermissionError(None, "another user listens there")
    except OSError:
        connection.close()
        raise
    return connection


def is_own(connection: socket.socket) -> bool:
    """Whether the process on the other side is this user's."""
    told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(told)[1] == os.geteuid())


def _address(name: str) -> str:
    return "\0" + name.removeprefix(_MARK)
