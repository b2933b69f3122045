"""Messages on their way over the socket between front and engine: each JSON behind its length.

    4 bytes, big-endian: length │ {"kind": "generate", "request_id": "…", …}

They are checked as they are read: a field that is missing, unknown or of another type ends the connection. It does not
know what messages mean.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator

import msgspec

from launch.serve.engine.messages import Message
from trtrun.errors import TrtrunError, one_line

MOST_BYTES = 1 << 28
"""Of one message: many times the tokens of the longest request."""

_LENGTH_BYTES = 4
_READ_BYTES = 1 << 18
_ENCODER = msgspec.json.Encoder()
_DECODER: msgspec.json.Decoder[Message] = msgspec.json.Decoder(Message)


class MessageError(TrtrunError):
    """What came over the socket is no message, or a message is too large for it."""


def encode(message: Message) -> bytes:
    """A message with its length before it.

    Raises:
        MessageError: it is too large.
    """
    body = _ENCODER.encode(message)
    if len(body) > MOST_BYTES:
        raise MessageError(f"a message of {len(body)} bytes is larger than {MOST_BYTES}, the most that is sent")
    return len(body).to_bytes(_LENGTH_BYTES, "big") + body


class MessageStream:
    """The messages that come over a connection, in their order. It reads what there is, not message by message."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader
        self._received = bytearray()
        self._messages: deque[Message] = deque()
        self._error: MessageError | None = None

    async def __aiter__(self) -> AsyncIterator[Message]:
        """Messages until the other side ends the connection.

        Raises:
            MessageError: as of `read`.
        """
        while (message := await self.read()) is not None:
            yield message

    async def read(self) -> Message | None:
        """The next message; None where the other side has ended the connection.

        Raises:
            MessageError: it is too large, or no message.
        """
        while not self._messages:
            if self._error is not None:
                raise self._error
            try:
                data = await self._reader.read(_READ_BYTES)
            except ConnectionError:
                return None
            if not data:
                return None
            self._received += data
            self._split()
        return self._messages.popleft()

    def _split(self) -> None:
        """Take whole messages off what has been received. What is wrong is told behind the messages before it."""
        received, begin = self._received, 0
        try:
            while len(received) >= begin + _LENGTH_BYTES:
                length = int.from_bytes(received[begin : begin + _LENGTH_BYTES], "big")
                if length > MOST_BYTES:
                    raise MessageError(
                        f"the other side announces a message of {length} bytes; {MOST_BYTES} are the most"
                    )
                end = begin + _LENGTH_BYTES + length
                if len(received) < end:
                    break
                self._messages.append(_decode(bytes(received[begin + _LENGTH_BYTES : end])))
                begin = end
        except MessageError as error:
            self._error = error
        del received[:begin]


def _decode(body: bytes) -> Message:
    try:
        return _DECODER.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MessageError(f"the other side sent no message that is known: {one_line(error)}") from None
