"""The forms in which a request of KServe comes, all read here: `infer` and `generate` over HTTP, a call of gRPC.

The front's event loop reads short requests by the same function as the processes that read long ones. It knows the
forms' own modules. It does not know what inputs mean.
"""

from __future__ import annotations

from dataclasses import dataclass

from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2

from launch.serve.http.json_bodies import parse_json
from launch.serve.kserve.grpc_messages import no_message, read_outputs, read_tensors, write_response
from launch.serve.kserve.http_bodies import InferBody, read_generate, read_infer, write_generate, write_infer
from launch.serve.kserve.models import Model
from launch.serve.kserve.requests import InferResponse

INFER, GENERATE, CALL = "infer", "generate", "call"


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
