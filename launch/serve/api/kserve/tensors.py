"""Tensors as they travel: KServe's datatypes, as JSON values and as bytes, read with every size checked."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from launch.serve.admission.refusals import Kind, Refusal
from trtrun.errors import nearest, shorten

Array = NDArray[Any]

DATATYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "UINT8": np.dtype(np.uint8),
    "UINT64": np.dtype("<u8"),
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
    "FP16": np.dtype("<f2"),
    "FP32": np.dtype("<f4"),
    "BYTES": np.dtype(np.object_),
}
"""Datatypes that the models have, as they lie in memory; BYTES are arrays of `bytes`."""

MOST_DIMENSIONS = 8
"""The most dimensions of a tensor that is read; the models' have five at most."""

MOST_VALUES = 1 << 40
"""The most values that a shape may name: many times what a request has room for, and few enough to reckon with."""

_LENGTH_BYTES = 4
_ENCODER = msgspec.json.Encoder()


@dataclass(frozen=True)
class Tensor:
    """A tensor with its name.

    Attributes:
        values: of the dtype that DATATYPES has for the datatype.
    """

    name: str
    datatype: str
    values: Array


def refuse_input(name: str, problem: str) -> Refusal:
    """An input that is wrong."""
    return Refusal(Kind.INVALID, f"{shorten(name)[1:-1]}: {problem}", name[:100])


def read_shape(name: str, shape: Sequence[object]) -> tuple[int, ...]:
    """A shape: whole numbers, none below 0.

    Raises:
        Refusal: it is something else, has too many dimensions, or speaks of more values than there can be.
    """
    if len(shape) > MOST_DIMENSIONS:
        raise refuse_input(name, f"a shape of {len(shape)} dimensions; {MOST_DIMENSIONS} are the most")
    sizes = tuple(size for size in shape if isinstance(size, int) and not isinstance(size, bool) and size >= 0)
    if len(sizes) < len(shape):
        raise refuse_input(name, f"shape {shorten(list(shape))} must hold whole numbers from 0")
    # A size of 0 leaves no values; the other sizes have to be numbers that arrays can have all the same.
    if math.prod(size or 1 for size in sizes) > MOST_VALUES:
        raise refuse_input(name, f"shape {shorten(list(shape))} is larger than any tensor that fits into a request")
    return sizes


def read_values(name: str, datatype: str, shape: tuple[int, ...], data: object) -> Tensor:
    """A tensor from JSON: a list of values in the order of rows, or lists of lists.

    Raises:
        Refusal: there are more or fewer values than the shape has, or one is of another kind.
    """
    dtype = _dtype(name, datatype)
    flat = _flatten(name, data)
    if len(flat) != math.prod(shape):
        raise refuse_input(name, f"{len(flat)} values for a shape of {math.prod(shape)}, {list(shape)}")
    values = np.empty(len(flat), dtype)
    for place, value in enumerate(flat):
        values[place] = _read_value(name, datatype, dtype, value)
    return Tensor(name, datatype, values.reshape(shape))


def read_bytes(name: str, datatype: str, shape: tuple[int, ...], raw: bytes | memoryview) -> Tensor:
    """A tensor from its bytes: values in the order of rows, little-endian; of BYTES each behind its length in 4 bytes.

    Raises:
        Refusal: they are not as many as the shape wants.
    """
    dtype = _dtype(name, datatype)
    count = math.prod(shape)
    if datatype == "BYTES":
        return Tensor(name, datatype, _read_texts(name, count, bytes(raw)).reshape(shape))
    if len(raw) != count * dtype.itemsize:
        raise refuse_input(name, f"{len(raw)} bytes for {count} values of {datatype}, {count * dtype.itemsize} bytes")
    if datatype == "BOOL":
        return Tensor(name, datatype, (np.frombuffer(raw, np.uint8) != 0).reshape(shape))
    return Tensor(name, datatype, np.frombuffer(raw, dtype).reshape(shape))


def write_bytes(tensor: Tensor) -> bytes:
    """The tensor as `read_bytes` reads it."""
    if tensor.datatype != "BYTES":
        return tensor.values.tobytes()
    return b"".join(len(value).to_bytes(_LENGTH_BYTES, "little") + value for value in tensor.values.ravel())


MOST_WHOLE_BYTES = 1 << 20
"""The most bytes of a tensor whose bytes are copied at once."""


def write_parts(tensor: Tensor) -> list[bytes | memoryview]:
    """The bytes as `write_bytes` has them, in parts; those of a large tensor are not copied."""
    if tensor.datatype == "BYTES" or tensor.values.nbytes <= MOST_WHOLE_BYTES:
        return [write_bytes(tensor)]
    whole = np.ascontiguousarray(tensor.values).reshape(-1).view(np.uint8).data
    return [whole[at : at + MOST_WHOLE_BYTES] for at in range(0, len(whole), MOST_WHOLE_BYTES)]


def write_values(tensor: Tensor) -> list[Any]:
    """The tensor's values in the order of rows, ready for JSON; bytes that are no text become U+FFFD."""
    values = tensor.values.ravel()
    if tensor.datatype == "BYTES":
        return [value.decode(errors="replace") for value in values]
    if tensor.datatype in ("FP16", "FP32"):
        values = np.nan_to_num(values)  # JSON has no other numbers
    found: list[Any] = values.tolist()
    return found


PART_VALUES = 1 << 14
"""Values in each part of a tensor's JSON."""


def write_json(tensor: Tensor) -> Iterator[bytes]:
    """The values as `write_values` has them, as the JSON of a list, in parts that are made in little time."""
    values = tensor.values.ravel()
    yield b"["
    for place in range(0, len(values), PART_VALUES):
        part = write_values(replace(tensor, values=values[place : place + PART_VALUES]))
        yield (b"," if place else b"") + _ENCODER.encode(part)[1:-1]
    yield b"]"


def text_array(texts: Sequence[str], shape: tuple[int, ...]) -> Array:
    """Texts as BYTES."""
    values = np.empty(len(texts), np.object_)
    values[:] = [text.encode(errors="replace") for text in texts]
    return values.reshape(shape)


def _dtype(name: str, datatype: str) -> np.dtype[Any]:
    dtype = DATATYPES.get(datatype)
    if dtype is None:
        raise refuse_input(name, f"there is no datatype {shorten(datatype)} here{nearest(datatype, DATATYPES)}")
    return dtype


def _flatten(name: str, data: object) -> list[object]:
    """All values of nested lists, in order."""
    if not isinstance(data, list):
        raise refuse_input(name, f"data must be a list, not {shorten(data)}")
    level: list[object] = data
    for _ in range(MOST_DIMENSIONS):
        if not any(isinstance(item, list) for item in level):
            return level
        if not all(isinstance(item, list) for item in level):
            raise refuse_input(name, "data mixes lists and values")
        level = [item for items in level if isinstance(items, list) for item in items]
    raise refuse_input(name, f"data is nested deeper than {MOST_DIMENSIONS} lists")


def _read_value(name: str, datatype: str, dtype: np.dtype[Any], value: object) -> object:
    if datatype == "BYTES" and isinstance(value, str):
        try:
            return value.encode()
        except UnicodeEncodeError:
            raise refuse_input(name, "half of a surrogate pair is no character") from None
    if datatype == "BOOL" and isinstance(value, bool):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        if dtype.kind == "f" and abs(value) <= float(np.finfo(dtype).max):  # Python compares numbers of any size
            return value
        if dtype.kind in "iu" and isinstance(value, int) and np.iinfo(dtype).min <= value <= np.iinfo(dtype).max:
            return value
    raise refuse_input(name, f"{shorten(value)} is no {datatype}")


def _read_texts(name: str, count: int, raw: bytes) -> Array:
    if count * _LENGTH_BYTES > len(raw):
        raise refuse_input(name, f"{len(raw)} bytes for {count} values of BYTES, each behind its length in 4 bytes")
    values = np.empty(count, np.object_)
    at = 0
    for place in range(count):
        end = at + _LENGTH_BYTES
        length = int.from_bytes(raw[at:end], "little")
        at = end + length
        if end > len(raw) or at > len(raw):
            raise refuse_input(name, f"value {place} of BYTES is longer than the bytes that came")
        values[place] = raw[end:at]
    if at != len(raw):
        raise refuse_input(name, f"{len(raw) - at} bytes are left behind {count} values of BYTES")
    return values
