"""Requests for inference in no protocol's words, checked against the table of their model and read row by row; and the
responses to them.

Checked is what Triton checks before a model sees a request: names, datatypes, shapes, the batch dimension. A row's
inputs are numbers, texts and lists instead of tensors. Lists of words travel as TensorRT-LLM has them: all token ids,
and where each word ends.

    [[ 11, 12, 13, 21, 22],       words [11, 12, 13] and [21, 22]
     [  3,  5, -1, -1, -1]]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from launch.serve.admission.limits import check_words
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
    """A response to a request, one of several perhaps.

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


class Row:
    """A row of a batch."""

    def __init__(self, inputs: Mapping[str, Array], place: int) -> None:
        self._inputs = inputs
        self._place = place

    def has(self, name: str) -> bool:
        """Whether the input is there."""
        return name in self._inputs

    def array(self, name: str) -> Array | None:
        """The row's values, without the batch dimension; None where the input is not there."""
        values = self._inputs.get(name)
        return None if values is None else values[self._place]

    def number(self, name: str, default: Any) -> Any:
        """The one number of an input.

        Args:
            name: of an input with one value a row.
            default: where the input is not there.
        """
        values = self.array(name)
        return default if values is None else values.item()

    def flag(self, name: str, default: bool = False) -> bool:
        """The one truth value of an input."""
        return bool(self.number(name, default))

    def text(self, name: str) -> str:
        """The one text of an input; empty where it is not there.

        Raises:
            Refusal: its bytes are no UTF-8.
        """
        return "".join(self.texts(name))

    def texts(self, name: str) -> tuple[str, ...]:
        """The texts of an input; none where it is not there.

        Raises:
            Refusal: bytes that are no UTF-8.
        """
        values = self.array(name)
        try:
            return () if values is None else tuple(value.decode() for value in values.ravel())
        except UnicodeDecodeError as error:
            raise refuse_input(name, f"byte {error.start + 1} of a text is not valid UTF-8") from None

    def words(self, name: str) -> tuple[str, ...]:
        """The texts of an input that become tokens, each by itself.

        Raises:
            Refusal: as of `texts`; or there are too many, or they are too long.
        """
        found = self.texts(name)
        check_words(name, found)
        return found

    def integers(self, name: str) -> tuple[int, ...]:
        """The whole numbers of an input; none where it is not there."""
        return self.numbers(name)

    def numbers(self, name: str) -> tuple[Any, ...]:
        """The numbers of an input; none where it is not there."""
        values = self.array(name)
        return () if values is None else tuple(values.ravel().tolist())


def read_word_list(name: str, values: Array | None) -> tuple[tuple[int, ...], ...]:
    """The words of a list.

    Args:
        name: of the input, for messages.
        values: [2, length] int32; None for no words.

    Raises:
        Refusal: ends do not rise, or lie behind the tokens; a word has a number below 0; or there are too many words,
            or they are too long.
    """
    if values is None:
        return ()
    tokens, ends = values.tolist()
    words: list[tuple[int, ...]] = []
    begin = 0
    for end in ends:
        if end == -1 or (end == 0 and not words):  # clients pad lists without words with both
            break
        if not begin < end <= len(tokens):
            raise refuse_input(name, f"word {len(words)} ends at {end}, where it begins at {begin} of {len(tokens)}")
        word = tuple(tokens[begin:end])
        if min(word) < 0:
            raise refuse_input(name, f"{min(word)} is no token id")
        words.append(word)
        begin = end
    check_words(name, words, "tokens")
    return tuple(words)


def write_word_lists(rows: Sequence[Sequence[Sequence[int]]]) -> Array:
    """The lists of a batch, as tensorrtllm_backend's preprocessing pads them.

    Args:
        rows: for each row its words, each as token ids.

    Returns:
        [batch, 2, length] int32; tokens are filled up with 0, ends with -1. The length is 1 at least.
    """
    spelled = [[word for word in words if word] for words in rows]
    length = max((sum(map(len, words)) for words in spelled), default=0)
    found = np.zeros((len(rows), 2, max(1, length)), np.int32)
    found[:, 1] = -1
    for place, words in enumerate(spelled):
        flat = [token for word in words for token in word]
        found[place, 0, : len(flat)] = flat
        found[place, 1, : len(words)] = np.cumsum([len(word) for word in words])
    return found
