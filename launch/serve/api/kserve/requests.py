"""Requests for inference in no protocol's words, held to the table of their model; and the responses to them.

What Triton checks before a model sees a request is checked here: names, datatypes, shapes, the batch dimension. It does
not know what inputs mean, or how requests travel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from launch.serve.admission.refusals import Kind, Refusal
from launch.serve.api.kserve.models import MODELS, VERSION, Model, TensorSpec
from launch.serve.api.kserve.tensors import Array, Tensor, refuse_input
from trtrun.core.values import show_value
from trtrun.errors import nearest, shorten


@dataclass(frozen=True)
class InferRequest:
    """A request, read and checked.

    Attributes:
        request_id: the client's, which responses carry; empty where it has none.
        inputs: by name, each with the batch as its first dimension.
        outputs: names of those that are wanted; empty for all that there are.
        batch_size: first dimension of every input.
    """

    model: Model
    request_id: str
    inputs: Mapping[str, Array]
    outputs: Sequence[str]
    batch_size: int


@dataclass(frozen=True)
class InferResponse:
    """One of the responses to a request.

    Attributes:
        tensors: the outputs.
        is_last: whether no other follows.
    """

    model: Model
    request_id: str
    tensors: Sequence[Tensor] = field(default_factory=tuple)
    is_last: bool = True


def find_model(name: str, version: str = "") -> Model:
    """A model by its name and version; an empty version is the latest.

    Raises:
        Refusal: there is none.
    """
    model = MODELS.get(name)
    if model is None:
        known = nearest(name, MODELS)
        raise Refusal(Kind.UNKNOWN_MODEL, f"there is no model {show_value(name)}{known}", "model", "model_not_found")
    if version not in ("", VERSION):
        raise Refusal(
            Kind.UNKNOWN_MODEL, f"{name} has no version {show_value(version)}, but {VERSION}", "model",
            "model_not_found",
        )  # fmt: skip
    return model


def fixed_models(name: str) -> Refusal:
    """What a request to load or unload a model is told.

    Raises:
        Refusal: there is no model of that name.
    """
    model = find_model(name)
    return Refusal(
        Kind.INVALID, f"{model.name} is one of the job's models: they are not loaded or unloaded by requests"
    )


def no_shared_memory() -> Refusal:
    """What a request is told whose tensors, or responses, are to lie in shared memory."""
    return Refusal(Kind.INVALID, "there is no shared memory here: send tensors in the request")


def check_request(
    model: Model, request_id: str, tensors: Sequence[Tensor], outputs: Sequence[str], max_batch_size: int
) -> InferRequest:
    """Hold a request to its model.

    Raises:
        Refusal: an input or output is unknown, missing, twice there, or of another datatype or shape.
    """
    inputs: dict[str, Array] = {}
    for tensor in tensors:
        _check_tensor(model, tensor)
        if tensor.name in inputs:
            raise refuse_input(tensor.name, "the input stands twice")
        inputs[tensor.name] = tensor.values
    for spec in model.inputs.values():
        if not spec.is_optional and spec.name not in inputs:
            raise Refusal(Kind.INVALID, f"{model.name} needs the input {spec.name}, which is missing", spec.name)
    for name in outputs:
        if name not in model.outputs:
            raise Refusal(
                Kind.INVALID, f"{model.name} has no output {shorten(name)}{nearest(name, model.outputs)}", name[:100]
            )
    sizes = {name: values.shape[0] for name, values in inputs.items()}
    first, batch_size = next(iter(sizes.items()))
    for name, size in sizes.items():
        if size != batch_size:
            raise refuse_input(name, f"a batch of {size}, where {first} has one of {batch_size}")
    if not 1 <= batch_size <= max_batch_size:
        raise refuse_input(first, f"a batch of {batch_size}; {model.name} takes 1 to {max_batch_size}")
    return InferRequest(model, request_id, inputs, tuple(dict.fromkeys(outputs)), batch_size)


def find_input(model: Model, name: str) -> TensorSpec:
    """An input by its name.

    Raises:
        Refusal: the model has none of that name; says the nearest one.
    """
    spec = model.inputs.get(name)
    if spec is None:
        raise Refusal(
            Kind.INVALID, f"{model.name} has no input {shorten(name)}{nearest(name, model.inputs)}", name[:100],
            "unknown_field",
        )  # fmt: skip
    return spec


def _check_tensor(model: Model, tensor: Tensor) -> None:
    spec = find_input(model, tensor.name)
    if tensor.datatype != spec.datatype:
        raise refuse_input(tensor.name, f"datatype {tensor.datatype}; {model.name} wants {spec.datatype}")
    shape, wanted = tensor.values.shape, (-1, *spec.dims)
    if len(shape) != len(wanted) or any(most not in (-1, size) for size, most in zip(shape, wanted, strict=True)):
        raise refuse_input(
            tensor.name,
            f"shape {list(shape)}; {model.name} wants {list(wanted)}, where -1 is any size and the first is the batch",
        )


STOP = "stop"
"""Input of the models of tokens that ends another request."""


def is_stopping(request: InferRequest) -> bool:
    """Whether a request ends another one."""
    return STOP in request.inputs and bool(request.inputs[STOP].any())
