"""Calls over gRPC that nobody should make: odd messages by the thousand, streams that are cancelled or cut, bytes that
are no HTTP/2; and what may be answered to them.

Messages travel as bytes, so that nothing on this side refuses them first. It knows the protocol's messages, and the
models' inputs. It does not know servers.
"""

from __future__ import annotations

import asyncio
import math
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from launch.serve.api.kserve.models import MODELS, TARGET, Model, TensorSpec
from scripts.soak.odd_requests import DAMAGE, is_one_line

SERVICE = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]
STREAM = "ModelStreamInfer"
METHODS = sorted(method.name for method in SERVICE.methods)

REFUSALS = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.RESOURCE_EXHAUSTED)
"""Statuses that say what is wrong with a call."""

_TEXTS = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    st.sampled_from(["", "\0", "x" * (1 << 16), "é" * 5000, "\r\n\r\n", "../../etc/passwd", "%s%n"]),
)
_SIZES = st.sampled_from((0, 1, 1, 1, 2, 3, -1, -(2**63), 64, 4096, 2**31, 2**32, 2**39, 2**62, 2**63 - 1))
_WIDE = ([0, 2**39, 2**39], [2**39, 2**39, 0], [0, 2**62], [2**32, 2**32], [2**63 - 1], [1] * 40)
"""Shapes whose sizes are more than numbers of 64 bits hold, multiplied."""

_CONTENTS = ("bool", "int", "int64", "uint", "uint64", "fp32", "fp64", "bytes")
_PARAMETERS = (
    "shared_memory_region", "shared_memory_byte_size", "classification", "binary_data", "sequence_id", "priority",
    "timeout", "triton_enable_empty_final_response", "",
)  # fmt: skip
_ENDS = ("read", "read", "read", "cancel", "take one")
_FIELDS = {"BOOL": "bool", "INT32": "int", "UINT64": "uint64", "FP32": "fp32", "BYTES": "bytes"}
"""Where contents that are typed stand; the others have to be raw."""

_WIDTHS = {"BOOL": 1, "UINT8": 1, "UINT64": 8, "INT32": 4, "INT64": 8, "FP16": 2, "FP32": 4}


@dataclass(frozen=True)
class OddCall:
    """A call as it goes over a channel.

    Attributes:
        method: its name.
        messages: bytes of each; a call without a stream has one.
        end: `read` all that comes, `take one` response and cancel, or `cancel` at once.
    """

    method: str
    messages: tuple[bytes, ...]
    end: str = "read"

    @property
    def is_stream(self) -> bool:
        """Whether it has any number of messages, in both directions."""
        return self.method == STREAM


@dataclass(frozen=True)
class Outcome:
    """How a call ended.

    Attributes:
        status: of the call.
        line: that came with it; empty where it went well.
        errors: lines of the responses of a stream that are errors.
    """

    status: grpc.StatusCode
    line: str = ""
    errors: tuple[str, ...] = ()


@st.composite
def odd_calls(draw: st.DrawFn, method: str) -> OddCall:
    """A call of a method."""
    if method == STREAM:
        messages = draw(st.lists(_infer_messages(), max_size=4))
        return OddCall(method, tuple(map(draw, map(_as_bytes, messages))), draw(st.sampled_from(_ENDS)))
    message = draw(_infer_messages() if method == "ModelInfer" else _plain_messages(method))
    return OddCall(method, (draw(_as_bytes(message)),), draw(st.sampled_from(_ENDS)) if draw(_rarely()) else "read")


def whole_request(model: str, request_id: str = "", is_typed: bool = False, **numbers: int) -> Any:
    """A right request for a model, with numbers for some inputs beside those that it needs."""
    message = service_pb2.ModelInferRequest(model_name=model, id=request_id)
    for spec in MODELS[model].inputs.values():
        if not spec.is_optional or spec.name in numbers:
            _add_input(message, spec, numbers.get(spec.name, 1), is_typed)
    return message


def _add_input(message: Any, spec: TensorSpec, number: int, is_typed: bool) -> None:
    """An input of one value in one row, its contents typed or raw."""
    item = message.inputs.add(name=spec.name, datatype=spec.datatype, shape=[1, *(1 for _ in spec.dims)])
    if is_typed:
        if spec.datatype in _FIELDS:
            value = b"x" if spec.datatype == "BYTES" else number if spec.datatype == "INT32" else max(0, number)
            getattr(item.contents, f"{_FIELDS[spec.datatype]}_contents").append(value)
    else:
        message.raw_input_contents.append(_raw_value(spec.datatype, number))


def _raw_value(datatype: str, number: int) -> bytes:
    if datatype == "BYTES":
        return struct.pack("<I", 1) + b"x"
    if datatype in ("FP16", "FP32"):
        return struct.pack("<e" if datatype == "FP16" else "<f", number)
    width = _WIDTHS[datatype]
    return (number % 256**width).to_bytes(width, "little")


@st.composite
def _infer_messages(draw: st.DrawFn) -> Any:
    """A request for inference, right but for some of its parts."""
    model = MODELS[draw(st.sampled_from(sorted(MODELS)))]
    message = whole_request(model.name, draw(_TEXTS) if draw(_rarely()) else "x", is_typed=draw(st.booleans()))
    for _ in range(draw(st.integers(0, 3))):
        draw(st.sampled_from((_change_input, _change_input, _more_input, _drop_something, _change_head)))(
            draw, message, model
        )
    return message


def _change_input(draw: st.DrawFn, message: Any, model: Model) -> None:
    """Another shape, datatype or content of an input that is there."""
    if not message.inputs:
        return
    place = draw(st.integers(0, len(message.inputs) - 1))
    item = message.inputs[place]
    if draw(st.booleans()):
        item.shape[:] = draw(st.one_of(st.lists(_SIZES, max_size=5), st.sampled_from(_WIDE), st.sampled_from(_WIDE)))
    if draw(_rarely()):
        item.datatype = draw(st.sampled_from(("INT32", "FP16", "FP32", "BYTES", "BF16", "STRING", ""))) or draw(_TEXTS)
    raws = message.raw_input_contents
    if place < len(raws) and draw(st.integers(0, 3)):
        raws[place] = draw(_raw(item.datatype, list(item.shape)))
    elif not raws and draw(st.booleans()):
        item.contents.Clear()
        field = draw(st.sampled_from((*_CONTENTS, _FIELDS.get(item.datatype, "int"))))
        values: Any = st.binary(max_size=9) if field == "bytes" else st.integers(0, 1)
        getattr(item.contents, f"{field}_contents").extend(draw(st.lists(values, max_size=2)))
    if draw(_rarely()):
        item.parameters[draw(st.sampled_from(_PARAMETERS))].string_param = draw(_TEXTS)


def _raw(datatype: str, shape: Sequence[int]) -> st.SearchStrategy[bytes]:
    """Bytes of an input: as many as its shape wants, where these are few, or any."""
    count = math.prod(shape)
    width = _WIDTHS.get(datatype, 4)
    any_bytes = st.binary(max_size=40)
    if not 0 <= count * width <= 1 << 16:
        return any_bytes
    fitting = st.binary(min_size=count * width, max_size=count * width)
    lengths = st.sampled_from((0, 1, 2, 2**31, 2**32 - 1)).map(lambda length: struct.pack("<I", length) + b"\xff")
    return st.one_of(fitting, fitting, any_bytes, lengths)


def _more_input(draw: st.DrawFn, message: Any, model: Model) -> None:
    """An input more: one that the model has, twice or for the first time, or one that it has not."""
    spec = model.inputs[draw(st.sampled_from(sorted(model.inputs)))]
    _add_input(message, spec, draw(st.sampled_from((0, 1, 2, -1, 127))), is_typed=not message.raw_input_contents)
    if draw(st.booleans()):
        _change_input(draw, message, model)
    if draw(_rarely()):
        message.inputs[-1].name = draw(_TEXTS)


def _drop_something(draw: st.DrawFn, message: Any, model: Model) -> None:
    """An input less, or its content."""
    dropped = draw(st.sampled_from((message.inputs, message.raw_input_contents)))
    if dropped:
        del dropped[draw(st.integers(0, len(dropped) - 1))]


def _change_head(draw: st.DrawFn, message: Any, model: Model) -> None:
    """Another model or version, outputs, parameters."""
    what = draw(st.integers(0, 3))
    if what == 0:
        message.model_name = draw(_TEXTS)
    elif what == 1:
        message.model_version = draw(st.sampled_from(("1", "2", "-1"))) if draw(st.booleans()) else draw(_TEXTS)
    elif what == 2:
        names = draw(st.lists(st.one_of(st.sampled_from(sorted(model.outputs)), _TEXTS), max_size=3))
        for name in names:
            message.outputs.add(name=name)
            if draw(_rarely()):
                message.outputs[-1].parameters[draw(st.sampled_from(_PARAMETERS))].int64_param = draw(_SIZES)
    else:
        message.parameters[draw(st.sampled_from(_PARAMETERS))].bool_param = draw(st.booleans())


@st.composite
def _plain_messages(draw: st.DrawFn, method: str) -> Any:
    """The message of any other call, its texts and numbers odd."""
    message = GetMessageClass(SERVICE.methods_by_name[method].input_type)()
    names = st.one_of(_TEXTS, st.sampled_from(sorted(MODELS)))
    for item in message.DESCRIPTOR.fields:
        if item.cpp_type == item.CPPTYPE_STRING and item.type == item.TYPE_STRING:
            setattr(message, item.name, draw(names))
        elif item.cpp_type == item.CPPTYPE_BOOL:
            setattr(message, item.name, draw(st.booleans()))
        elif item.cpp_type in (item.CPPTYPE_INT64, item.CPPTYPE_UINT64):
            setattr(message, item.name, draw(st.sampled_from((0, 1, 2**63 - 1))))
    return message


@st.composite
def _as_bytes(draw: st.DrawFn, message: Any) -> bytes:
    """A message as it travels; one of eight is damaged."""
    raw: bytes = message.SerializeToString()
    if not draw(_rarely()):
        return raw
    place = draw(st.integers(0, max(0, len(raw) - 1)))
    return raw[:place] + draw(st.sampled_from(DAMAGE)) + raw[place + draw(st.integers(0, 3)) :]


def _rarely() -> st.SearchStrategy[bool]:
    return st.integers(0, 7).map(lambda number: number == 5)


def make_call(channel: grpc.Channel, call: OddCall, patience: float) -> Outcome:
    """Make a call and see how it ends.

    Raises:
        TimeoutError: it does not.
    """
    path = f"/{SERVICE.full_name}/{call.method}"
    errors: list[str] = []
    try:
        if call.is_stream:
            responses = channel.stream_stream(path)(iter(call.messages), timeout=patience)
            _read_stream(responses, call.end, errors)
        else:
            future = channel.unary_unary(path).future(call.messages[0], timeout=patience)
            if call.end != "read":
                future.cancel()
            future.result()
    except grpc.FutureCancelledError:
        return Outcome(grpc.StatusCode.CANCELLED)
    except grpc.RpcError as error:
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            raise TimeoutError from None
        return Outcome(error.code(), error.details() or "", tuple(errors))
    return Outcome(grpc.StatusCode.OK, "", tuple(errors))


def _read_stream(responses: Any, end: str, errors: list[str]) -> None:
    """Read a stream's responses as far as its client does."""
    if end == "cancel":
        responses.cancel()
    for raw in responses:
        told = service_pb2.ModelStreamInferResponse.FromString(raw)
        if told.error_message:
            errors.append(told.error_message)
        if end == "take one":
            responses.cancel()


def find_call_fault(call: OddCall, outcome: Outcome) -> str | None:
    """Why an outcome must not be; None for what was asked for, and for a refusal in one line."""
    is_quoted = any(b"Traceback" in message for message in call.messages)  # an error may quote what was sent
    for line in outcome.errors:
        if not is_one_line(line) or "the server failed" in line or ("Traceback" in line and not is_quoted):
            return f"an error of a stream: {line[:500]!r}"
    if outcome.status is grpc.StatusCode.OK:
        return None
    if outcome.status is grpc.StatusCode.CANCELLED and call.end != "read":
        return None
    if outcome.status not in REFUSALS:
        return f"{outcome.status.name}: {outcome.line[:500]!r}"
    if not is_one_line(outcome.line) or ("Traceback" in outcome.line and not is_quoted):
        return f"{outcome.status.name}, not in one line: {outcome.line[:500]!r}"
    return None


def long_stream(number: int, max_tokens: int) -> bytes:
    """A request that streams for as long as it may."""
    return bytes(
        whole_request(TARGET, str(number), request_output_len=max_tokens, streaming=1, end_id=-1).SerializeToString()
    )


async def cancel_calls(address: str, max_tokens: int, count: int, at_once: int = 32) -> None:
    """Begin calls and cancel them: before the first response, behind it, and with a request more on their way."""
    room = asyncio.Semaphore(at_once)

    async def begin_and_cancel(channel: Any, number: int) -> None:
        message = long_stream(number, max_tokens)
        async with room:
            if number % 4 == 3:
                call = channel.unary_unary(f"/{SERVICE.full_name}/ModelInfer")(message)
                await asyncio.sleep(0)
                call.cancel()
                return
            stream = channel.stream_stream(f"/{SERVICE.full_name}/{STREAM}")()
            with suppress(grpc.aio.AioRpcError, asyncio.CancelledError, asyncio.InvalidStateError):
                await stream.write(message)
                if number % 4 == 1:
                    await stream.read()
                if number % 4 == 2:
                    await stream.write(long_stream(number + 1, max_tokens))
                    await stream.done_writing()
            stream.cancel()

    async with grpc.aio.insecure_channel(address) as channel:
        await asyncio.gather(*(begin_and_cancel(channel, number) for number in range(count)))


async def cut_calls(address: str, max_tokens: int, count: int) -> None:
    """Begin streams on connections that are reset under them, behind the first response."""
    host, _, port = address.rpartition(":")
    writers: list[asyncio.StreamWriter] = []
    relays: list[asyncio.Task[Any] | None] = []

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        relays.append(asyncio.current_task())
        behind, before = await asyncio.open_connection(host, int(port))
        writers.extend((writer, before))
        await asyncio.gather(_pump(reader, before), _pump(behind, writer))

    server = await asyncio.start_server(relay, "127.0.0.1", 0)
    own_port = server.sockets[0].getsockname()[1]
    for number in range(count):
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{own_port}", options=options) as channel:
            stream = channel.stream_stream(f"/{SERVICE.full_name}/{STREAM}")()
            with suppress(grpc.aio.AioRpcError):
                await stream.write(long_stream(number, max_tokens))
                await stream.read()
            for writer in writers:
                writer.transport.abort()
            writers.clear()
    server.close()
    await asyncio.gather(*filter(None, relays))


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()


_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
ODD_BYTES = (
    b"", b"\0" * 100, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00", _PREFACE[:10],
    _PREFACE + b"\xff" * 500, _PREFACE + b"\0\0\0\4\0\0\0\0\0" + b"\0\x10\0\1\4\0\0\0\1" + b"\xff" * 4096,
    _PREFACE + b"\0\0\0\4\0\0\0\0\0" + b"\xff\xff\xff\0\0\0\0\0\1", _PREFACE + b"\0\0\4\3\0\0\0\0\1\0\0\0\x08" * 500,
)  # fmt: skip
"""What is no call, with HTTP/2 before it or without."""


def send_bytes(address: str, data: bytes, patience: float) -> None:
    """Send bytes to a port, and go."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=patience) as connection, suppress(OSError):
        connection.sendall(data)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
