"""A checkpoint that is converted: its configuration, its tensors, and how its matrices are stored, as far as the other
layout has words for that.

It knows files of both layouts. It does not know what is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from trtrun.errors import ConfigError
from trtrun.linear.quantization import QUANTIZATIONS
from trtrun.linear.quantization.base import TensorSlice
from trtrun.linear.stored.byte_layouts import Fp8Layout
from trtrun.linear.stored.layout import Layout, StoredLinear
from trtrun.linear.stored.modelopt import ModelOptAwqLayout
from trtrun.models.config import ModelConfig, read_model_config
from trtrun.models.decoder_plan import DecoderPlan
from trtrun.tensors import DTYPES
from trtrun.weights.checkpoint import Checkpoint
from trtrun.weights.quantization_config import attention_names, load_kv_scales
from trtrun.weights.rank_files import open_checkpoint, read_hugging_face_config
from trtrun.weights.weight import Weight

_PLAIN = QUANTIZATIONS.get("none")


@dataclass(frozen=True)
class Source:
    """A checkpoint of either layout.

    Attributes:
        path: the directory.
        config: of the model.
        values: of config.json, in Hugging Face's words.
        files: its tensors, by the architecture's names.
        dtype: of what is plain, in the output.
    """

    path: Path
    config: ModelConfig
    values: Mapping[str, Any]
    files: Checkpoint
    dtype: torch.dtype

    @cached_property
    def plans(self) -> list[DecoderPlan]:
        """Plans of its layers.

        Raises:
            ConfigError: they are of another kind.
        """
        found = [plan for plan in self.config.layers if type(plan) is DecoderPlan]
        if len(found) < len(self.config.layers):
            raise self.refuse("layers")
        return found

    def refuse(self, what: str, why: str = "") -> ConfigError:
        """The error for a model that cannot be written, because of some of it."""
        return ConfigError(
            f"trtrun convert does not know the {what} of {self.config.architecture}{why}: run the directory itself, "
            "which target.model may name"
        )

    def layout(self, weight: Weight) -> Layout | None:
        """How a matrix is stored; None where it is plain."""
        held = self.config.quantization_of(weight, _PLAIN)
        return held.layout if isinstance(held, StoredLinear) else None

    @cached_property
    def algorithm(self) -> str | None:
        """`quant_algo` that TensorRT-LLM has for the matrices of layers; None where they are plain.

        Raises:
            ConfigError: it has none that is written here.
        """
        found = {self.layout(weight) for plan in self.plans for weight in plan.weights() if weight.use == "linear"}
        names = {_algorithm(layout) for layout in found if layout is not None}
        if len(names) > 1:
            raise ConfigError(f"{self.path} is quantized in several ways: {', '.join(sorted(names))}")
        return next(iter(names), None)

    @cached_property
    def group_size(self) -> int | None:
        """Input features with one scale, of W4A16_AWQ."""
        for plan in self.plans:
            for weight in plan.weights():
                layout = self.layout(weight) if weight.use == "linear" else None
                if isinstance(layout, ModelOptAwqLayout):
                    return layout.group_size
        return None

    @cached_property
    def kv_algorithm(self) -> str | None:
        """`kv_cache_quant_algo`: "FP8" or "INT8", where there are scales of keys and values."""
        scheme = self.config.kv_scheme
        return None if scheme is None else scheme.dtype.upper()

    def kv_scale(self, index: int) -> torch.Tensor:
        """The largest scale of a layer's keys and values, by any of their names: float32 [1].

        Raises:
            CheckpointError: see `load_kv_scales`.
        """
        heads = self.config.num_kv_heads
        return load_kv_scales(self.files, attention_names(index + 1)[index], heads, range(heads)).amax().reshape(1)

    def read(self, stored: TensorSlice) -> torch.Tensor:
        """A slice in the file's dtype, on the host.

        Raises:
            CheckpointError: the tensor is missing, or not what it should be.
        """
        self.files.check(stored.name, stored.shape, stored.dtypes, ones_vary=stored.ones_vary)
        pieces = [piece.clone() for _, piece in self.files.pieces(stored.name, stored.ranges)]
        return torch.cat(pieces) if pieces else torch.empty([len(item) for item in stored.ranges])

    def read_whole(self, name: str) -> torch.Tensor:
        """A tensor as it is in the file, on the host."""
        shape = self.files.shape(name)
        ranges = tuple(map(range, shape)) or (range(1),)
        return torch.cat([piece.clone() for _, piece in self.files.pieces(name, ranges)]).reshape(shape)

    def plain(self, part: TensorSlice, layout: Layout | None = None) -> torch.Tensor:
        """A slice of a matrix or a vector in the output's dtype, computed from codes where it is stored in a layout."""
        if layout is None:
            return self.read(part).to(self.dtype)
        slices = layout.slices(part)
        found = {end: self.read(it) for end, it in slices.items() if not it.is_optional or it.name in self.files}
        return layout.form(part, found).dequantize().to(self.dtype)


def open_source(path: Path, dtype: str | None) -> Source:
    """Read a checkpoint's configuration and the headers of its files.

    Args:
        path: the directory.
        dtype: of what is plain, in the output; None keeps the checkpoint's.

    Raises:
        TrtrunError: one line.
    """
    config = read_model_config(path)
    source = Source(
        path, config, read_hugging_face_config(path), open_checkpoint(path), DTYPES[dtype or config.checkpoint_dtype]
    )
    _ = source.algorithm  # refused before anything is written
    return source


def _algorithm(layout: Layout) -> str:
    if isinstance(layout, Fp8Layout) and layout.strategy == "tensor":
        return "FP8"
    if isinstance(layout, ModelOptAwqLayout):
        return "W4A16_AWQ"
    raise ConfigError(
        f"{layout.name} weights have no place in TensorRT-LLM's checkpoints as they are written here (FP8 with a scale "
        "for each tensor, W4A16_AWQ, or plain): convert the plain model"
    )
