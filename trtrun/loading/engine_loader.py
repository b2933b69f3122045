"""Fills a rank's weights from its shard of an engine directory: bytes as they lie there, without a step between.

On GPUs the whole shard is on its way from the beginning, in large pieces that threads read into pinned memory and copy
from there; on CPUs each weight is read when it is asked for, as its kernel packs it. Each is compared with its checksum
where it has arrived. It knows a shard's tensors and that a quantization says what a weight is held in. It does not know
layers, or where weights come from.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from itertools import chain
from math import inf
from pathlib import Path

import torch

from trtrun.configuration.engine_directory import ENGINE_FILE, EngineDescription
from trtrun.errors import CheckpointError, shorten_path, wrap_errors
from trtrun.linear.quantization.base import Quantization, Tensors, TensorSpec
from trtrun.loading.device_reading import DeviceReading
from trtrun.loading.engine_checksums import ShardComparison, read_summed, sum_words
from trtrun.loading.engine_shards import order_of_loading, read_places, shard_path, stored_name
from trtrun.models.config import ModelConfig
from trtrun.tensors import dtype_name
from trtrun.weights.checkpoint import TORCH_NAMES
from trtrun.weights.weight import Share, Weight
from trtrun.weights.weight_loader import PackingBuffer, Progress, give_back_freed


def held_tensors(
    weight: Weight, share: Share, held: Quantization, dtype: torch.dtype, device_type: str
) -> Mapping[str, TensorSpec]:
    """What a weight is held in, by names in a shard."""
    cut = weight.cut(share)
    if weight.use in ("plain", "float32"):
        return {stored_name(weight): TensorSpec(cut.shape, torch.float32 if weight.use == "float32" else dtype)}
    return {stored_name(weight, name): spec for name, spec in held.create(cut, dtype, device_type).items()}


class EngineLoader:
    """The `WeightLoader` of an engine directory.

    Args:
        path: of the engine.
        engine: what it says of itself.
        config: of its model.
        share: the rank's place in its tensor-parallel group.
        device: where weights go.
        dtype: of activations.
        quantization_of: how each weight is held.
        progress: called with (bytes read, bytes to read).

    Raises:
        CheckpointError: the shard is damaged, was built for another number of ranks, or for devices that hold weights
            in another form.
    """

    def __init__(
        self,
        path: Path,
        engine: EngineDescription,
        config: ModelConfig,
        share: Share,
        device: torch.device,
        dtype: torch.dtype,
        quantization_of: Callable[[Weight], Quantization],
        progress: Progress | None,
    ) -> None:
        if share.size != engine.tp_size:
            raise CheckpointError(
                f"{shorten_path(path)} is an engine for {engine.tp_size} ranks, and not for {share.size}: build it "
                f"again with --tp {share.size}"
            )
        self.share, self.device, self.dtype, self.held = share, device, dtype, quantization_of
        self._places = read_places(path, engine, share.rank)
        self._specs: dict[str, TensorSpec] = {}
        for weight in order_of_loading(config):
            self._specs |= held_tensors(weight, share, quantization_of(weight), dtype, device.type)
        self._file, self._kv_scales = shard_path(path, engine, share.rank), engine.kv_scales
        for name, spec in self._specs.items():
            self._check(name, spec, engine)
        self._progress = progress
        self._total = sum(self._places[name].num_bytes for name in self._specs)
        self._read = 0
        self._comparison = ShardComparison(path, engine, share.rank)
        self._buffer = PackingBuffer(dtype)
        self._opened: int | None = None
        self._arriving: DeviceReading | None = None

    def _check(self, name: str, spec: TensorSpec, engine: EngineDescription) -> None:
        place = self._places.get(name)
        found = None if place is None else (TORCH_NAMES.get(place.dtype), place.shape)
        if found != (dtype_name(spec.dtype), tuple(spec.shape)):
            raise CheckpointError(
                f"{shorten_path(self._file)} was built for {engine.built_for} and does not hold '{name}' as weights "
                f"are held here ({dtype_name(spec.dtype)} {list(spec.shape)}): build the engine again on such a device"
            )

    @property
    def bytes_read(self) -> int:
        return self._read

    def load(self, weight: Weight, present: torch.Tensor | None = None) -> Tensors:
        if present is not None:
            return {"weight": present}
        cut, held = weight.cut(self.share), self.held(weight)
        specs = held.create(cut, self.dtype, self.device.type)
        is_packed = self.device.type == "cpu" and not held.keeps_dense(self.dtype, self.device)
        loaded = {}
        for name in specs:
            # What is not dense goes into a product's own order by pieces, or stays as it is.
            destination = self._buffer.allocate(cut.shape) if is_packed and name == "weight" else None
            loaded[name] = self._take(stored_name(weight, name), destination)
        give_back_freed(self.device, cut)
        return loaded

    def tensor(self, weight: Weight) -> torch.Tensor:
        return self._take(stored_name(weight))

    def kv_scales(self, attention: str, num_heads: int, heads: range) -> torch.Tensor:
        found = self._kv_scales.get(attention, ())
        if [len(scales) for scales in found] != [num_heads] * 2 or not all(0 < one < inf for one in chain(*found)):
            raise CheckpointError(
                f"{shorten_path(self._file.parent)}: {ENGINE_FILE} does not hold a scale above 0 for each KV head of "
                f"{attention}: build the engine again"
            )
        return torch.tensor(found)[:, heads.start : heads.stop]

    def release_buffer(self) -> None:
        self._buffer.release()

    def close(self) -> None:
        """Close the files and report completion.

        Raises:
            CheckpointError: a weight is not what was built.
        """
        if self._arriving is not None:
            self._arriving.close()
            self._arriving = None
        if self._opened is not None:
            os.close(self._opened)
            self._opened = None
        self._comparison.compare()
        if self._progress is not None:
            self._progress(self._total, self._total)

    @property
    def _streams(self) -> bool:
        """Whether all weights are on their way while layers are built: on GPUs, which keep them as they are."""
        return self.device.type == "cuda"

    def _take(self, name: str, destination: torch.Tensor | None = None) -> torch.Tensor:
        """A tensor of the shard, read to `destination` where one is given."""
        spec, where = self._specs[name], self._places[name]
        with wrap_errors(self._file, CheckpointError):
            arrived = self._arrival(name) if self._streams else None
            if arrived is not None:
                self._comparison.add(name, sum_words(arrived))
                return arrived
            made = torch.empty(spec.shape, dtype=spec.dtype) if destination is None else destination
            self._comparison.add(name, read_summed(made, self._open(), where.start, read=self._tell_more))
            self._comparison.compare()
            return made.to(self.device)

    def _arrival(self, name: str) -> torch.Tensor | None:
        """A tensor on the GPU; None where it is asked for a second time."""
        if self._arriving is None:
            order = sorted(self._specs, key=lambda one: self._places[one].start)
            wanted = {one: (self._places[one].start, self._specs[one]) for one in order}
            self._arriving = DeviceReading(self._file, self.device, wanted)
        try:
            found = self._arriving.take(name, self._tell)
        except BaseException:
            self._arriving.close()
            raise
        self._tell(max(self._read, self._arriving.arrived))
        return found

    def _tell_more(self, read: int) -> None:
        self._tell(self._read + read)

    def _tell(self, read: int) -> None:
        self._read = read
        if self._progress is not None:
            self._progress(min(read, self._total), self._total)

    def _open(self) -> int:
        if self._opened is None:
            self._opened = os.open(self._file, os.O_RDONLY)
        return self._opened
