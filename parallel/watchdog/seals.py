"""The seals of messages between two processes that know the same token: who wrote a message, and where it belongs.

A seal is a keyed hash (RFC 2104) of a message's number and text. Each connection has a key for either direction, made
of the token and of a nonce of each side. So a message that somebody between the two has written, changed, repeated,
left out, moved, turned around or taken from another connection does not bear the seal that its place calls for. Texts
are not secret; token and keys never cross the network. It does not know sockets, nor what messages say.
"""

from __future__ import annotations

import hmac
import re
import secrets

_HASH = "sha256"
_NONCE = re.compile(rb"[0-9a-f]{32}")
_NUMBER_BYTES = 8


class Seal:
    """One direction of one connection; both of its ends have one, and count along."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._number = 0

    def close(self, text: bytes) -> bytes:
        """The next message of this direction: its seal before its text."""
        return self._next_seal(text) + b" " + text

    def open(self, message: bytes) -> bytes:
        """The text of the next message of this direction.

        Raises:
            ValueError: this is not it. The connection is of no use then.
        """
        given, _, text = message.partition(b" ")
        if not hmac.compare_digest(given, self._next_seal(text)):
            raise ValueError("a message without the seal that it should bear")
        return text

    def _next_seal(self, text: bytes) -> bytes:
        number = self._number.to_bytes(_NUMBER_BYTES, "big")
        self._number += 1
        return hmac.digest(self._key, number + text, _HASH).hex().encode()


def make_nonce() -> bytes:
    """A side's part of a connection's keys, never the same twice."""
    return secrets.token_hex(16).encode()


def is_nonce(word: bytes) -> bool:
    """Whether a word has the form of a nonce."""
    return _NONCE.fullmatch(word) is not None


def make_seals(token: str, server_nonce: bytes, client_nonce: bytes) -> tuple[Seal, Seal]:
    """The seals of one connection: of what the server sends, and of what the client does."""

    def make(direction: bytes) -> Seal:
        return Seal(hmac.digest(token.encode(), b" ".join((direction, server_nonce, client_nonce)), _HASH))

    return make(b"server"), make(b"client")
