"""What a client is, and one way to call it. It knows no client."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Place:
    """Where a call finds things.

    Attributes:
        python: of the client's environment.
        host, port, grpc, metrics: of the server; `url` is its HTTP.
        model: its name.
        tokenizer: directory.
        unpacked: the package's files, for a benchmark that runs without its engine.
        backend: checkout of tensorrtllm_backend.
        folder: the call's working directory.
    """

    python: str
    host: str
    port: int
    grpc: str
    metrics: str
    model: str
    tokenizer: Path
    unpacked: Path
    backend: Path
    folder: Path

    @property
    def url(self) -> str:
        """The URL of the HTTP port."""
        return f"http://{self.host}:{self.port}"


def says(*patterns: str) -> Callable[[str, Place], str]:
    """A check: what was said has to match each pattern. It returns what was looked for in vain, or nothing."""

    def check(said: str, place: Place) -> str:
        return "; ".join(f"no {pattern!r}" for pattern in patterns if not re.search(pattern, said))

    return check


@dataclass(frozen=True)
class Call:
    """One way to call a client.

    Attributes:
        name: in the table.
        words: of its command line, behind its interpreter.
        check: of what it said, where it ended with status 0.
        options: of `trtrun serve`; a call with options has a server of its own.
        variables: of its environment.
        own_server: whether it has a server of its own without options, too.
        last_words: of a client that may hang while it exits: what it says when all is done.
    """

    name: str
    words: Callable[[Place], Sequence[object]]
    check: Callable[[str, Place], str] = field(default_factory=says)
    options: Sequence[str] = ()
    variables: Callable[[Place], dict[str, str]] = lambda place: {}
    own_server: bool = False
    last_words: str = ""


@dataclass(frozen=True)
class Client:
    """One client.

    Attributes:
        name: in the table.
        version: that the table has.
        install: what pip gets for it.
        unpack: a wheel whose Python files are unpacked and not installed, and the modules of it that are its own.
        needs_backend: whether it is a script of tensorrtllm_backend.
        packages: what npm gets for it, of a client for Node.
        calls_tools: whether the server has the chat model of chat_model.py, and not the shipped pair.
    """

    name: str
    version: str
    calls: Sequence[Call]
    install: Sequence[str] = ()
    unpack: str = ""
    needs_backend: bool = False
    packages: Sequence[str] = ()
    calls_tools: bool = False
