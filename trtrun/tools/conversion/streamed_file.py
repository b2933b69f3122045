"""A safetensors file that is written tensor by tensor: no more than one is in memory.

Source: the format's description (huggingface/safetensors, README). It knows names, shapes and bytes.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from trtrun.errors import CheckpointError
from trtrun.files import put_in_place
from trtrun.weights.weight_loader import is_finite
from trtrun.weights.written_files import NEW

_CODES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.int32: "I32",
    torch.int64: "I64",
}
_ALIGNMENT = 8


@dataclass(frozen=True)
class TensorPlan:
    """A tensor that is to be written.

    Attributes:
        shape, dtype: of it.
        make: it, contiguous on the host, when its turn comes.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], torch.Tensor]


def write_tensors(
    path: Path,
    plans: Mapping[str, TensorPlan],
    written: Callable[[int], None],
    metadata: Mapping[str, str] | None = None,
) -> int:
    """Write a file, and put it in place once it is whole; returns its bytes.

    Args:
        path: of the file.
        plans: by name; written in this order.
        written: called with the bytes of each tensor.
        metadata: of the file, in its header.

    Raises:
        CheckpointError: a tensor is not what its plan says, or not finite.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    end = 0
    for name, plan in plans.items():
        size = math.prod(plan.shape) * plan.dtype.itemsize
        header[name] = {"dtype": _CODES[plan.dtype], "shape": list(plan.shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    temporary = path.with_suffix(NEW)
    with open(temporary, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, plan in plans.items():
            tensor = plan.make()
            if tuple(tensor.shape) != plan.shape or tensor.dtype != plan.dtype:
                raise CheckpointError(f"{name} is {tensor.dtype} {list(tensor.shape)}, not {plan.dtype} {plan.shape}")
            if not is_finite(tensor):
                raise CheckpointError(f"{name} has numbers that are not finite in {tensor.dtype}")
            data = tensor.contiguous().flatten().view(torch.uint8).numpy()
            file.write(data.data)
            written(data.nbytes)
    put_in_place(temporary, path)
    return path.stat().st_size
