"""Fills a rank's weights from a checkpoint, one at a time, as quantizations hold them, and looks at them on the way.

It knows a share, files, and that a quantization says which tensors a linear layer has. It does not know layers, or
where in the model a weight stands.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Protocol

import torch

from trtrun.errors import CheckpointError
from trtrun.linear.quantization.base import Quantization, Tensors, TensorSlice
from trtrun.tensors import numbers_at_a_time
from trtrun.weights.checkpoint import Checkpoint
from trtrun.weights.quantization_config import load_kv_scales
from trtrun.weights.weight import HeldWeight, Share, Weight, WeightFiles

Progress = Callable[[int, int], None]
"""Called with (bytes read, bytes to read)."""


class WeightLoader(Protocol):
    """Where the weights of one rank come from.

    Attributes:
        share: the rank's place in its tensor-parallel group.
        device: where weights go.
        dtype: of activations, and of every weight that is not quantized.
        bytes_read: bytes read so far.
    """

    share: Share
    device: torch.device
    dtype: torch.dtype

    @property
    def bytes_read(self) -> int: ...

    def held(self, weight: Weight) -> Quantization:
        """How a weight is held."""
        ...

    def load(self, weight: Weight, present: torch.Tensor | None = None) -> Tensors:
        """What a linear layer with `weight` [out, in] multiplies with, as `Quantization.load` has it; `present` is the
        dense weight where it is there.

        Raises:
            CheckpointError: values that are not finite, or that contradict each other.
        """
        ...

    def tensor(self, weight: Weight) -> torch.Tensor:
        """Read `weight` on to the device in the model's dtype, or in float32 where that is its use.

        Raises:
            CheckpointError: it holds NaN or infinite values, or values that overflow the dtype.
        """
        ...

    def kv_scales(self, attention: str, num_heads: int, heads: range) -> torch.Tensor | None:
        """[2, heads] float32 on the host: the scales of a layer's keys and values, see `load_kv_scales`; None where
        weights are made up.

        Raises:
            CheckpointError: there are none, or they are not scales.
        """
        ...

    def release_buffer(self) -> None:
        """Give back what is kept from one weight to the next."""
        ...

    def close(self) -> None:
        """Close the files and report completion."""
        ...


class PackingBuffer:
    """Where dense weights lie until they are packed for their kernels on a CPU: one buffer mapped from the system. The
    allocator would keep what is freed, and a fresh one for each weight would leave holes between the packed copies."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._memory = torch.empty(0, dtype=dtype)

    def allocate(self, shape: tuple[int, ...]) -> torch.Tensor:
        """The buffer's begin, for a weight; the one before is lost."""
        size = math.prod(shape)
        if self._memory.numel() < size:
            self._memory = _map_buffer(size, self._memory.dtype)
        return self._memory[:size].view(shape)

    def release(self) -> None:
        """Give it back to the system; the next weight maps another."""
        self._memory = self._memory.new_empty(0)


class CheckpointLoader:
    """The `WeightLoader` of a checkpoint's files.

    Args:
        files: the checkpoint, or what stands for it, with every tensor checked.
        share: the rank's place in its tensor-parallel group.
        device: where weights go.
        dtype: of activations, and of every weight that is not quantized.
        quantization_of: how each weight is held.
        total: bytes to read.
        progress: called with (bytes read, bytes to read).
        device_type: of the device that weights are for, where that is not the type of `device`.
    """

    def __init__(
        self,
        files: WeightFiles,
        share: Share,
        device: torch.device,
        dtype: torch.dtype,
        quantization_of: Callable[[Weight], Quantization],
        total: int,
        progress: Progress | None,
        device_type: str | None = None,
    ) -> None:
        self.device = device
        self.device_type = device_type or device.type
        self.share = share
        self._files = files
        self.dtype = dtype
        self.held = quantization_of
        self._total = total
        self._progress = progress
        self._buffer = PackingBuffer(dtype)

    @property
    def bytes_read(self) -> int:
        """Bytes read so far."""
        return self._files.bytes_read

    def close(self) -> None:
        """Unmap the files and report completion."""
        self._files.close()
        if self._progress is not None:
            self._progress(self._total, self._total)

    def load(self, weight: Weight, present: torch.Tensor | None = None) -> Tensors:
        held, share = self.held(weight), weight.cut(self.share)
        loaded = held.load(_LayerSource(self, share, held, present))
        give_back_freed(self.device, share)
        return loaded

    def dense(self, weight: HeldWeight, quantization: Quantization) -> torch.Tensor:
        """The weight of a linear layer, [out, in] in the dtype of activations; see `WeightSource.dense`."""
        return self._fill(self.allocate(weight, quantization), weight)

    def allocate(self, weight: HeldWeight, quantization: Quantization) -> torch.Tensor:
        if self.device.type != "cpu" or quantization.keeps_dense(self.dtype, self.device):
            return self._new(weight)
        return self._buffer.allocate(weight.shape)

    def release_buffer(self) -> None:
        """Give the packing buffer back; the next packed weight maps another."""
        self._buffer.release()

    def tensor(self, weight: Weight) -> torch.Tensor:
        """Read `weight` as the protocol has it; errors as there."""
        held = weight.cut(self.share)
        return self._fill(self._new(held), held)

    def kv_scales(self, attention: str, num_heads: int, heads: range) -> torch.Tensor | None:
        files = self._files
        return load_kv_scales(files, attention, num_heads, heads) if isinstance(files, Checkpoint) else None

    def stored(self, part: TensorSlice) -> torch.Tensor:
        """Read one slice on to the device in the file's dtype.

        Raises:
            CheckpointError: it holds NaN or infinite values.
        """
        shape, result = [len(item) for item in part.ranges], None
        for offset, piece in self._files.pieces(part.name, part.ranges):
            if result is None:
                result = torch.empty(shape, dtype=piece.dtype, device=self.device)
            self.take(part.name, result[offset : offset + piece.shape[0]], piece)
        return torch.empty(shape, dtype=self.dtype, device=self.device) if result is None else result

    def _new(self, weight: HeldWeight) -> torch.Tensor:
        dtype = torch.float32 if weight.use == "float32" else self.dtype
        return torch.empty(weight.shape, dtype=dtype, device=self.device)

    def _fill(self, result: torch.Tensor, weight: HeldWeight) -> torch.Tensor:
        row = 0
        for part in weight.parts:
            if part.is_optional and not self.has(part):
                result[row : row + len(part.ranges[0])] = part.usual
            else:
                for offset, piece in self._files.pieces(part.name, part.ranges):
                    self.take(part.name, result[row + offset : row + offset + piece.shape[0]], piece)
            row += len(part.ranges[0])
        result[row:].zero_()  # vocabulary padding
        return result

    def has(self, part: TensorSlice) -> bool:
        """Whether the files have a tensor."""
        return part.name in self._files

    @property
    def is_dummy(self) -> bool:
        """Whether there are no files."""
        return self._files.is_dummy

    def take(self, name: str, destination: torch.Tensor, piece: torch.Tensor) -> None:
        """Copy a piece of tensor `name` to its destination, and look at what arrived.

        Raises:
            CheckpointError: it is not finite.
        """
        if not is_finite(destination.copy_(piece)):
            raise CheckpointError(
                f"{self._files.path}: tensor '{name}' holds NaN or infinite values in "
                f"{str(destination.dtype).removeprefix('torch.')}; the file is damaged or needs another dtype"
            )
        if self._progress is not None:
            self._progress(self._files.bytes_read, self._total)


_LARGE = 1 << 16
"""Numbers of a weight behind which freed memory is given back: looking for it takes the allocator milliseconds."""


@dataclass(frozen=True)
class _LayerSource:
    """The `WeightSource` of one linear layer."""

    loader: CheckpointLoader
    weight: HeldWeight
    quantization: Quantization
    present: torch.Tensor | None

    def dense(self) -> torch.Tensor:
        return self.loader.dense(self.weight, self.quantization) if self.present is None else self.present

    def with_dense(self, dense: torch.Tensor) -> _LayerSource:
        return replace(self, present=dense)

    @property
    def is_dummy(self) -> bool:
        return self.loader.is_dummy

    @property
    def dtype(self) -> torch.dtype:
        return self.loader.dtype

    @property
    def device(self) -> torch.device:
        return self.loader.device

    @property
    def device_type(self) -> str:
        return self.loader.device_type

    def allocate(self) -> torch.Tensor:
        return self.loader.allocate(self.weight, self.quantization)

    def put(self, name: str, destination: torch.Tensor, values: torch.Tensor) -> None:
        self.loader.take(name, destination, values)

    def has(self, stored: TensorSlice) -> bool:
        return self.loader.has(stored)

    def read(self, stored: TensorSlice) -> torch.Tensor:
        return self.loader.stored(stored)


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether every value is finite: a NaN or infinity survives a sum, which costs one pass and no memory."""
    if not tensor.is_floating_point():
        return True
    if tensor.itemsize == 1:  # numbers of 8 bits are not added up
        step = numbers_at_a_time(tensor.device)
        return all(bool(piece.float().isfinite().all()) for piece in torch.split(tensor.flatten(), step))
    # A sum that is not finite may still come from large finite values, hence the exact second look.
    return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())


def _map_buffer(elements: int, dtype: torch.dtype) -> torch.Tensor:
    """[elements] of zeros in memory of its own, which the system takes back as soon as the tensor is freed."""
    memory = mmap.mmap(-1, elements * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype)


def give_back_freed(device: torch.device, weight: HeldWeight) -> None:
    """Give the system back what the allocator keeps of freed memory, between packed weights, too, where a large one was
    loaded on a CPU: it keeps up to 32 MiB, and more of them the more holes there are."""
    if device.type != "cpu" or math.prod(weight.shape) < _LARGE:
        return
    trim = _find_trim()
    if trim is not None:
        trim(0)


@cache
def _find_trim() -> Callable[[int], int] | None:
    """The C library's `malloc_trim`; None where it has none, as it is glibc's own."""
    trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim
