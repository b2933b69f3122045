"""Bodies of requests: how many bytes one may have, how many all of them together, how long one may take to come; and
what they were before compression.

Each body has a limit, but so many connections may each send the largest one at once. So the bytes of all long bodies
are counted, from the moment that they are read until their request is in work or refused: a client that announces more
than there is room for is told at once, and one that sends more is told then. Short bodies are not counted, so that long
ones never keep them out; there are no more of them than connections. Of compressed bytes a few may become many, so no
more is ever made than may be.

JSON is read strictly: a key that stands twice is refused, because one of the two would be lost.
"""

from __future__ import annotations

import asyncio
import codecs
import json
import zlib
from types import TracebackType
from typing import TYPE_CHECKING

from launch.serve.admission.limits import SHORT_BODY
from launch.serve.admission.refusals import RETRY_SECONDS, Kind, Refusal
from trtrun.core.values import unique_keys
from trtrun.errors import InvalidRequestError

if TYPE_CHECKING:
    from starlette.requests import Request  # processes that parse bodies need it not

ENCODINGS = {"gzip": 16 + zlib.MAX_WBITS, "x-gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
"""What is read, with zlib's word for each."""


def is_compressed(encoding: str) -> bool:
    """Whether a body with this Content-Encoding, empty where there is none, has to be decompressed.

    Raises:
        Refusal: it is an encoding that is not read.
    """
    name = encoding.strip().lower()
    if name in ("", "identity"):
        return False
    if name not in ENCODINGS:
        raise Refusal(Kind.INVALID, "Content-Encoding may be gzip or deflate")
    return True


def decompress(raw: bytes, encoding: str, most_bytes: int) -> bytes:
    """A body as it was before compression.

    Args:
        raw: as it came.
        encoding: for which `is_compressed`.
        most_bytes: that a body may have.

    Raises:
        Refusal: it is not so encoded, or larger.
    """
    name = encoding.strip().lower()
    opened = zlib.decompressobj(ENCODINGS[name])
    try:
        found = opened.decompress(raw, most_bytes + 1)
    except zlib.error:
        raise Refusal(Kind.INVALID, f"the body is not {name}, as Content-Encoding says") from None
    if len(found) > most_bytes:
        raise Refusal(Kind.TOO_LARGE, f"the body is larger than {most_bytes} bytes (server.max_body_bytes)")
    if not opened.eof or opened.unused_data:
        raise Refusal(Kind.INVALID, f"the body is not {name} as a whole, as Content-Encoding says")
    return found


BODY_SECONDS = 60.0
"""How long a client may take to send a body."""


class Bodies:
    """All bodies of a server. It belongs to one event loop.

    Attributes:
        most_bytes: of one body.
        most_together: bytes of all bodies that are counted.
        num_bytes: of these, now.
    """

    def __init__(self, most_bytes: int, most_together: int) -> None:
        self.most_bytes = most_bytes
        self.most_together = most_together
        self.num_bytes = 0

    async def read(self, request: Request) -> Body:
        """The body of a request, decompressed; no more than `most_bytes` of it are ever held. It has to be let go.

        Raises:
            Refusal: it is too large, there is no room for it, it does not arrive, or is not what its headers say.
        """
        encoding = request.headers.get("content-encoding", "")
        has_to_grow = is_compressed(encoding)
        length = request.headers.get("content-length", "")
        if length.isdecimal():
            self._check_size(int(length))
            self.check_room(int(length))
        body, content = Body(self), bytearray()
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for chunk in request.stream():
                    content += chunk
                    self._check_size(len(content))
                    body.count(len(content))
            body.content = bytes(content)
            if has_to_grow and content:
                body.content = await asyncio.to_thread(decompress, body.content, encoding, self.most_bytes)
                body.count(len(body.content))
        except TimeoutError:
            body.let_go()
            raise Refusal(Kind.TIMEOUT, f"the body was not there within {BODY_SECONDS:g} s", code="timeout") from None
        except BaseException:
            body.let_go()
            raise
        return body

    def hold(self, num_bytes: int) -> Body:
        """Count a body that came another way. It has to be let go.

        Raises:
            Refusal: there is no room for it.
        """
        body = Body(self)
        body.count(num_bytes)
        return body

    def check_room(self, num_bytes: int, num_counted: int = 0) -> None:
        """Raise a Refusal unless there is room for a body.

        Args:
            num_bytes: of the body.
            num_counted: of these, those that are counted already.
        """
        if num_bytes > SHORT_BODY and self.num_bytes - num_counted + num_bytes > self.most_together:
            raise Refusal(
                Kind.BUSY,
                f"with {num_bytes} bytes of this request more would be read at once than the {self.most_together} that "
                "may be (server.max_total_body_bytes): send the request again later",
                code="too_many_bytes",
                retry_after=RETRY_SECONDS,
            )

    def _check_size(self, num_bytes: int) -> None:
        if num_bytes > self.most_bytes:
            raise Refusal(Kind.TOO_LARGE, f"the body is larger than {self.most_bytes} bytes (server.max_body_bytes)")


class Body:
    """A body. It is a context, at whose end the body is let go.

    Attributes:
        content: its bytes; empty where it came another way, and once it is let go.
    """

    __slots__ = ("_all", "_num_counted", "content")

    def __init__(self, bodies: Bodies) -> None:
        self.content = b""
        self._all = bodies
        self._num_counted = 0

    def count(self, num_bytes: int) -> None:
        """Count the bytes that it has by now.

        Raises:
            Refusal: there is no room for them.
        """
        self._all.check_room(num_bytes, self._num_counted)
        if num_bytes > SHORT_BODY:
            self._all.num_bytes += num_bytes - self._num_counted
            self._num_counted = num_bytes

    def let_go(self) -> None:
        """Let the body go; calling it again does nothing."""
        self._all.num_bytes -= self._num_counted
        self._num_counted, self.content = 0, b""

    def __enter__(self) -> Body:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.let_go()


_JSON = json.JSONDecoder(object_pairs_hook=unique_keys)


def parse_json(body: bytes) -> object:
    """The JSON value of a body.

    Raises:
        Refusal: it is none, or an object in it has a key twice.
    """
    body = body.removeprefix(codecs.BOM_UTF8)  # RFC 8259, 8.1: need not be an error; some editors and shells write it
    if not body.strip():
        raise Refusal(Kind.INVALID, "the body is empty: send a JSON object", code="invalid_json")
    try:
        return _JSON.decode(body.decode())
    except UnicodeDecodeError as error:
        reason = f"byte {error.start + 1} is not valid UTF-8"
    except json.JSONDecodeError as error:
        reason = f"{error.msg.removesuffix(' at').removesuffix(' starting')} at character {error.pos + 1}"
    except InvalidRequestError as error:
        reason = str(error)
    except RecursionError:
        reason = "lists or objects are nested too deeply"
    except ValueError:  # the only other one
        reason = "a number has more digits than any field can have"
    raise Refusal(Kind.INVALID, f"the body is not valid JSON: {reason}", code="invalid_json")
