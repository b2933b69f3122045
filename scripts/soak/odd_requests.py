"""Requests that nobody should send, by the thousand: damaged, mistyped, oversized, in wrong places; and what may be
answered to them.

Each request is bytes on a connection of its own, so that nothing on this side refuses it first. It knows HTTP and the
fields of the APIs. It does not know servers.
"""

from __future__ import annotations

import copy
import http.client
import json
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from hypothesis import strategies as st

from launch.serve.api.kserve.models import MODELS
from launch.serve.api.openai import fields as openai_fields
from launch.serve.api.openai.responses.requests import RESPONSE_FIELDS

LONGEST_LINE = 2000
"""Characters of an error: it may quote what was sent, and no more of it than helps."""

_BIG = 1 << 16


@dataclass(frozen=True)
class Endpoint:
    """A place to send requests to, and a body that is right there.

    Attributes:
        path: without the query.
        body: None where it takes none.
        fields: names that its body may have.
        is_metrics: whether it is on the port of the metrics.
    """

    path: str
    body: Mapping[str, Any] | None = None
    fields: Sequence[str] = ()
    is_metrics: bool = False


def openai_endpoints(model: str) -> list[Endpoint]:
    """Everything below /v1, the page, and the small ones."""
    completion = {"model": model, "prompt": "x", "max_tokens": 2}
    chat = {"model": model, "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    function = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
    tools = {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
    response = {"model": model, "input": [{"role": "user", "content": "x"}], "max_output_tokens": 2}
    response |= {"tools": [{"type": "function", **function}], "tool_choice": "required", "store": False}
    return [
        Endpoint("/v1/completions", completion, sorted(openai_fields.fields_of(openai_fields.Endpoint.COMPLETIONS))),
        Endpoint("/v1/chat/completions", chat, sorted(openai_fields.fields_of(openai_fields.Endpoint.CHATS))),
        Endpoint("/v1/chat/completions", {**chat, **tools}),
        Endpoint("/v1/responses", response, sorted(RESPONSE_FIELDS)),
        Endpoint("/v1/responses/resp_1"),
        Endpoint("/v1/models"),
        Endpoint(f"/v1/models/{model}"),
        Endpoint("/health"),
        Endpoint("/version"),
        Endpoint("/status"),
        Endpoint("/"),
        Endpoint("/nowhere"),
        Endpoint("/metrics", is_metrics=True),
    ]


def kserve_endpoints() -> list[Endpoint]:
    """Everything below /v2."""
    found = [
        Endpoint(path)
        for path in ("/v2", "/v2/health/live", "/v2/health/ready", "/v2/models/stats", "/v2/systemsharedmemory/status")
    ]
    found.append(Endpoint("/v2/repository/index", {"ready": True}))
    for model in MODELS:
        path, fields = f"/v2/models/{model}", MODELS[model].inputs.values()
        names = [item.name for item in fields]
        tensors = [
            {"name": item.name, "shape": [1, 1], "datatype": item.datatype, "data": _TENSORS.get(item.datatype, [1])}
            for item in fields
            if not item.is_optional
        ]
        infer = {"id": "x", "inputs": tensors, "outputs": [], "parameters": {"sequence_id": 0}}
        found += [Endpoint(path + tail) for tail in ("", "/ready", "/config", "/stats", "/versions/1")]
        found.append(Endpoint(f"{path}/infer", infer))
        flat = {item["name"]: item["data"][0] for item in tensors}
        found += [Endpoint(f"{path}/{way}", flat, names) for way in ("generate", "generate_stream")]
    return found


_TENSORS: Mapping[str, list[Any]] = {"BYTES": ["x"], "BOOL": [False]}

_TEXTS = st.one_of(
    st.text(max_size=20),
    st.text(st.characters(categories=["Cs", "Cc", "Co", "Cf", "Zl"]), max_size=5),
    st.sampled_from(
        ["", "\0", "\ud83d", "x" * _BIG, "é" * 5000, "\r\n\r\n", "../../etc/passwd", "{{ 7 * 7 }}", "%s%n"]
    ),
)
_NUMBERS = st.one_of(
    st.integers(-3, 200),
    st.sampled_from([2**31, 2**63, -(2**63), 2**64, 10**400, 1e308, -1e308, 1e-320, float("nan"), float("inf"), -0.0]),
    st.floats(),
)
_VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), _NUMBERS, _TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(_TEXTS, inner, max_size=3)),
    max_leaves=12,
)
DAMAGE = (b"", b"\0", b"\xff\xfe", b"\xc3\x28", b"{", b"]", b'"', b",", b"NaN", b"1e999", b"\\u0000", b"\xed\xa0\x80")
"""Put into bytes in place of some of them."""

_METHODS = ("POST", "GET", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "BREW")
_TAILS = ("/", "?", "?x=%00", "/%2e%2e/", "%ff", "?" + "x" * 9000)
_HEADERS = (
    "content-type: text/plain", "content-type: application/x-www-form-urlencoded", "content-type: \xff",
    "inference-header-content-length: 20", "inference-header-content-length: -1", "content-encoding: deflate",
    "content-type: multipart/form-data; boundary=x", "content-encoding: gzip", "expect: 100-continue",
    "authorization: Bearer x", "authorization: Basic =", "authorization:", "x-request-id: " + "x" * 500,
    "x-request-id: \x7f\x80\xff", "accept: text/event-stream;q=x", "accept-encoding: br;q=-1", "range: bytes=5-1",
    "if-none-match: *", "upgrade: websocket", "connection: upgrade, close", "upgrade: h2c", "cookie: " + "a=b; " * 900,
    "x-forwarded-for: \0", "host: a, b", "content-length: -1", "content-length: 5, 6", "content-length: 1e3",
    "content-length: 999999999999", "transfer-encoding: chunked", "transfer-encoding: gzip, chunked", "no colon here",
    ": no name", " folded", "x: " + "y" * (1 << 17),
)  # fmt: skip

_LENGTHS = ("content-length", "transfer-encoding", "expect", "upgrade", "connection")
"""Headers after which the other side may wait for more, or for something else."""


@st.composite
def bodies(draw: st.DrawFn, endpoint: Endpoint) -> bytes:
    """A body for an endpoint: right but for some fields, any JSON, or bytes that are none."""
    kind = draw(st.sampled_from(("fields", "fields", "fields", "json", "damaged", "deep", "bytes")))
    if kind == "bytes":
        return draw(st.binary(max_size=200))
    if kind == "deep":
        depth = draw(st.sampled_from((50, 1000, 100_000)))
        inner = draw(st.sampled_from((b"[", b'{"a":', b'{"prompt":[')))
        return inner * depth if draw(st.booleans()) else b"[" * depth + b"]" * depth
    if kind == "json":
        return _dump(draw(_VALUES))
    values = copy.deepcopy(dict(endpoint.body or {}))
    names = st.one_of(st.sampled_from([*endpoint.fields, *values, "model"]), _TEXTS)
    for name in draw(st.lists(names, max_size=4)):
        values[name] = draw(_VALUES)
    places = list(_places(values))
    if places and draw(st.booleans()):
        container, key = draw(st.sampled_from(places))
        container[key] = draw(_VALUES)
    body = _dump(values)
    if kind == "damaged":
        place = draw(st.integers(0, max(0, len(body) - 1)))
        body = body[:place] + draw(st.sampled_from(DAMAGE)) + body[place + draw(st.integers(0, 3)) :]
    return body


@dataclass(frozen=True)
class OddRequest:
    """A request as it goes over the connection.

    Attributes:
        data: all bytes.
        is_whole: whether its headers tell its length truly, so that it has to be answered.
    """

    data: bytes
    is_whole: bool

    @property
    def method(self) -> str:
        """The method of HTTP."""
        return self.data.split(b" ", 1)[0].decode("latin-1")


@st.composite
def odd_requests(draw: st.DrawFn, endpoint: Endpoint) -> OddRequest:
    """A request to an endpoint."""
    right = "POST" if endpoint.body is not None else "GET"
    method = draw(st.sampled_from(_METHODS)) if _rarely(draw) else right
    path = endpoint.path + (draw(st.sampled_from(_TAILS)) if _rarely(draw) else "")
    headers = draw(st.lists(st.sampled_from(_HEADERS), max_size=2)) if _rarely(draw) else []
    body = draw(bodies(endpoint)) if endpoint.body is not None or draw(st.booleans()) else b""
    lines = [f"{method} {path} HTTP/1.1", "host: test", "connection: close", *headers]
    is_whole = not any(header.startswith(_LENGTHS) for header in headers)
    if is_whole:
        lines.append(f"content-length: {len(body)}")
    return OddRequest("\r\n".join([*lines, "", ""]).encode("latin-1") + body, is_whole)


def _rarely(draw: st.DrawFn) -> bool:
    """In one of eight requests: in most of them one thing is wrong."""
    return draw(st.integers(0, 7)) == 5


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Everything inside a value: what it stands in, and where."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in list(items):
        yield value, key
        yield from _places(item)


def _dump(value: object) -> bytes:
    return json.dumps(value).encode()


@dataclass(frozen=True)
class Answered:
    """What came back; no status where the connection was closed without a word."""

    status: int | None
    content_type: str
    body: bytes


def exchange(url: str, request: OddRequest, patience: float) -> Answered:
    """Send a request and read what comes until the other side closes. Behind one that is not whole nothing follows, and
    the other side hears that.

    Raises:
        TimeoutError: it does not close.
    """
    address = urlsplit(url)
    assert address.hostname is not None and address.port is not None
    with socket.create_connection((address.hostname, address.port), timeout=patience) as connection:
        try:
            connection.sendall(request.data)
            if not request.is_whole:
                connection.shutdown(socket.SHUT_WR)
        except TimeoutError:
            raise
        except OSError:
            pass  # it has answered already, and closed
        answer = http.client.HTTPResponse(connection, method=request.method)
        try:
            answer.begin()
            return Answered(answer.status, answer.getheader("content-type", ""), answer.read())
        except (http.client.HTTPException, ConnectionError):
            return Answered(None, "", b"")


def is_one_line(message: str) -> bool:
    """Whether an error says what is wrong, and no more than that."""
    return bool(message.strip()) and "\n" not in message.strip() and len(message) <= LONGEST_LINE


def find_fault(request: OddRequest, answered: Answered) -> str | None:
    """Why an answer must not be; None for what was asked for, and for a refusal of the 4xx kind in one line."""
    text = answered.body.decode(errors="replace")
    if answered.status is None:
        return "the connection was closed without an answer" if request.is_whole else None
    if "Traceback" in text and b"Traceback" not in request.data:  # an error may quote what was sent
        return f"a traceback: {text[:500]}"
    if 200 <= answered.status < 300:
        is_openai = b" /v1/" in request.data[:20]  # KServe's streams just end
        if is_openai and "event-stream" in answered.content_type and not text.rstrip().endswith("data: [DONE]"):
            return f"a stream without its end: {text[-300:]}"
        return f"an error in a whole answer: {text[-500:]}" if is_openai and '"error":{' in text else None
    if not 400 <= answered.status < 500:
        return f"HTTP {answered.status}: {text[:500]}"
    if request.method == "HEAD":
        return None
    message = text
    if answered.content_type.startswith("application/json"):
        error = json.loads(text)["error"]
        message = error if isinstance(error, str) else error["message"]
    if not is_one_line(message):
        return f"HTTP {answered.status}, not in one line: {message[:500]!r}"
    return None
