"""Tiny checkpoints in the formats of quantized models, by name: `make_pair(tmp_path, "awq")` is a quantized checkpoint
and the plain one with the same numbers. How a matrix is written is in quantized_writers.py.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from checkpoints import make_checkpoint, save_weights
from family_checkpoints import write_family
from quantized_writers import (
    Tensors,
    Writer,
    write_awq,
    write_fp4,
    write_fp8,
    write_gptq,
    write_int8,
    write_modelopt_awq,
    write_packed,
)
from safetensors.torch import load_file

SHAPES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 224,
}


@dataclass(frozen=True)
class Format:
    """One format.

    Attributes:
        config: `quantization_config`; empty where it lies in `beside`.
        write: one matrix.
        beside: hf_quant_config.json.
        plain: modules that the format leaves as they are.
        others: of modules by a part of their name what writes their matrices in place of `write`.
    """

    config: Mapping[str, Any]
    write: Writer
    beside: Mapping[str, Any] = field(default_factory=dict)
    plain: tuple[str, ...] = ("lm_head",)
    others: Mapping[str, Writer] = field(default_factory=dict)


def make_pair(path: Path, name: str | Format, seed: int = 0, **overrides: Any) -> tuple[Path, Path]:
    """A quantized checkpoint and a plain one of the same numbers, both of float32 where they are plain.

    Those of a format by name, which many tests ask for, are made once in a process, and copied.
    """
    if isinstance(name, Format):
        return _write_pair(path, name, seed, overrides)
    kept = _kept_pair(name, seed, tuple(sorted(overrides.items())))
    shutil.copytree(kept, path, dirs_exist_ok=True)
    return path / "stored", path / "dense"


@cache
def _folder_of_pairs() -> tempfile.TemporaryDirectory[str]:
    """A folder of this process, which goes with it."""
    return tempfile.TemporaryDirectory(prefix="quantized-pairs-")


@cache
def _kept_pair(name: str, seed: int, overrides: tuple[tuple[str, Any], ...]) -> Path:
    """A folder with `stored` and `dense`."""
    folder = Path(tempfile.mkdtemp(dir=_folder_of_pairs().name))
    _write_pair(folder, FORMATS[name], seed, dict(overrides))
    return folder


def _write_pair(path: Path, made: Format, seed: int, overrides: Mapping[str, Any]) -> tuple[Path, Path]:
    dense_path = make_checkpoint(path / "dense", seed=seed, **{**SHAPES, **overrides})
    stored_path = make_checkpoint(path / "stored", seed=seed, **{**SHAPES, **overrides})
    store_in_format(dense_path, stored_path, made, seed)
    return stored_path, dense_path


MIXTURE_SHAPES: dict[str, int] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 512,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_hidden_layers": 2,
}


def make_mixture_pair(path: Path, family: str, name: str, **values: int) -> tuple[Path, Path]:
    """The same of a family with experts (family_checkpoints.py); `values` in place of MIXTURE_SHAPES."""
    dense, stored = write_family(path / "dense", family, **{**MIXTURE_SHAPES, **values}), path / "stored"
    shutil.copytree(dense, stored)
    store_in_format(dense, stored, FORMATS[name])
    return stored, dense


def store_in_format(dense_path: Path, stored_path: Path, made: Format, seed: int = 0) -> None:
    """Of two copies of a checkpoint make one in a format, and one with the same numbers."""
    generator = torch.Generator().manual_seed(seed)
    stored: Tensors = {}
    dense: Tensors = {}
    for key, weight in load_file(dense_path / "model.safetensors").items():
        module = key.removesuffix(".weight")
        is_router = module.endswith((".gate", ".shared_expert_gate"))  # which nobody quantizes
        if weight.dim() != 2 or is_router or "embed_tokens" in key or any(part in module for part in made.plain):
            stored[key] = dense[key] = weight
            continue
        write = next((write for part, write in made.others.items() if part in module), made.write)
        tensors, dense[key] = write(weight, generator)
        stored |= {f"{module}.{end}": value.contiguous() for end, value in tensors.items()}
    save_weights(dense_path, dense)
    save_weights(stored_path, stored)
    edit_config(stored_path, quantization_config=dict(made.config) or None)
    if made.beside:
        (stored_path / "hf_quant_config.json").write_text(json.dumps(made.beside), encoding="utf-8")


RATES = ("in_proj_a", "in_proj_b", "in_proj_ba")
"""Modules of gated delta nets that nobody quantizes."""


def leave_plain(made: Format, *modules: str) -> Format:
    """The format with more modules that it leaves as they are."""
    key = "ignore" if "ignore" in made.config else "modules_to_not_convert"
    config = {**made.config, key: [*(made.config.get(key) or []), *modules]}
    return replace(made, config=config, plain=(*made.plain, *modules))


def edit_config(path: Path, **changes: Any) -> None:
    """Change keys of a checkpoint's config.json."""
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text(encoding="utf-8")), **changes}), encoding="utf-8")


def edit_quantization(path: Path, **changes: Any) -> None:
    """Change keys of its quantization_config."""
    values = json.loads((path / "config.json").read_text(encoding="utf-8"))["quantization_config"]
    edit_config(path, quantization_config={**values, **changes})


def edit_tensors(path: Path, changes: Mapping[str, torch.Tensor | None]) -> None:
    """Change, add or remove (None) tensors of a checkpoint of one file."""
    tensors = {**load_file(path / "model.safetensors"), **changes}
    save_weights(path, {name: value for name, value in tensors.items() if value is not None})


def gptq_config(group: int, **more: Any) -> dict[str, Any]:
    config = {"quant_method": "gptq", "bits": 4, "group_size": group, "desc_act": False, "sym": True, "lm_head": False}
    return {**config, "checkpoint_format": "gptq", **more}


def int_args(strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": 4, "type": "int", "strategy": strategy, "symmetric": True, "dynamic": False, **more}


def awq_config(group: int, **more: Any) -> dict[str, Any]:
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    return {**config, "modules_to_not_convert": None, **more}


def compressed(weights: Mapping[str, Any], inputs: Mapping[str, Any] | None, kind: str, **more: Any) -> dict[str, Any]:
    """`quantization_config` as llm-compressor writes it."""
    group = {"targets": ["Linear"], "weights": dict(weights), "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": group},
        "format": kind,
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        **more,
    }


def float_args(strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False, **more}


PER_TOKEN = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}

FORMATS: dict[str, Format] = {
    "compressed-tensors FP8": Format(
        compressed(float_args("tensor"), float_args("tensor"), "float-quantized"),
        write_fp8("tensor", dtype=torch.bfloat16, ones=1),
    ),
    "compressed-tensors FP8 dynamic": Format(
        compressed(float_args("channel"), PER_TOKEN, "float-quantized", ignore=["re:.*lm_head", "model.layers.1.mlp"]),
        write_fp8("channel", dtype=torch.bfloat16, ones=1),
        plain=("lm_head", "layers.1.mlp"),
    ),
    "compressed-tensors FP8 block": Format(
        compressed(
            float_args("block", block_structure="128x128"),
            {**PER_TOKEN, "strategy": "group", "group_size": 128},
            "float-quantized",
        ),
        write_fp8("block", dtype=torch.bfloat16),
    ),
    "fp8 block": Format(
        {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": ["lm_head", "model.layers.0.self_attn.o_proj"],
        },
        write_fp8("block", "weight_scale_inv"),
        plain=("lm_head", "layers.0.self_attn.o_proj"),
    ),
    "fp8 block ue8m0": Format(
        {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"},
        write_fp8("block", "weight_scale_inv", torch.float8_e8m0fnu),
    ),
    "fp8": Format(
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}, write_fp8("tensor")
    ),
    "fp8 of whole matrices": Format(
        {
            "quant_method": "fp8",
            "activation_scheme": "static",
            "weight_block_size": None,
            "modules_to_not_convert": ["lm_head"],
        },
        write_fp8("tensor", "weight_scale_inv"),
    ),
    "modelopt FP8": Format(
        {},
        write_fp8("tensor"),
        {
            "producer": {"name": "modelopt", "version": "0.29.0"},
            "quantization": {
                "quant_algo": "FP8",
                "kv_cache_quant_algo": None,
                "exclude_modules": ["lm_head", "model.layers.0.mlp*"],
            },
        },
        plain=("lm_head", "layers.0.mlp"),
    ),
    "modelopt FP8 per channel": Format(
        {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN", "ignore": ["lm_head"]},
        write_fp8("channel"),
    ),
    "modelopt W4A16_AWQ": Format(
        {},
        write_modelopt_awq(64),
        {"quantization": {"quant_algo": "W4A16_AWQ", "group_size": 64, "exclude_modules": ["lm_head"]}},
    ),
    "modelopt W4A16_AWQ in config.json": Format(
        {
            "quant_method": "modelopt",
            "quant_algo": "W4A16_AWQ",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 32}}},
            "ignore": ["lm_head"],
        },
        write_modelopt_awq(32),
    ),
    "compressed-tensors W8A8": Format(
        compressed(int_args("channel", num_bits=8), {**PER_TOKEN, "type": "int"}, "int-quantized"),
        write_int8("channel"),
    ),
    "compressed-tensors W8A8 of old files": Format(
        compressed(int_args("tensor", num_bits=8), int_args("tensor", num_bits=8), "naive-quantized"),
        write_int8("tensor"),
    ),
    "compressed-tensors W4A16": Format(
        compressed(int_args("group", group_size=64), None, "pack-quantized"), write_packed(64)
    ),
    "compressed-tensors W4A16 with zero points": Format(
        compressed(int_args("group", group_size=32, symmetric=False), None, "pack-quantized"),
        write_packed(32, zeros=True),
    ),
    "compressed-tensors W8A16 of whole rows": Format(
        compressed(int_args("channel", num_bits=8, symmetric=False), None, "pack-quantized"),
        write_packed(-1, bits=8, zeros=True),
    ),
    "compressed-tensors W4A16 with act-order": Format(
        compressed(int_args("group", group_size=64, actorder="group", symmetric=False), None, "pack-quantized"),
        write_packed(64, zeros=True, order=True),
    ),
    "compressed-tensors NVFP4": Format(
        compressed({**float_args("tensor_group"), "num_bits": 4, "group_size": 16}, None, "nvfp4-pack-quantized"),
        write_fp4(16, ("weight_packed", "weight_global_scale")),
    ),
    "compressed-tensors MXFP4": Format(
        compressed({**float_args("group"), "num_bits": 4, "group_size": 32}, None, "mxfp4-pack-quantized"),
        write_fp4(32, ("weight_packed",)),
    ),
    "modelopt NVFP4": Format(
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
        write_fp4(16, ("weight", "weight_scale_2")),
    ),
    "awq": Format(awq_config(64), write_awq(64)),
    "awq of whole rows": Format(
        awq_config(-1, version="GEMM", modules_to_not_convert=["layers.1.self_attn"]),
        write_awq(-1),
        plain=("lm_head", "layers.1.self_attn"),
    ),
    "gptq": Format(gptq_config(64), write_gptq(64)),
    "gptq without g_idx": Format(
        gptq_config(128, dynamic={r"-:model\.layers\.0\.mlp": {}}, checkpoint_format=None),
        write_gptq(128, has_g_idx=False),
        plain=("lm_head", "layers.0.mlp"),
    ),
    "gptq v2": Format(gptq_config(64, checkpoint_format=None, format="gptq_v2"), write_gptq(64, offset=0)),
    "gptq that is v2 and says v1": Format(gptq_config(64), write_gptq(64, offset=0)),
    "gptq that is v1 and says v2": Format(gptq_config(64, checkpoint_format="gptq_v2"), write_gptq(64)),
    "gptq of 8 bits that says v1": Format(gptq_config(-1, bits=8), write_gptq(-1, bits=8, offset=0)),
    "gptq with zero points": Format(gptq_config(64, sym=False), write_gptq(64, zeros=True)),
    "gptq v2 of 8 bits with zero points": Format(
        gptq_config(64, sym=False, bits=8, checkpoint_format="gptq_v2"), write_gptq(64, bits=8, zeros=True, offset=0)
    ),
    "gptq with act-order": Format(gptq_config(64, desc_act=True), write_gptq(64, order=True)),
    "gptq with act-order and zero points, and a head": Format(
        gptq_config(64, desc_act=True, sym=False, lm_head=True), write_gptq(64, zeros=True, order=True), plain=()
    ),
}

MIXED = Format(
    {},
    write_fp4(16, ("weight", "weight_scale_2")),
    {
        "quantization": {
            "quant_algo": "MIXED_PRECISION",
            "kv_cache_quant_algo": None,
            "quantized_layers": {
                f"model.layers.{index}.{module}": said
                for index in range(4)
                for module, said in (
                    *((f"self_attn.{name}_proj", {"quant_algo": "FP8"}) for name in "qkvo"),
                    ("mlp", {"quant_algo": "W4A16_NVFP4", "group_size": 16}),
                )
            },
        }
    },
    others={"self_attn": write_fp8("tensor")},
)
"""ModelOpt's, with an algorithm for each module."""
