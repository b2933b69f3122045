"""Fills this rank's weights from a checkpoint, one at a time, looks at them on the way, and makes the linear layers.

It knows its rank's share, files, and that a quantization says which tensors a linear layer has. Plans of layers build
with it. It does not know where in the model a weight stands, or what else the process holds.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

from parallel.communicator import Communicator
from trtrun.attention.backend import AttentionBackend, attention_backend
from trtrun.errors import CheckpointError
from trtrun.kvcache.byte_codes import LARGEST, LEAST_SCALE, MOST_SCALE
from trtrun.kvcache.formats import ByteKV, KVFormat
from trtrun.layers.decoder_layer import RowParallelLinear
from trtrun.linear.layer import Linear
from trtrun.linear.quantization.base import Quantization, TensorSlice
from trtrun.models.checkpoint import Checkpoint
from trtrun.models.kv_scales import load_kv_scales
from trtrun.models.weight_files import WeightFiles
from trtrun.models.weights import Axis, HeldWeight, Share, Weight

Progress = Callable[[int, int], None]


class WeightReader:
    """Reads the weights of one rank.

    Args:
        files: the checkpoint, or what stands for it, with every tensor checked.
        communicator: of the tensor-parallel group.
        device: where weights go.
        dtype: of activations, and of every weight that is not quantized.
        quantization_of: how each weight is held.
        total: bytes to read.
        progress: called with (bytes read, bytes to read).
        batch_invariant: see `Quantization.apply`.
        kv_format: how the store that attention will meet keeps keys and values.
    """

    def __init__(
        self,
        files: WeightFiles,
        communicator: Communicator,
        device: torch.device,
        dtype: torch.dtype,
        quantization_of: Callable[[Weight], Quantization],
        total: int,
        progress: Progress | None,
        batch_invariant: bool,
        kv_format: KVFormat,
    ) -> None:
        self.device = device
        self.share = Share(communicator.rank, communicator.size)
        self._files = files
        self._communicator = communicator
        self.dtype = dtype
        self._quantization_of = quantization_of
        self._total = total
        self._progress = progress
        self._batch_invariant = batch_invariant
        self._kv_format = kv_format
        self._buffer = torch.empty(0, dtype=dtype)
        self._backends: dict[int, AttentionBackend] = {}

    @property
    def bytes_read(self) -> int:
        """Bytes read so far."""
        return self._files.bytes_read

    def close(self) -> None:
        """Unmap the files and report completion."""
        self._files.close()
        if self._progress is not None:
            self._progress(self._total, self._total)

    def attention(self, head_dim: int) -> AttentionBackend:
        """What attends over heads of a size: the same for all layers, which share its scratch memory."""
        if head_dim not in self._backends:
            self._backends[head_dim] = attention_backend(self.device, self.dtype, head_dim, self._kv_format)
        return self._backends[head_dim]

    def kv_scales(self, attention: str, keys: Axis) -> torch.Tensor | None:
        """The scales of a layer's keys and values, where its store has none of tokens.

        Args:
            attention: in front of the layer's names.
            keys: their features.

        Returns:
            [2, this rank's KV heads] float32 on the device, numbers of bfloat16, or None.

        Raises:
            CheckpointError: see `load_kv_scales`.
        """
        if not isinstance(self._kv_format, ByteKV) or not self._kv_format.has_layer_scales:
            return None
        heads = keys.units(self.share)
        if isinstance(self._files, Checkpoint):
            scales = load_kv_scales(self._files, attention, keys.size, heads)
        else:  # made-up weights have made-up scales
            scales = torch.full((2, len(heads)), _MADE_UP_MOST / LARGEST[self._kv_format.kind])
        return scales.clamp(LEAST_SCALE, MOST_SCALE).to(torch.bfloat16).float().to(self.device)

    def linear(self, weight: Weight, bias: Weight | None = None, *, present: torch.Tensor | None = None) -> Linear:
        """A linear layer of `weight` [out, in] and `bias` [out]; `present` is the dense weight where it is there."""
        held, share = self._quantization_of(weight), weight.cut(self.share)
        loaded = held.load(_LayerSource(self, share, held, present))
        if self.device.type == "cpu" and math.prod(share.shape) >= _LARGE:
            _give_back_freed()
        return Linear(
            share.shape,
            held,
            loaded,
            None if bias is None else self.tensor(bias),
            batch_invariant=self._batch_invariant,
        )

    def row_parallel(self, weight: Weight, bias: Weight | None = None) -> RowParallelLinear:
        """A linear layer whose input features are shared out."""
        return RowParallelLinear(self.linear(weight), None if bias is None else self.tensor(bias), self._communicator)

    def dense(self, weight: HeldWeight, quantization: Quantization) -> torch.Tensor:
        """The weight of a linear layer, [out, in] in the dtype of activations; see `WeightSource.dense`."""
        return self._fill(self.place(weight, quantization), weight)

    def place(self, weight: HeldWeight, quantization: Quantization) -> torch.Tensor:
        """See `WeightSource.place`."""
        if self.device.type != "cpu" or quantization.keeps_dense(self.dtype, self.device):
            return self._new(weight)
        if self._buffer.numel() < weight.num_elements:
            # Weights are packed out of one buffer mapped from the system: the allocator would keep what is freed, and a
            # fresh one for each weight would leave holes between the packed copies.
            self._buffer = _map_buffer(weight.num_elements, self.dtype)
        return self._buffer[: weight.num_elements].view(weight.shape)

    def release_buffer(self) -> None:
        """Give the packing buffer back; the next packed weight maps another."""
        self._buffer = self._buffer.new_empty(0)

    def tensor(self, weight: Weight) -> torch.Tensor:
        """Read `weight` on to the device in the model's dtype.

        Raises:
            CheckpointError: it holds NaN or infinite values, or values that overflow the dtype.
        """
        held = weight.cut(self.share)
        return self._fill(self._new(held), held)

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
        return torch.empty(weight.shape, dtype=self.dtype, device=self.device)

    def _fill(self, result: torch.Tensor, weight: HeldWeight) -> torch.Tensor:
        row = 0
        for part in weight.parts:
            for offset, piece in self._files.pieces(part.name, part.ranges):
                self.take(part.name, result[row + offset : row + offset + piece.shape[0]], piece)
            row += len(part.ranges[0])
        result[row:].zero_()  # vocabulary padding
        return result

    def has(self, part: TensorSlice) -> bool:
        """Whether the files have a tensor."""
        return part.name in self._files

    @property
    def is_made_up(self) -> bool:
        """Whether there are no files."""
        return self._files.is_made_up

    def take(self, name: str, place: torch.Tensor, piece: torch.Tensor) -> None:
        """Copy a piece of tensor `name` to its place, and look at what arrived.

        Raises:
            CheckpointError: it is not finite.
        """
        if not _is_finite(place.copy_(piece)):
            raise CheckpointError(
                f"{self._files.path}: tensor '{name}' holds NaN or infinite values in "
                f"{str(place.dtype).removeprefix('torch.')}; the file is damaged or needs another dtype"
            )
        if self._progress is not None:
            self._progress(self._files.bytes_read, self._total)


_MADE_UP_MOST = 64.0
"""The largest key or value that made-up scales are for."""

_LARGE = 1 << 16
"""Numbers of a weight behind which freed memory is given back: looking for it takes the allocator milliseconds."""


@dataclass(frozen=True)
class _LayerSource:
    """Where one linear layer's weight comes from; see `WeightSource`."""

    reader: WeightReader
    weight: HeldWeight
    quantization: Quantization
    present: torch.Tensor | None

    def dense(self) -> torch.Tensor:
        """See `WeightSource`."""
        return self.reader.dense(self.weight, self.quantization) if self.present is None else self.present

    @property
    def is_made_up(self) -> bool:
        """See `WeightSource`."""
        return self.reader.is_made_up

    @property
    def dtype(self) -> torch.dtype:
        """See `WeightSource`."""
        return self.reader.dtype

    @property
    def device(self) -> torch.device:
        """See `WeightSource`."""
        return self.reader.device

    def place(self) -> torch.Tensor:
        """See `WeightSource`."""
        return self.reader.place(self.weight, self.quantization)

    def put(self, name: str, place: torch.Tensor, values: torch.Tensor) -> None:
        """See `WeightSource`."""
        self.reader.take(name, place, values)

    def has(self, stored: TensorSlice) -> bool:
        """See `WeightSource`."""
        return self.reader.has(stored)

    def read(self, stored: TensorSlice) -> torch.Tensor:
        """See `WeightSource`."""
        return self.reader.stored(stored)


def _is_finite(tensor: torch.Tensor) -> bool:
    """Whether every value is finite: a NaN or infinity survives a sum, which costs one pass and no memory."""
    if not tensor.is_floating_point():
        return True
    if tensor.itemsize == 1:
        tensor = tensor.float()  # numbers of 8 bits are not added up
    # A sum that is not finite may still come from large finite values, hence the exact second look.
    return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())


def _map_buffer(elements: int, dtype: torch.dtype) -> torch.Tensor:
    """[elements] of zeros in memory of its own, which the system takes back as soon as the tensor is freed."""
    memory = mmap.mmap(-1, elements * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype)


def _give_back_freed() -> None:
    """Give the system back what the allocator keeps of freed memory, between packed weights, too: it keeps up to
    32 MiB, and more of them the more holes there are."""
    trim = _find_trim()
    if trim is not None:
        trim(0)


@cache
def _find_trim() -> Callable[[int], int] | None:
    """The C library's `malloc_trim`; None where it has none, as it is glibc's own."""
    trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim
