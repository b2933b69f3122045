"""Asks a server of trtrun over HTTP: what it serves, and answers piece by piece.

An answer that is not read to its end is given up: its connection is closed, and the server frees its row. It does not
know what becomes of the pieces.
"""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from typing_extensions import override

from launch.exit_codes import FailedError
from launch.jobs.batch.reach import socket_path
from trtrun.errors import ConfigError, TrtrunError, why_unreadable

CONNECT_SECONDS = 60.0
"""For a connection, and between two pieces of an answer to anything but a chat."""

NO_TEMPLATE = "the model has no chat template: use trtrun run, or add chat_template.jinja to its tokenizer's directory"


class AnswerError(TrtrunError):
    """The server does not answer this conversation, and says why; it may answer another one."""


@dataclass(frozen=True)
class Piece:
    """What a round added to an answer.

    Attributes:
        text, thoughts: what it says, and what the model thinks before.
        origins: a letter for each token, as `token_origins` of the API.
    """

    text: str
    thoughts: str
    origins: str


class ChatClient:
    """One server.

    Attributes:
        url: of it.
        model: that it serves; known once `look` has asked.
    """

    def __init__(self, url: str, key: str | None = None, find_url: Callable[[], str] | None = None) -> None:
        """Ask nothing yet.

        Args:
            url: `http://host:port`, perhaps with a path before the API's own, or `unix:///PATH` of a socket.
            key: of the server's `server.api_key_file`.
            find_url: says where the server is by now, before each answer; None where it stays where it is.

        Raises:
            ConfigError: it is no address of that kind.
        """
        self._find_url = find_url
        self.model = ""
        self._headers = {"content-type": "application/json"}
        if key is not None:
            self._headers["authorization"] = f"Bearer {key}"
        self._turn_to(url)

    def _turn_to(self, url: str) -> None:
        wrong = f"--url must be such as http://127.0.0.1:8000 or unix:///PATH, not {url!r}"
        try:
            parts = urlsplit(url)
        except ValueError:  # such as half of an address of IPv6
            raise ConfigError(wrong) from None
        is_socket = parts.scheme == "unix" and not parts.netloc and bool(parts.path.strip("/"))
        if not is_socket and (parts.scheme not in ("http", "https") or not parts.hostname):
            raise ConfigError(wrong)
        self.url = url
        self._parts = parts
        self._path = "" if is_socket else parts.path.rstrip("/").removesuffix("/v1")

    def look(self) -> None:
        """Find out what is served.

        Raises:
            ConfigError: nobody answers, the key is wrong, or the model has no chat template.
        """
        try:
            with closing(self._connect(CONNECT_SECONDS)) as connection:
                status = self._get(connection, "/status")
                models = self._get(connection, "/v1/models")
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = why_unreadable(error) or type(error).__name__
            raise ConfigError(f"no server of trtrun answers at {self.url}: {reason}") from None
        if status.get("chat") is False:
            raise ConfigError(NO_TEMPLATE)
        self.model = str(models["data"][0]["id"])

    def _get(self, connection: http.client.HTTPConnection, path: str) -> dict[str, Any]:
        connection.request("GET", self._path + path, headers=self._headers)
        response = connection.getresponse()
        values = json.loads(response.read())
        if response.status in (401, 403):
            raise ConfigError(f"{self.url} wants an API key: name a file with it, --api-key-file")
        if response.status != 200 or not isinstance(values, dict):
            raise ValueError(f"status {response.status} for {path}")
        return values

    def answer(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> Generator[Piece, None, None]:
        """The pieces of an answer as they come. Closing the iterator ends the request.

        Args:
            messages: the conversation.
            options: further fields of the request.

        Raises:
            AnswerError: the server refuses it, or loses it.
            FailedError: the server is gone.
        """
        if self._find_url is not None:
            self._turn_to(self._find_url())
        body = {"messages": messages, "stream": True, "return_token_origins": True, **options}
        with closing(self._connect(None)) as connection:
            try:
                connection.request("POST", f"{self._path}/v1/chat/completions", json.dumps(body), self._headers)
                response = connection.getresponse()
                if response.status != 200:
                    raise AnswerError(_message(response.read(), response.status))
                for line in response:
                    if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                        yield from _pieces(json.loads(line[6:]))
            except (OSError, http.client.HTTPException) as error:
                raise FailedError(f"the server at {self.url} is gone: {error or type(error).__name__}") from None

    def _connect(self, seconds: float | None) -> http.client.HTTPConnection:
        path = socket_path(self.url)
        if path is not None:
            return _SocketConnection(path, seconds)
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        assert self._parts.hostname is not None
        return kind(self._parts.hostname, self._parts.port, timeout=seconds)


class _SocketConnection(http.client.HTTPConnection):
    """A connection to a file."""

    def __init__(self, path: str, seconds: float | None) -> None:
        super().__init__("localhost", timeout=seconds)
        self._socket_path = path

    @override
    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._socket_path)


def _pieces(event: Mapping[str, Any]) -> Iterator[Piece]:
    if "error" in event:
        raise AnswerError(str(event["error"].get("message")))
    for choice in event.get("choices", ()):
        delta = choice.get("delta", {})
        calls = "".join(json.dumps(call["function"], ensure_ascii=False) for call in delta.get("tool_calls") or ())
        yield Piece(
            (delta.get("content") or "") + calls,
            delta.get("reasoning_content") or "",
            choice.get("token_origins") or "",
        )


def _message(body: bytes, status: int) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return f"the server answered with status {status}"
