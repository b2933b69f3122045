"""Builds an engine of a checkpoint: a shard for each rank, one weight in memory at a time, and what describes them.

The weights are made by the very functions that a start of the checkpoint makes them by, so that both hold the same
bits. It knows weights and files. It does not know where they are put in place (settings.py).
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from trtrun.configuration.engine_directory import (
    ANYWHERE,
    ENGINE_FILE,
    FORMAT,
    EngineDescription,
    ShardDescription,
    engine_json,
)
from trtrun.linear.quantization import Quantization
from trtrun.linear.quantization.base import Tensors, TensorSpec
from trtrun.loading.engine_checksums import checksum_text, sum_words
from trtrun.loading.engine_loader import held_tensors
from trtrun.loading.engine_shards import describe_rank, hash_header, order_of_loading, stored_name
from trtrun.loading.weight_check import check_split, check_weights, choose_default
from trtrun.models.config import ModelConfig, read_model_config
from trtrun.tensors import DTYPES
from trtrun.tools.building.settings import BuildSettings
from trtrun.tools.conversion.streamed_file import TensorPlan, write_tensors
from trtrun.weights.checkpoint import Checkpoint, read_json
from trtrun.weights.quantization_config import QUANTIZATION_FILE, load_kv_scales
from trtrun.weights.rank_files import open_checkpoint, read_hugging_face_config
from trtrun.weights.weight import Share, Weight
from trtrun.weights.weight_loader import CheckpointLoader
from trtrun.weights.written_files import copy_beside, write_whole

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class EngineBuilder:
    """What is built of what.

    Attributes:
        checkpoint: the directory.
        settings: of the engine.
        config: of the model.
        files: its tensors.
        default: how weights are held that the checkpoint has stored plainly.
        dtype: of activations, by name.
        device_type: of the devices that it is for.
        device: that builds.
    """

    checkpoint: Path
    settings: BuildSettings
    config: ModelConfig
    files: Checkpoint
    default: Quantization
    dtype: str
    device_type: str
    device: torch.device

    @classmethod
    def open(cls, checkpoint: Path, settings: BuildSettings) -> EngineBuilder:
        """Read a checkpoint's configuration and headers, and look whether an engine can be built of it.

        Raises:
            TrtrunError: one line.
        """
        config, files = read_model_config(checkpoint), open_checkpoint(checkpoint)
        settings.check_context(config.max_position_embeddings)
        default = choose_default(config, settings.quantization, for_target=False)
        has_gpu = torch.cuda.is_available()
        device_type = settings.device or ("cuda" if has_gpu else "cpu")
        device = torch.device("cuda" if device_type == "cuda" and has_gpu else "cpu")
        dtype = config.checkpoint_dtype if settings.dtype == "auto" else settings.dtype
        for rank in range(settings.tp_size):
            share = Share(rank, settings.tp_size)
            check_split(config, share, dtype, device_type, default)
            check_weights(files, config, share, default)
        return cls(checkpoint, settings, config, files, default, dtype, device_type, device)

    def write(self, output: Path, version: str, progress: Progress) -> EngineDescription:
        """Write the engine.

        Args:
            output: the directory, which is there.
            version: of trtrun.
            progress: called with bytes that are written, and all.

        Returns:
            What it says of itself.

        Raises:
            CheckpointError: a weight holds what it must not.
        """
        size, done = self.settings.tp_size, 0
        plans = [_RankShard(self, Share(rank, size)) for rank in range(size)]
        total = sum(shard.num_bytes for shard in plans)

        def written(num_bytes: int) -> None:
            nonlocal done
            done += num_bytes
            progress(done, total)

        # Shards of all ranks, and of all models of one architecture, may have headers that are otherwise alike.
        built, shards = secrets.token_hex(16), []
        for rank, shard in enumerate(plans):
            file = output / f"rank{rank}.safetensors"
            num_bytes = write_tensors(
                file, shard.plans(), written, {"engine": built, "rank": describe_rank(rank, size)}
            )
            shards.append(ShardDescription(file.name, num_bytes, hash_header(file), shard.checksums))
        copy_beside(self.checkpoint, output)
        config = json.dumps(self._model_config(), indent=2) + "\n"
        description = EngineDescription(
            format=FORMAT,
            trtrun=version,
            architecture=self.config.architecture,
            dtype=self.dtype,
            quantization=self.settings.quantization,
            quant_method=self.config.quant_method,
            built_for=self._built_for(),
            limits=self.settings.limits,
            shards=shards,
            checkpoint=self.checkpoint.name,
            kv_scales=self._kv_scales(),
            config_sha256=hashlib.sha256(config.encode()).hexdigest(),
        )
        write_whole(output / ENGINE_FILE, engine_json(description))
        write_whole(output / "config.json", config)
        return description

    def quantization_of(self, weight: Weight) -> Quantization:
        """How a weight is held."""
        return self.config.quantization_of(weight, self.default)

    def held(self, weight: Weight, share: Share, device_type: str | None = None) -> Mapping[str, TensorSpec]:
        """What a weight is held in on a rank, by names in its shard."""
        held, dtype = self.quantization_of(weight), DTYPES[self.dtype]
        return held_tensors(weight, share, held, dtype, device_type or self.device_type)

    def _built_for(self) -> str:
        share = Share(0, self.settings.tp_size)
        both = [[self.held(weight, share, kind) for weight in self.config.weights] for kind in ("cpu", "cuda")]
        if both[0] == both[1]:
            return ANYWHERE
        if self.device_type == "cpu":
            return "cpu"
        major, minor = torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)
        return f"cuda sm_{major}{minor}"

    def _kv_scales(self) -> dict[str, tuple[list[float], list[float]]]:
        """Scales of all layers, where the checkpoint has them for keys and values of 8 bits."""
        scheme, made = self.config.kv_scheme, {}
        if scheme is None or not scheme.has_scales:
            return {}
        for name, heads in self.config.heads_with_keys.items():
            keys, values = load_kv_scales(self.files, name, heads, range(heads)).tolist()
            made[name] = keys, values
        return made

    def _model_config(self) -> dict[str, object]:
        """config.json in Hugging Face's words, whichever layout the checkpoint has."""
        values = {
            key: value for key, value in read_hugging_face_config(self.checkpoint).items() if key != "torch_dtype"
        }
        beside = read_json(self.checkpoint, QUANTIZATION_FILE, required=False)
        if beside and not values.get("quantization_config"):
            values["quantization_config"] = {"quant_method": "modelopt", **beside}
        return {**values, "dtype": self.dtype}


@dataclass
class _RankShard:
    """The shard of one rank. Where a weight is held in several tensors all are made at the first one's turn.

    Attributes:
        checksums: of the tensors that have been made.
    """

    builder: EngineBuilder
    share: Share
    checksums: dict[str, str] = field(default_factory=dict)
    _specs: dict[str, TensorSpec] = field(default_factory=dict)
    _weights: dict[str, Weight] = field(default_factory=dict)
    _made: tuple[Weight, Tensors] | None = None

    def __post_init__(self) -> None:
        """A tied head that is held as the embedding is the same tensor, and stands there once."""
        for weight in order_of_loading(self.builder.config):
            for name, spec in self.builder.held(weight, self.share).items():
                self._specs.setdefault(name, spec)
                self._weights.setdefault(name, weight)
        builder = self.builder
        self._loader = CheckpointLoader(
            builder.files,
            self.share,
            builder.device,
            DTYPES[builder.dtype],
            builder.quantization_of,
            0,
            None,
            builder.device_type,
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of its tensors."""
        return sum(spec.num_bytes for spec in self._specs.values())

    def plans(self) -> dict[str, TensorPlan]:
        """Its tensors, in the order of loading."""
        return {
            name: TensorPlan(tuple(spec.shape), spec.dtype, partial(self._make, name))
            for name, spec in self._specs.items()
        }

    def _make(self, name: str) -> torch.Tensor:
        tensor = self._load(name).contiguous()
        self.checksums[name] = checksum_text(int(sum_words(tensor)))
        return tensor

    def _load(self, name: str) -> torch.Tensor:
        weight = self._weights[name]
        if weight.use in ("plain", "float32"):
            return self._loader.tensor(weight).cpu()
        if self._made is None or self._made[0] is not weight:
            self._made = None  # before the next one takes memory
            self._made = weight, self._loader.load(weight)
        loaded = self._made[1]
        found = {stored_name(weight, held): tensor for held, tensor in loaded.items()}
        return found[name].cpu()
