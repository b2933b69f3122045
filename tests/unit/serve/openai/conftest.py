"""A server of chats for the tests of one file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from chat_server import ChatServer, make_chat_server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChatServer]:
    """With a made-up checkpoint that speculates."""
    with make_chat_server(tmp_path_factory.mktemp("chats")).running() as server:
        yield server
