"""Bodies of KServe's HTTP: a request for inference as JSON, with binary tensors behind it or without; `generate`'s flat
objects; and the responses of both.

A body with binary tensors is its JSON, as long as the header Inference-Header-Content-Length says, and behind it the
bytes of each tensor that names its `binary_data_size`, in their order.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from launch.serve.admission.refusals import Kind, Refusal
from launch.serve.api.kserve.models import MODELS, VERSION, Model
from launch.serve.api.kserve.requests import InferResponse, find_input, no_shared_memory
from launch.serve.api.kserve.tensors import (
    Tensor,
    read_bytes,
    read_shape,
    read_values,
    refuse_input,
    write_json,
    write_parts,
    write_values,
)
from trtrun.core.values import show_value
from trtrun.errors import nearest, shorten

_FIELDS = ("id", "inputs", "outputs", "parameters")
_INPUT_FIELDS = ("name", "shape", "datatype", "parameters", "data")
_OUTPUT_FIELDS = ("name", "parameters")
MOST_PARAMETERS = 64
"""The most parameters of a generate request."""

_ALIKE = 0.8
"""How much of an input's name a parameter's may have before it is taken for a slip of the pen."""

_LONGEST_ID = 1024
_INPUTS = frozenset(name for model in MODELS.values() for name in model.inputs)
_ENCODER = msgspec.json.Encoder()


@dataclass(frozen=True)
class InferBody:
    """What a body of `infer` or `generate` says.

    Attributes:
        outputs: names of those that are wanted; none for all.
        binary: outputs that are wanted as bytes.
        all_binary: whether those that `outputs` does not name are wanted so.
    """

    request_id: str
    tensors: Sequence[Tensor]
    outputs: Sequence[str]
    binary: frozenset[str]
    all_binary: bool


def read_infer(values: object, binary: bytes) -> InferBody:
    """The body of `infer`.

    Args:
        values: of its JSON.
        binary: what is behind it.

    Raises:
        Refusal: it is not as the protocol has it.
    """
    given = _read_object("the body", values, _FIELDS)
    parameters = _read_parameters("parameters", given.get("parameters"))
    items = given.get("inputs")
    if not isinstance(items, list) or not items:
        raise Refusal(Kind.INVALID, "inputs is missing: a list of tensors, one at least", "inputs")
    tensors, at = [], 0
    for item in items:
        tensor, at = _read_tensor(item, binary, at)
        tensors.append(tensor)
    if at != len(binary):
        raise Refusal(Kind.INVALID, f"{len(binary) - at} bytes are left behind the tensors that name binary_data_size")
    outputs, as_bytes = _read_outputs(given.get("outputs"), bool(parameters.get("binary_data_output")))
    return InferBody(_read_id(given), tensors, outputs, as_bytes, bool(parameters.get("binary_data_output")))


def read_generate(model: Model, values: object) -> InferBody:
    """The body of `generate`: inputs by their names, at the top or below `parameters`; a list is a row's values.

    What is no input's name is a parameter of the request, as Triton has it, and without effect.

    Raises:
        Refusal: an input is wrong, or a parameter is not as they are, or has the name of another model's input, or
            nearly that of one of this model.
    """
    if not isinstance(values, dict):
        raise Refusal(Kind.INVALID, f"the body must be a JSON object, not {show_value(values)}")
    given = dict(values)
    nested = given.pop("parameters", None)
    if nested is not None and not isinstance(nested, dict):
        raise Refusal(Kind.INVALID, f"parameters must be an object, not {show_value(nested)}", "parameters")
    for name, value in (nested or {}).items():
        if name in given:
            raise refuse_input(name, "stands at the top and below parameters: give it once")
        given[name] = value
    request_id = _read_id(given)
    given.pop("id", None)
    tensors, num_parameters = [], 0
    for name, value in given.items():
        spec = model.inputs.get(name)
        if spec is None:
            num_parameters += 1
            _check_parameter(model, name, value, num_parameters)
        elif value is not None:
            shape = _shape_of(value) if isinstance(value, list) else (1,)
            data = value if isinstance(value, list) else [value]
            tensors.append(read_values(name, spec.datatype, (1, *shape), data))
    return InferBody(request_id, tensors, (), frozenset(), False)


def _check_parameter(model: Model, name: str, value: object, number: int) -> None:
    """Raise a Refusal unless this is a parameter of a request: Triton would take the others, too, without a word."""
    if number > MOST_PARAMETERS:
        raise Refusal(Kind.INVALID, f"more than {MOST_PARAMETERS} names that are no inputs of {model.name}", name[:100])
    if name in _INPUTS or difflib.get_close_matches(name[:100], model.inputs, n=1, cutoff=_ALIKE):
        find_input(model, name)  # refuses it
    if not isinstance(value, str | int | float | None):
        raise Refusal(
            Kind.INVALID,
            f"{model.name} has no input {shorten(name)}{nearest(name, model.inputs)}, and a parameter of a request is "
            "a text, a number, true or false",
            name[:100],
            "unknown_field",
        )


def write_infer(response: InferResponse, body: InferBody) -> tuple[Iterator[bytes], list[bytes | memoryview]]:
    """The response to `infer`.

    Returns:
        Its JSON, in parts that are made in little time, and the bytes of tensors that follow it, in parts.
    """
    behind: list[bytes | memoryview] = []
    heads: list[tuple[bytes, Tensor | None]] = []
    for tensor in response.tensors:
        told: dict[str, Any] = {
            "name": tensor.name,
            "datatype": tensor.datatype,
            "shape": list(tensor.values.shape),
        }
        is_binary = tensor.name in body.binary or (body.all_binary and tensor.name not in body.outputs)
        if is_binary:
            parts = write_parts(tensor)
            behind += parts
            told["parameters"] = {"binary_data_size": sum(map(len, parts))}
        heads.append((dump(told), None if is_binary else tensor))
    return _write_outputs(response, heads), behind


def _write_outputs(response: InferResponse, heads: Sequence[tuple[bytes, Tensor | None]]) -> Iterator[bytes]:
    """The JSON of a response: of each output what is told of it, and the tensor whose values go with it."""
    yield dump(_head(response))[:-1] + b',"outputs":['
    for place, (told, tensor) in enumerate(heads):
        if place:
            yield b","
        if tensor is None:
            yield told
        else:
            yield told[:-1] + b',"data":'
            yield from write_json(tensor)
            yield b"}"
    yield b"]}"


def write_generate(response: InferResponse) -> Iterator[bytes]:
    """The response to `generate`, in parts: a key for each output, lists of one value as the value."""
    yield dump(_head(response))[:-1]
    for tensor in response.tensors:
        yield b"," + dump(tensor.name) + b":"
        if tensor.values.size == 1:
            yield dump(write_values(tensor)[0])
        else:
            yield from write_json(tensor)
    yield b"}"


def dump(value: object) -> bytes:
    """JSON, without spaces."""
    return _ENCODER.encode(value)


def _head(response: InferResponse) -> dict[str, Any]:
    told = {"model_name": response.model.name, "model_version": VERSION}
    return ({"id": response.request_id} if response.request_id else {}) | told


def _read_object(what: str, value: object, known: Sequence[str]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Refusal(Kind.INVALID, f"{what} must be a JSON object, not {show_value(value)}")
    for name in value:
        if name not in known:
            raise Refusal(Kind.INVALID, f"{what}: unknown field {show_value(name)}{nearest(name, known)}", name[:100])
    return value


def _read_id(given: Mapping[str, Any]) -> str:
    value = given.get("id")
    if value is None:
        return ""
    if not isinstance(value, str) or len(value) > _LONGEST_ID or not value.isprintable():
        raise Refusal(Kind.INVALID, f"id must be a text of at most {_LONGEST_ID} printable characters", "id")
    return value


def _read_parameters(what: str, value: object) -> Mapping[str, Any]:
    """Parameters of a request or a tensor. Those that nothing is known of are the client's own business."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise Refusal(Kind.INVALID, f"{what} must be an object, not {show_value(value)}", "parameters")
    if "shared_memory_region" in value:
        raise no_shared_memory()
    return value


def _read_tensor(item: object, binary: bytes, at: int) -> tuple[Tensor, int]:
    """An input, and where the bytes of the next one begin."""
    given = _read_object("an input", item, _INPUT_FIELDS)
    name, datatype, shape = given.get("name"), given.get("datatype"), given.get("shape")
    if not isinstance(name, str):
        raise Refusal(Kind.INVALID, f"an input's name must be a text, not {show_value(name)}", "inputs")
    if not isinstance(datatype, str) or not isinstance(shape, list):
        raise refuse_input(name, "needs datatype, a text, and shape, a list")
    sizes = read_shape(name, shape)
    size = _read_parameters(name, given.get("parameters")).get("binary_data_size")
    if size is None:
        return read_values(name, datatype, sizes, given.get("data")), at
    if "data" in given:
        raise refuse_input(name, "has data and binary_data_size: give one of them")
    if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= len(binary) - at:
        raise refuse_input(name, f"binary_data_size {shorten(size)}, where {len(binary) - at} bytes are left")
    return read_bytes(name, datatype, sizes, binary[at : at + size]), at + size


def _read_outputs(value: object, all_binary: bool) -> tuple[list[str], frozenset[str]]:
    """Names of the outputs that are wanted, and of those that are wanted as bytes."""
    if value is None:
        return [], frozenset()
    if not isinstance(value, list):
        raise Refusal(Kind.INVALID, f"outputs must be a list, not {show_value(value)}", "outputs")
    names, binary = [], set()
    for item in value:
        given = _read_object("an output", item, _OUTPUT_FIELDS)
        name = given.get("name")
        if not isinstance(name, str):
            raise Refusal(Kind.INVALID, f"an output's name must be a text, not {show_value(name)}", "outputs")
        parameters = _read_parameters(name, given.get("parameters"))
        if parameters.get("classification"):
            raise Refusal(Kind.INVALID, f"{shorten(name)}: there is no classification here", "outputs")
        names.append(name)
        if parameters.get("binary_data", all_binary) is True:
            binary.add(name)
    return names, frozenset(binary)


def _shape_of(value: list[Any]) -> tuple[int, ...]:
    """The shape of nested lists, by their first items; `read_values` counts the values."""
    sizes: list[int] = []
    level: Any = value
    while isinstance(level, list) and len(sizes) < 8:
        sizes.append(len(level))
        level = level[0] if level else None
    return tuple(sizes)
