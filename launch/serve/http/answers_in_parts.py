"""Whole answers that may be long: made in parts with rests between them, and sent in parts as their client reads.

It knows ASGI. It does not know what parts hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from launch.serve.door.rests import Rests

JOINED_BYTES = 1 << 16
"""Of an answer that is sent as one: more than most have."""


class _PartsResponse(Response):
    """An answer of several parts, whose length is told before."""

    def __init__(self, parts: Sequence[bytes], media_type: str, headers: Mapping[str, str] | None) -> None:
        super().__init__(
            media_type=media_type, headers={**(headers or {}), "content-length": str(sum(map(len, parts)))}
        )
        self._parts = parts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI calls it."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        rests = Rests()
        for part in self._parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
            await rests.rest()
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def make_parts(parts: Iterable[bytes]) -> list[bytes]:
    """Parts that are made as they are asked for, each in little time."""
    made: list[bytes] = []
    rests = Rests()
    for part in parts:
        made.append(part)
        await rests.rest()
    return made


def answer_in_parts(
    parts: Sequence[bytes], media_type: str = "application/json", headers: Mapping[str, str] | None = None
) -> Response:
    """The answer of parts, as one where they are short."""
    if sum(map(len, parts)) <= JOINED_BYTES:
        return Response(b"".join(parts), media_type=media_type, headers=dict(headers or {}))
    return _PartsResponse(parts, media_type, headers)
