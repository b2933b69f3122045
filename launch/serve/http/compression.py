"""Bodies that come compressed, as Content-Encoding says: made what they were, within the size that a body may have.

A few bytes may become many, so no more is ever made than may be. It knows encodings, and no request.
"""

from __future__ import annotations

import zlib

from launch.serve.door.refusals import Kind, Refusal

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
