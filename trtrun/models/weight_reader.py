"""Fills this rank's weights from a checkpoint, one at a time, checks them on the way, and makes the linear layers.

It knows files, slices, and that a quantization says which tensors a linear layer has. It does not know where in the
model a weight stands, or what else the process holds.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import dataclass

import torch

from trtrun.errors import CheckpointError
from trtrun.linear.layer import Linear
from trtrun.linear.quantization import Quantization
from trtrun.linear.quantization.base import TensorSlice
from trtrun.models.shard_layout import ShardLayout, Weight
from trtrun.models.weight_check import WeightFiles, check_weights

Progress = Callable[[int, int], None]


class WeightReader:
    """Reads the weights of one rank.

    Args:
        checkpoint: the files, or what stands for them.
        layout: what the rank holds of them.
        device: where weights go.
        dtype: of activations, and of every weight that is not quantized.
        quantization: of linear layers.
        progress: called with (bytes read, bytes to read).
        batch_invariant: see `Quantization.apply`.

    Raises:
        CheckpointError: a tensor is missing, or has another shape, or a dtype that is not supported.
    """

    def __init__(
        self,
        checkpoint: WeightFiles,
        layout: ShardLayout,
        device: torch.device,
        dtype: torch.dtype,
        quantization: Quantization,
        progress: Progress | None,
        batch_invariant: bool,
    ) -> None:
        self.device = device
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._quantization = quantization
        self._progress = progress
        self._batch_invariant = batch_invariant
        self._buffer = torch.empty(0, dtype=dtype)
        # Every name, shape and dtype is checked before the first byte of a weight is read.
        self._total = check_weights(checkpoint, layout, quantization)

    @property
    def bytes_read(self) -> int:
        """Bytes read so far."""
        return self._checkpoint.bytes_read

    def close(self) -> None:
        """Unmap the files and report completion."""
        self._checkpoint.close()
        if self._progress is not None:
            self._progress(self._total, self._total)

    def linear(
        self,
        weight: Weight,
        bias: Weight | None = None,
        *,
        present: torch.Tensor | None = None,
        quantization: Quantization | None = None,
    ) -> Linear:
        """A linear layer of `weight` [out, in] and `bias` [out]; `present` is the dense weight where it is there, and
        `quantization` of this layer, where it is another one."""
        held = quantization or self._quantization
        return Linear(
            weight.shape,
            held,
            held.load(_LayerSource(self, weight, held, present)),
            self.optional(bias),
            batch_invariant=self._batch_invariant,
        )

    def dense(self, weight: Weight, quantization: Quantization) -> torch.Tensor:
        """The weight of a linear layer, [out, in] in the dtype of activations; see `WeightSource.dense`."""
        if self.device.type != "cpu" or quantization.keeps_dense(self._dtype, self.device):
            return self.tensor(weight)
        if self._buffer.numel() < weight.num_elements:
            # Weights are packed out of one buffer mapped from the system: the allocator would keep what is freed, and a
            # fresh one for each weight would leave holes between the packed copies.
            self._buffer = _map_buffer(weight.num_elements, self._dtype)
        return self._fill(self._buffer[: weight.num_elements].view(weight.shape), weight)

    def release_buffer(self) -> None:
        """Give the packing buffer back; the next packed weight maps another."""
        self._buffer = self._buffer.new_empty(0)

    def optional(self, weight: Weight | None) -> torch.Tensor | None:
        """The tensor, or None for a weight that the architecture does not have."""
        return None if weight is None else self.tensor(weight)

    def tensor(self, weight: Weight) -> torch.Tensor:
        """Read `weight` on to the device in the model's dtype.

        Raises:
            CheckpointError: it holds NaN or infinite values, or values that overflow the dtype.
        """
        return self._fill(torch.empty(weight.shape, dtype=self._dtype, device=self.device), weight)

    def stored(self, part: TensorSlice) -> torch.Tensor:
        """Read one slice on to the device in the file's dtype.

        Raises:
            CheckpointError: it holds NaN or infinite values.
        """
        shape, result = [len(item) for item in part.ranges], None
        for offset, piece in self._checkpoint.pieces(part.name, part.ranges):
            if result is None:
                result = torch.empty(shape, dtype=piece.dtype, device=self.device)
            self._take(part.name, result[offset : offset + piece.shape[0]], piece)
        return torch.empty(shape, dtype=self._dtype, device=self.device) if result is None else result

    def _fill(self, result: torch.Tensor, weight: Weight) -> torch.Tensor:
        row = 0
        for part in weight.parts:
            for offset, piece in self._checkpoint.pieces(part.name, part.ranges):
                self._take(part.name, result[row + offset : row + offset + piece.shape[0]], piece)
            row += len(part.ranges[0])
        result[row:].zero_()  # vocabulary padding
        return result

    def _take(self, name: str, place: torch.Tensor, piece: torch.Tensor) -> None:
        """Copy a piece of tensor `name` to its place, and look at what arrived."""
        if not _is_finite(place.copy_(piece)):
            raise CheckpointError(
                f"{self._checkpoint.path}: tensor '{name}' holds NaN or infinite values in "
                f"{str(place.dtype).removeprefix('torch.')}; the file is damaged or needs another dtype"
            )
        if self._progress is not None:
            self._progress(self._checkpoint.bytes_read, self._total)


@dataclass(frozen=True)
class _LayerSource:
    """Where one linear layer's weight comes from; see `WeightSource`."""

    reader: WeightReader
    weight: Weight
    quantization: Quantization
    present: torch.Tensor | None

    def dense(self) -> torch.Tensor:
        """See `WeightSource`."""
        return self.reader.dense(self.weight, self.quantization) if self.present is None else self.present

    def read(self, stored: TensorSlice) -> torch.Tensor:
        """See `WeightSource`."""
        return self.reader.stored(stored)


def _is_finite(tensor: torch.Tensor) -> bool:
    """Whether every value is finite: a NaN or infinity survives a sum, which costs one pass and no memory."""
    # A sum that is not finite may still come from large finite values, hence the exact second look.
    return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())


def _map_buffer(elements: int, dtype: torch.dtype) -> torch.Tensor:
    """[elements] of zeros in memory of its own, which the system takes back as soon as the tensor is freed."""
    memory = mmap.mmap(-1, elements * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype)
