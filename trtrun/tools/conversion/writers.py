"""Writes checkpoints: Hugging Face directories, a file for each layer, and TensorRT-LLM's, a file for each rank."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from parallel.sharding import loaded_vocabulary_range, vocabulary_range
from trtrun.errors import CheckpointError, ConfigError
from trtrun.layers.ends import PLAIN_ENDS
from trtrun.linear.quantization.base import TensorSlice
from trtrun.linear.stored.byte_layouts import Fp8Layout
from trtrun.linear.stored.layout import stored_as
from trtrun.linear.stored.modelopt import ModelOptAwqLayout
from trtrun.tensors import DTYPES, dtype_name
from trtrun.tools.conversion.source import Source
from trtrun.tools.conversion.streamed_file import TensorPlan, write_tensors
from trtrun.weights.checkpoint import INDEX_FILE
from trtrun.weights.quantization_config import find_section
from trtrun.weights.rank_files import KV_SCALE
from trtrun.weights.tensorrt_llm_config import from_hugging_face
from trtrun.weights.weight import Share, Weight
from trtrun.weights.written_files import copy_beside, write_whole

Progress = Callable[[int, int], None]
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_WEIGHT_SCALES, _KV_SCALES = ("weight_scale", "input_scale"), ("k_scale", "v_scale")
_STORED = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_CODES = {
    "F8_E4M3": torch.float8_e4m3fn,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
}


def write_hugging_face(source: Source, output: Path, progress: Progress) -> int:
    """Write a checkpoint; returns the bytes of its weights.

    Args:
        source: of either layout.
        output: the directory, which is there.
        progress: called with bytes that are written, and all.

    Raises:
        TrtrunError: one line.
    """
    names = source.files.names()
    if source.config.tie_word_embeddings:
        names = [name for name in names if not name.startswith("lm_head.")]
    unused = (() if source.algorithm else _WEIGHT_SCALES) + (() if source.kv_algorithm else _KV_SCALES)
    names = [name for name in names if not name.endswith(unused)]
    shards: dict[int, dict[str, TensorPlan]] = {}
    for name in names:
        match = _LAYER.match(name)
        shards.setdefault(0 if match is None else int(match[1]) + 1, {})[name] = _plan(source, name)
    total = sum(plan.dtype.itemsize * torch.Size(plan.shape).numel() for it in shards.values() for plan in it.values())
    places: dict[str, str] = {}
    done = size = 0

    def written(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        progress(done, total)

    for at, index in enumerate(sorted(shards), start=1):
        file = output / f"model-{at:05d}-of-{len(shards):05d}.safetensors"
        size += write_tensors(file, shards[index], written)
        places |= dict.fromkeys(shards[index], file.name)
    index_values = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    write_whole(output / INDEX_FILE, json.dumps(index_values, indent=2) + "\n")
    copy_beside(source.path, output)
    write_whole(output / "config.json", json.dumps(_hugging_face_config(source), indent=2) + "\n")
    return size


def _plan(source: Source, name: str) -> TensorPlan:
    """Plain tensors in the output's dtype; codes, scales and whole numbers as they are."""
    code, shape = source.files.dtype_code(name), source.files.shape(name)
    is_scale = name.endswith(_WEIGHT_SCALES + _KV_SCALES)
    if code not in _STORED:
        if code not in _CODES:
            raise CheckpointError(
                f"{source.files.file(name)}: tensor '{name}' has dtype {code}, which is not converted; known: "
                f"{', '.join((*_STORED, *_CODES))}"
            )
        return TensorPlan(shape, _CODES[code], lambda: source.read_whole(name))
    dtype = DTYPES[_STORED[code]] if is_scale else source.dtype
    return TensorPlan(shape, dtype, lambda: source.read_whole(name).to(dtype))


def _hugging_face_config(source: Source) -> dict[str, object]:
    values = {key: value for key, value in source.values.items() if key not in ("torch_dtype", "kv_cache_quant_algo")}
    values["dtype"] = dtype_name(source.dtype)
    if source.kv_algorithm is not None:
        section = find_section(source.path, values)[1] or {"quant_method": "modelopt", "quant_algo": None}
        kind = "float" if source.kv_algorithm == "FP8" else "int"
        scheme = {"num_bits": 8, "type": kind, "strategy": "tensor", "dynamic": False, "symmetric": True}
        values["quantization_config"] = {**section, "kv_cache_scheme": section.get("kv_cache_scheme") or scheme}
    return values


_FP8_MOST = 448.0
_KNOWN = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Architectures that TensorRT-LLM has a word for."""


def write_ranks(source: Source, output: Path, tp_size: int, progress: Progress) -> int:
    """Write a checkpoint; returns the bytes of its weights.

    Args:
        source: of either layout.
        output: the directory, which is there.
        tp_size: ranks that it is cut for.
        progress: called with bytes that are written, and all.

    Raises:
        TrtrunError: the model cannot be cut so, or TensorRT-LLM has no word for what it is.
    """
    if source.config.ends != PLAIN_ENDS:
        raise source.refuse("ends")
    cut = [_RankPlan(source, Share(rank, tp_size)) for rank in range(tp_size)]
    plans = [rank.run() for rank in cut]
    if source.config.architecture not in _KNOWN:  # which may have tensors that its config.json does not speak of
        raise source.refuse("architecture")
    total = sum(plan.dtype.itemsize * torch.Size(plan.shape).numel() for rank in plans for plan in rank.values())
    done = 0

    def written(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        progress(done, total)

    size = sum(write_tensors(output / f"rank{rank}.safetensors", plan, written) for rank, plan in enumerate(plans))
    copy_beside(source.path, output)
    write_whole(
        output / "config.json", json.dumps(_rank_config(source, tp_size, cut[0].plain_modules), indent=4) + "\n"
    )
    return size


def _rank_config(source: Source, tp_size: int, plain_modules: Sequence[str]) -> dict[str, object]:
    quantization: dict[str, object] = {
        "quant_algo": source.algorithm,
        "kv_cache_quant_algo": source.kv_algorithm,
        "exclude_modules": [*plain_modules, "lm_head"] if source.algorithm is not None else None,
    }
    if source.algorithm == "W4A16_AWQ":
        quantization |= {"group_size": source.group_size, "has_zero_point": False, "pre_quant_scale": True}
    config = source.config
    values = {
        **source.values,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": config.tie_word_embeddings,
        "rope_theta": config.rope.theta,
    }
    rope = source.values.get("rope_parameters") or source.values.get("rope_scaling")
    if isinstance(rope, dict) and rope.get("rope_type", rope.get("type", "default")) != "default":
        values["rope_scaling"] = {key: value for key, value in rope.items() if key != "rope_theta"}
    return from_hugging_face(values, tp_size, dtype_name(source.dtype), quantization)


@dataclass
class _RankPlan:
    """The tensors of one rank, by TensorRT-LLM's names; and the linear layers that are plain."""

    source: Source
    share: Share
    found: dict[str, TensorPlan] = field(default_factory=dict)
    plain_modules: list[str] = field(default_factory=list)

    def run(self) -> dict[str, TensorPlan]:
        """All of them."""
        config = self.source.config
        self._plain("transformer.vocab_embedding.weight", Weight(config.embedding.parts), whole=True)
        for index, plan in enumerate(self.source.plans):
            prefix = f"transformer.layers.{index}."
            try:
                input_norm, attention, behind_norm, mlp = plan.ordinary
            except CheckpointError as error:
                raise self.source.refuse("layers", f", as {error}") from None
            self._plain(f"{prefix}input_layernorm.weight", input_norm.weight)
            self._linear(f"{prefix}attention.qkv", attention.qkv.weight, attention.qkv.bias)
            for name, norm in zip(("q_layernorm", "k_layernorm"), attention.head_norms, strict=False):
                self._plain(f"{prefix}attention.{name}.weight", norm.weight)
            self._linear(f"{prefix}attention.dense", attention.output.weight, attention.output.bias)
            self._kv_scale(index, f"{prefix}{KV_SCALE}")
            self._plain(f"{prefix}post_layernorm.weight", behind_norm.weight)
            for at, name in enumerate(("fc", "gate")):
                bias = mlp.gate_up.bias
                weight = Weight(mlp.gate_up.weight.parts[at : at + 1], "linear")
                own = None if bias is None else Weight(bias.parts[at : at + 1])
                self._linear(f"{prefix}mlp.{name}", weight, own)
            self._linear(f"{prefix}mlp.proj", mlp.down.weight, mlp.down.bias)
        self._plain("transformer.ln_f.weight", config.final_norm)
        self._head()
        return self.found

    def _add(self, name: str, shape: Sequence[int], dtype: torch.dtype, make: Callable[[], torch.Tensor]) -> None:
        self.found[name] = TensorPlan(tuple(shape), dtype, make)

    def _plain(self, name: str, weight: Weight, *, whole: bool = False) -> None:
        """What is not multiplied with, or not quantized."""
        held = weight.cut(Share(0, 1) if whole else self.share)
        source = self.source
        self._add(name, held.shape, source.dtype, lambda: torch.cat([source.plain(part) for part in held.parts]))

    def _head(self) -> None:
        """Rows of the vocabulary, with zeros behind them where it is no multiple of the ranks."""
        source, (part,) = self.source, self.source.config.head.parts
        size, hidden = part.shape
        own, kept = loaded_vocabulary_range(size, *self.share), len(vocabulary_range(size, *self.share))
        layout = source.layout(source.config.head)

        def make() -> torch.Tensor:
            rows = torch.zeros((kept, hidden), dtype=source.dtype)
            if own:
                rows[: len(own)] = source.plain(TensorSlice(part.name, part.shape, (own, range(hidden))), layout)
            return rows

        self._add("lm_head.weight", (kept, hidden), source.dtype, make)

    def _kv_scale(self, index: int, name: str) -> None:
        if self.source.kv_algorithm is None:
            return
        scale = self.source.kv_scale(index)
        self._add(name, (1,), torch.float32, lambda: scale)

    def _linear(self, name: str, weight: Weight, bias: Weight | None) -> None:
        """A linear layer of one matrix, or of several that are multiplied with as one."""
        layout = self.source.layout(weight)
        parts = weight.cut(self.share).parts
        if layout is None:
            self._plain(f"{name}.weight", weight)
            self.plain_modules.append(name)
        elif isinstance(layout, ModelOptAwqLayout):
            self._awq(name, parts, layout)
        elif isinstance(layout, Fp8Layout):
            self._fp8(name, parts, layout)
        if bias is not None:
            self._plain(f"{name}.bias", bias)

    def _fp8(self, name: str, parts: Sequence[TensorSlice], layout: Fp8Layout) -> None:
        source = self.source
        scales = [source.read(layout.slices(part)["scale"]).float().reshape(1) for part in parts]
        largest = torch.stack(scales).amax(0)
        inputs = [stored_as(part, "input_scale") for part in parts]
        if any(one not in source.files for one in inputs):
            raise ConfigError(f"{inputs[0]} is missing: TensorRT-LLM's FP8 needs a scale of each layer's activations")

        def make() -> torch.Tensor:
            codes = []
            for part, scale in zip(parts, scales, strict=True):
                own = source.read(layout.slices(part)["weight"])
                if not torch.equal(scale, largest):
                    numbers = own.float() * (scale / largest)
                    own = numbers.clamp(-_FP8_MOST, _FP8_MOST).to(torch.float8_e4m3fn)
                codes.append(own)
            return _cat(codes)

        rows, columns = sum(len(part.ranges[0]) for part in parts), len(parts[0].ranges[1])
        self._add(f"{name}.weight", (rows, columns), torch.float8_e4m3fn, make)
        self._add(f"{name}.weights_scaling_factor", (1,), torch.float32, lambda: largest)
        activations = torch.stack([source.read_whole(one).float().reshape(1) for one in inputs]).amax(0)
        self._add(f"{name}.activation_scaling_factor", (1,), torch.float32, lambda: activations)

    def _awq(self, name: str, parts: Sequence[TensorSlice], layout: ModelOptAwqLayout) -> None:
        source, dtype = self.source, self.source.dtype
        slices = [layout.slices(part) for part in parts]
        rows, columns = sum(len(part.ranges[0]) for part in parts), len(parts[0].ranges[1])
        groups = len(slices[0]["scale"].ranges[1])

        def read(end: str) -> list[torch.Tensor]:
            return [source.read(it[end]) for it in slices]

        def before() -> torch.Tensor:
            found = [source.read(it["before"]) if it["before"].name in source.files else None for it in slices]
            first = torch.ones(columns) if found[0] is None else found[0]
            if any(not torch.equal(first, torch.ones(columns) if it is None else it) for it in found):
                raise ConfigError(
                    f"{parts[0].name} and its neighbours have different pre_quant_scales, and one is kept"
                )
            return first.to(dtype)

        self._add(f"{name}.weight", (rows // 2, columns), torch.int8, lambda: _cat(read("weight")).view(torch.int8))
        self._add(f"{name}.weights_scaling_factor", (rows, groups), dtype, lambda: torch.cat(read("scale")).to(dtype))
        self._add(f"{name}.prequant_scaling_factor", (columns,), dtype, before)


def _cat(codes: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate bytes of any dtype, one behind the other."""
    return torch.cat([it.view(torch.uint8) for it in codes]).view(codes[0].dtype)
