"""Between what travels and requests in no protocol's words: messages of KServe's gRPC, which are tritonclient's own,
and the forms in which a request comes, all read here: `infer` and `generate` over HTTP, a call of gRPC.

The frontend's event loop reads short requests by the same function as the processes that read long ones.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf.json_format import ParseDict
from google.protobuf.message import DecodeError
from tritonclient.grpc import model_config_pb2, service_pb2

from launch.serve.admission.refusals import Kind, Refusal
from launch.serve.api.kserve.http_bodies import InferBody, read_generate, read_infer, write_generate, write_infer
from launch.serve.api.kserve.models import VERSION, Model
from launch.serve.api.kserve.requests import InferResponse, no_shared_memory
from launch.serve.api.kserve.tensors import (
    DATATYPES,
    MOST_WHOLE_BYTES,
    Tensor,
    read_bytes,
    read_shape,
    refuse_input,
    write_bytes,
)
from launch.serve.http.bodies import parse_json

FAILED = "the server failed; its log says how"

Context = Any
"""grpc.aio.ServicerContext, whose types the library does not tell."""

FINAL = "triton_final_response"
"""Parameter of a response: whether no other follows."""

WANTS_FINAL = "triton_enable_empty_final_response"
"""Parameter of a request: whether a last response without outputs tells the end."""

_HEAD_FIELDS = 4
"""The last field of a ModelInferRequest's head: model_name, model_version, id and parameters have numbers up to
this."""

_LENGTH_DELIMITED = 2
"""Protobuf's wire type of texts and messages, as all these fields are."""

_CONTENTS = {
    "BOOL": "bool_contents",
    "UINT8": "uint_contents",
    "UINT64": "uint64_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "FP32": "fp32_contents",
    "BYTES": "bytes_contents",
}
"""Where a tensor's values are that has no raw contents; FP16 has no such field."""


def no_message() -> Refusal:
    """What is told where bytes are no message of the protocol."""
    return Refusal(Kind.INVALID, "the bytes of the call are no message of the protocol")


def read_head(raw: bytes, most_bytes: int) -> Any:
    """A ModelInferRequest whose inputs are not looked at, if it is longer than so many bytes: they may be many. Of such
    a one the head has to come first, where all libraries write it.

    Raises:
        Refusal: it is none.
    """
    if len(raw) > most_bytes:
        length, is_whole = _head_length(raw, most_bytes)
        if not is_whole:
            line = f"the model's name, the id and the parameters of a long request have {most_bytes} bytes at most"
            raise Refusal(Kind.INVALID, line)
        raw = raw[:length]
    try:
        return service_pb2.ModelInferRequest.FromString(raw)
    except DecodeError:
        raise no_message() from None


def read_known_head(raw: bytes, most_bytes: int) -> Any:
    """What is known of a head that `read_head` refuses: its fields before the one that is too long, or nothing."""
    try:
        return service_pb2.ModelInferRequest.FromString(raw[: _head_length(raw, most_bytes)[0]])
    except (DecodeError, Refusal):
        return service_pb2.ModelInferRequest()


def _head_length(raw: bytes, most_bytes: int) -> tuple[int, bool]:
    """Bytes of a message's head, of those of its fields that end within so many; and whether there is no other."""
    at = 0
    while at < min(most_bytes, len(raw)):
        if raw[at] >> 3 > _HEAD_FIELDS:
            return at, True
        if raw[at] & 7 != _LENGTH_DELIMITED:
            break
        length, begin = _read_length(raw, at + 1)
        if begin + length > most_bytes:
            break
        at = begin + length
    return at, False


def _read_length(raw: bytes, at: int) -> tuple[int, int]:
    """A number as protobuf writes it, and where it ends."""
    number = 0
    for place, byte in enumerate(raw[at : at + 5]):
        number |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return number, at + place + 1
    raise no_message()


def read_tensors(request: Any) -> list[Tensor]:
    """The inputs of a ModelInferRequest.

    Raises:
        Refusal: one is wrong, or there are fewer or more raw contents than inputs.
    """
    raws = request.raw_input_contents
    if raws and len(raws) != len(request.inputs):
        raise Refusal(
            Kind.INVALID, f"{len(raws)} raw_input_contents for {len(request.inputs)} inputs: give each or none"
        )
    if not request.inputs:
        raise Refusal(Kind.INVALID, "inputs is missing: one tensor at least", "inputs")
    tensors = []
    for place, item in enumerate(request.inputs):
        if "shared_memory_region" in item.parameters:
            raise no_shared_memory()
        shape = read_shape(item.name, list(item.shape))
        if raws:
            tensors.append(read_bytes(item.name, item.datatype, shape, raws[place]))
        else:
            tensors.append(_read_contents(item, shape))
    return tensors


def read_outputs(request: Any) -> list[str]:
    """Names of the outputs that a ModelInferRequest wants.

    Raises:
        Refusal: one is wanted in a way that is not there.
    """
    for item in request.outputs:
        for name in ("classification", "shared_memory_region"):
            if name in item.parameters:
                raise refuse_input(item.name, f"outputs have no {name} here")
    return [item.name for item in request.outputs]


def write_response(response: InferResponse) -> Any:
    """A ModelInferResponse."""
    told = head(response.model, response.request_id)
    for tensor in response.tensors:
        output = told.outputs.add(name=tensor.name, datatype=tensor.datatype)
        output.shape.extend(tensor.values.shape)
        told.raw_output_contents.append(write_bytes(tensor))
    return told


async def write_in_turns(response: InferResponse) -> Any:
    """A ModelInferResponse; a long one is made in a thread, where the event loop does not wait for all of it."""
    if sum(tensor.values.nbytes for tensor in response.tensors) <= MOST_WHOLE_BYTES:
        return write_response(response)
    return await asyncio.to_thread(write_response, response)


def head(model: Model, request_id: str) -> Any:
    """A ModelInferResponse without outputs."""
    return service_pb2.ModelInferResponse(model_name=model.name, model_version=VERSION, id=request_id)


def write_config(model: Model, max_batch_size: int) -> Any:
    """A ModelConfigResponse."""
    config = ParseDict(model.config(max_batch_size), model_config_pb2.ModelConfig())
    return service_pb2.ModelConfigResponse(config=config)


def write_metadata(model: Model) -> Any:
    """A ModelMetadataResponse."""
    return ParseDict(model.metadata(), service_pb2.ModelMetadataResponse())


def write_statistics(statistics: list[dict[str, Any]]) -> Any:
    """A ModelStatisticsResponse."""
    return ParseDict({"model_stats": statistics}, service_pb2.ModelStatisticsResponse())


def _read_contents(item: Any, shape: tuple[int, ...]) -> Tensor:
    field, dtype = _CONTENTS.get(item.datatype), DATATYPES.get(item.datatype)
    if field is None or dtype is None:
        raise refuse_input(item.name, f"datatype {item.datatype[:20]!r} needs raw_input_contents, or is unknown here")
    found = list(getattr(item.contents, field))
    if len(found) != math.prod(shape):
        raise refuse_input(item.name, f"{len(found)} values in {field} for the shape {list(shape)}")
    if item.datatype == "UINT8" and any(value > 255 for value in found):
        raise refuse_input(item.name, "a value is no UINT8")
    values = np.empty(len(found), dtype)
    values[:] = found
    return Tensor(item.name, item.datatype, values.reshape(shape))


FORMS = INFER, GENERATE, CALL = "infer", "generate", "call"


@dataclass(frozen=True)
class Sent:
    """A request as it came.

    Attributes:
        form: one of the three.
        model: that it names.
        raw: its bytes.
        json_length: of `infer`: how many of these are JSON; the rest are tensors.
    """

    form: str
    model: Model
    raw: bytes
    json_length: int = 0


def read_body(sent: Sent) -> InferBody:
    """What it says.

    Raises:
        Refusal: it is not as its form has it.
    """
    if sent.form == INFER:
        return read_infer(parse_json(sent.raw[: sent.json_length]), sent.raw[sent.json_length :])
    if sent.form == GENERATE:
        return read_generate(sent.model, parse_json(sent.raw))
    try:
        message = service_pb2.ModelInferRequest.FromString(sent.raw)
    except DecodeError:
        raise no_message() from None
    return InferBody(message.id, read_tensors(message), read_outputs(message), frozenset(), False)


def write_answer(form: str, response: InferResponse, body: InferBody) -> tuple[bytes, int | None]:
    """A whole response in a form.

    Args:
        form: of the request.
        response: to it.
        body: what the request says.

    Returns:
        The bytes, and the length of their JSON where bytes of tensors follow it.
    """
    if form == CALL:
        return write_response(response).SerializeToString(), None
    if form == GENERATE:
        return b"".join(write_generate(response)), None
    parts, behind = write_infer(response, body)
    text = b"".join(parts)
    return b"".join([text, *behind]), len(text) if behind else None
