"""The socket between front and engine: who may use it, and what it leaves behind."""

from __future__ import annotations

import asyncio
import os

import pytest

from launch.serve.engine import handshake as engine_socket


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(await reader.read(5))
    writer.close()


def test_own_processes_reach_each_other_and_the_name_goes_with_its_listener() -> None:
    async def work() -> None:
        name = engine_socket.make_name()
        server = await engine_socket.listen(name, echo)
        reader, writer = await asyncio.open_unix_connection(sock=engine_socket.connect(name))
        writer.write(b"hello")
        assert await reader.read() == b"hello"
        writer.close()
        server.close()
        with pytest.raises(ConnectionRefusedError):
            engine_socket.connect(name)

    asyncio.run(work())


@pytest.mark.parametrize("stranger", ["the listener", "the one who connects"])
def test_another_users_process_is_not_heard(stranger: str) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to become another user")

    async def work() -> None:
        name = engine_socket.make_name()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"heard")
            writer.close()

        # The kernel keeps who listened and who connected, whoever they are afterwards.
        if stranger == "the listener":
            os.seteuid(65534)
        server = await engine_socket.listen(name, serve)
        os.seteuid(0 if stranger == "the listener" else 65534)
        if stranger == "the listener":
            with pytest.raises(PermissionError):
                engine_socket.connect(name)
        else:
            reader, writer = await asyncio.open_unix_connection("\0" + name.removeprefix("@"))
            os.seteuid(0)
            assert await reader.read() == b""
            writer.close()
        server.close()

    try:
        asyncio.run(work())
    finally:
        os.seteuid(0)
