"""Refusals, whatever the protocol: why a request is not answered, as a kind and one line. Protocols give each kind
their number, those over HTTP the same one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import Enum, auto

from trtrun.errors import (
    InvalidFieldError,
    InvalidRequestError,
    LibraryPanicError,
    PromptTooLongError,
    TrtrunError,
)


class Kind(Enum):
    """What went wrong, as far as a client can do something about it."""

    INVALID = auto()
    """The request is wrong: the same one will be refused again."""

    UNKNOWN_MODEL = auto()
    """There is no model of that name."""

    UNAUTHORIZED = auto()
    """It has no key, or none that is known."""

    TOO_LARGE = auto()
    """It has more bytes than are read."""

    BUSY = auto()
    """As many are in work as may be; it is welcome later."""

    UNAVAILABLE = auto()
    """The engine is starting or hangs, or the server is ending."""

    TIMEOUT = auto()
    """It was not done in time."""

    FAILED = auto()
    """It was begun and lost, for no fault of its own."""


HTTP_STATUS: Mapping[Kind, int] = {
    Kind.INVALID: 400,
    Kind.UNAUTHORIZED: 401,
    Kind.UNKNOWN_MODEL: 404,
    Kind.TOO_LARGE: 413,
    Kind.BUSY: 429,
    Kind.FAILED: 500,
    Kind.UNAVAILABLE: 503,
    Kind.TIMEOUT: 504,
}
"""The status of each kind, in every protocol over HTTP; metrics count all protocols' refusals by it."""


class Refusal(TrtrunError):
    """A request that is not answered, or not any further.

    Attributes:
        kind: what went wrong.
        field: of the request, that is wrong; None where it is none, or not a single one.
        code: a word for programs; None where the kind says it all.
        retry_after: seconds after which another try makes sense; None where none does.
    """

    def __init__(
        self, kind: Kind, line: str, field: str | None = None, code: str | None = None, retry_after: int | None = None
    ) -> None:
        super().__init__(line)
        self.kind = kind
        self.field = field
        self.code = code
        self.retry_after = retry_after


def retry_headers(refusal: Refusal) -> dict[str, str]:
    """The header that says when another try makes sense, where one does."""
    return {} if refusal.retry_after is None else {"retry-after": str(refusal.retry_after)}


@contextmanager
def wrap_errors() -> Iterator[None]:
    """Turn what is found to be wrong with a request, and what a library gives up on, into a Refusal; its field is the
    one that the error's line begins with, where the error does not name it."""
    try:
        yield
    except InvalidFieldError as error:
        raise Refusal(Kind.INVALID, str(error), error.field, error.code) from None
    except PromptTooLongError as error:
        raise Refusal(Kind.INVALID, str(error), "prompt", "context_length_exceeded") from None
    except LibraryPanicError as error:
        raise Refusal(Kind.INVALID, f"what the request has cannot be read: {error}") from None
    except InvalidRequestError as error:
        field, _, _ = str(error).partition(":")
        raise Refusal(Kind.INVALID, str(error), field if field.isidentifier() else None) from None


RETRY_SECONDS = 1
"""Seconds after which a client that was turned away may try again: a queue moves with every completion that ends."""

RESTART_RETRY_SECONDS = 5
"""Seconds to wait while the engine starts, or hangs, and while the server ends: another may stand in for it."""


def engine_starting() -> Refusal:
    """What a request is told while there is no engine."""
    return Refusal(
        Kind.UNAVAILABLE, "the engine is starting: send the request again later", code="engine_starting",
        retry_after=RESTART_RETRY_SECONDS,
    )  # fmt: skip


def server_ending(successor: str | None = None) -> Refusal:
    """What a request is told that comes too late, or is not done when the server's time is over.

    Args:
        successor: where the server that follows listens; None where none does.
    """
    line = "the server is ending" + ("" if successor is None else f": send the request again to {successor}")
    return Refusal(Kind.UNAVAILABLE, line, code="server_ending", retry_after=RESTART_RETRY_SECONDS)


def out_of_time(seconds: float) -> Refusal:
    """What a request is told that was not done in time."""
    return Refusal(
        Kind.TIMEOUT, f"the request was not done within {seconds:g} s (server.request_timeout_s)", code="timeout"
    )
