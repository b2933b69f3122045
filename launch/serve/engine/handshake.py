"""How the frontend and an engine find each other: a socket whose name lies in no folder, a look at who is on the other
side, and whether both have read the same configuration and the same files.

The kernel forgets the socket's name with its last listener, so that a frontend that is killed leaves nothing behind.
Such names have no file's permissions; instead each side asks the kernel whose process the other one is. Only Linux
has them. Nothing here imports torch.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
import socket
import struct
from collections.abc import Awaitable, Callable

from trtrun.configuration.config import RuntimeConfig
from trtrun.heads.heads import HEADS_FILES
from trtrun.lora.lora_config import hash_adapter_files
from trtrun.tokens.text import hash_tokenizer_files
from trtrun.weights.model_files import hash_model_files


def hash_config(config: RuntimeConfig) -> str:
    """Tells whether frontend and engine, or an engine and the one before it, have read the same."""
    return hashlib.sha256(config.model_dump_json().encode()).hexdigest()


def hash_files(config: RuntimeConfig) -> dict[str, str]:
    """Tells frontend and engine, or an engine and the one before it, whether they have read the same files: on this
    host, where frontend and rank 0 are, by what they are."""
    sections = {"target": config.target, "draft": config.draft}
    hashes = {
        f"the {name}'s model": hash_model_files(section.model, section.load_format != "dummy")
        for name, section in sections.items()
        if section is not None
    }
    if config.heads is not None:
        hashes["the heads"] = hash_model_files(config.heads.model, single_files=HEADS_FILES)
    hashes |= {f"the adapter {name}": hash_adapter_files(path) for name, path in config.adapters.items()}
    hashes |= {f"the draft's adapter {name}": hash_adapter_files(path) for name, path in config.draft_adapters.items()}
    return hashes | {"the tokenizer": hash_tokenizer_files(config.tokenizer or config.target.model)}


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
