"""Writes tiny checkpoints in the formats of quantized models, byte by byte from the formats' descriptions.

`make_pair(tmp_path, "awq")` is a quantized checkpoint and the plain one with the same numbers. The writers share no
code with the product: each takes a weight, lays codes and scales of it down, and says which numbers that makes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from checkpoints import make_checkpoint, save_weights
from safetensors.torch import load_file

Tensors = dict[str, torch.Tensor]
Writer = Callable[[torch.Tensor, torch.Generator], tuple[Tensors, torch.Tensor]]
"""A weight [out, in] float32 → stored tensors by the end of their names, and their numbers [out, in] float32."""

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
    """

    config: Mapping[str, Any]
    write: Writer
    beside: Mapping[str, Any] = field(default_factory=dict)
    plain: tuple[str, ...] = ("lm_head",)


def make_pair(path: Path, name: str | Format, seed: int = 0, **overrides: Any) -> tuple[Path, Path]:
    """A quantized checkpoint and a plain one of the same numbers, both of float32 where they are plain."""
    made = FORMATS[name] if isinstance(name, str) else name
    dense_path = make_checkpoint(path / "dense", seed=seed, **{**SHAPES, **overrides})
    stored_path = make_checkpoint(path / "stored", seed=seed, **{**SHAPES, **overrides})
    generator = torch.Generator().manual_seed(seed)
    stored: Tensors = {}
    dense: Tensors = {}
    for key, weight in load_file(dense_path / "model.safetensors").items():
        module = key.removesuffix(".weight")
        if weight.dim() < 2 or "embed_tokens" in key or any(part in module for part in made.plain):
            stored[key] = dense[key] = weight
            continue
        tensors, dense[key] = made.write(weight, generator)
        stored |= {f"{module}.{end}": value.contiguous() for end, value in tensors.items()}
    save_weights(dense_path, dense)
    save_weights(stored_path, stored)
    edit_config(stored_path, quantization_config=dict(made.config) or None)
    if made.beside:
        (stored_path / "hf_quant_config.json").write_text(json.dumps(made.beside), encoding="utf-8")
    return stored_path, dense_path


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


def write_fp8(strategy: str, end: str = "weight_scale", dtype: torch.dtype = torch.float32, ones: int = 0) -> Writer:
    """E4M3 codes; `ones` dimensions of one number behind those of the scale."""

    def write(weight: torch.Tensor, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        rows, columns = weight.shape
        if strategy == "tensor":
            scale = weight.abs().amax() / 448
        elif strategy == "channel":
            scale = weight.abs().amax(1) / 448
        else:
            scale = torch.zeros(-(-rows // 128), -(-columns // 128))
            for row in range(scale.shape[0]):
                for column in range(scale.shape[1]):
                    block = weight[128 * row : 128 * row + 128, 128 * column : 128 * column + 128]
                    scale[row, column] = block.abs().amax() / 448
        scale = scale.to(dtype)
        whole = scale.float()
        if strategy == "channel":
            whole = whole[:, None].expand(rows, columns)
        elif strategy == "block":
            whole = whole.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
        codes = (weight / whole).clamp(-448, 448).to(torch.float8_e4m3fn)
        tensors = {"weight": codes, end: scale.reshape([*scale.shape, *[1] * ones])}
        if strategy == "tensor":
            tensors["input_scale"] = torch.tensor(0.5)
        return tensors, codes.float() * whole

    return write


def asymmetric(weight: torch.Tensor, group: int, bits: int = 4) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [out, in], zero points and float16 scales [out, groups]: each group's range cut into 2^bits - 1 steps."""
    grouped = weight.view(weight.shape[0], -1, group)
    least, most = grouped.amin(2).clamp(max=0), grouped.amax(2).clamp(min=0)
    scale = ((most - least) / (2**bits - 1)).half()
    zero = (-least / scale.float()).round().clamp(0, 2**bits - 1).int()
    codes = (grouped / scale.float()[..., None] + zero[..., None]).round().clamp(0, 2**bits - 1).int()
    return codes.view_as(weight), zero, scale


def numbers_of(codes: torch.Tensor, zero: torch.Tensor, scale: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """(q - z) * s, by the group of each column."""
    return (codes - zero[:, groups]).float() * scale.float()[:, groups]


def words_along(codes: torch.Tensor, dimension: int, places: list[int]) -> torch.Tensor:
    """Words of 32 bits along a dimension; the j-th bits from below are of the number at `places`[j] of the word."""
    bits, moved = 32 // len(places), codes.movedim(dimension, 0).long()
    words = torch.zeros(moved.shape[0] // len(places), *moved.shape[1:], dtype=torch.int64)
    for word in range(words.shape[0]):
        for at, place in enumerate(places):
            words[word] += moved[len(places) * word + place] << (bits * at)
    words = torch.where(words >= 2**31, words - 2**32, words)
    return words.int().movedim(0, dimension)


def write_awq(group: int) -> Writer:
    def write(weight: torch.Tensor, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        size = weight.shape[1] if group == -1 else group
        codes, zero, scale = asymmetric(weight, size)
        order = [0, 2, 4, 6, 1, 3, 5, 7]
        tensors = {
            "qweight": words_along(codes.T, 1, order),
            "qzeros": words_along(zero.T, 1, order),
            "scales": scale.T,
        }
        return tensors, numbers_of(codes, zero, scale, torch.arange(weight.shape[1]) // size)

    return write


def symmetric(weight: torch.Tensor, group: int, bits: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [out, in] from -2^(bits - 1) on, and bfloat16 scales [out, groups]."""
    grouped, half = weight.view(weight.shape[0], -1, group), 2 ** (bits - 1)
    scale = (grouped.abs().amax(2) / (half - 0.5)).bfloat16()
    return (grouped / scale.float()[..., None]).round().clamp(-half, half - 1).int().view_as(weight), scale


def write_packed(group: int, *, bits: int = 4, zeros: bool = False, order: bool = False) -> Writer:
    """compressed-tensors' pack-quantized."""

    def write(weight: torch.Tensor, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        size, half, places = weight.shape[1] if group == -1 else group, 2 ** (bits - 1), list(range(32 // bits))
        groups = torch.arange(weight.shape[1]) // size
        if order:
            groups = groups[torch.randperm(len(groups), generator=generator)]
        sorted_by_group = weight[:, groups.argsort(stable=True)]
        if zeros:
            codes, zero, scale = asymmetric(sorted_by_group, size, bits)
            codes, zero = codes - half, zero - half
        else:
            codes, scale = symmetric(sorted_by_group, size, bits)
            zero = torch.zeros(scale.shape, dtype=torch.int32)
        codes = codes[:, groups.argsort(stable=True).argsort()]
        tensors = {
            "weight_packed": words_along(codes + half, 1, places),
            "weight_scale": scale,
            "weight_shape": torch.tensor(weight.shape),
        }
        if zeros:
            tensors["weight_zero_point"] = words_along(zero + half, 0, places)
        if order:
            tensors["weight_g_idx"] = groups.int()
        return tensors, numbers_of(codes, zero, scale, groups)

    return write


def write_gptq(
    group: int, *, bits: int = 4, zeros: bool = False, order: bool = False, offset: int = 1, has_g_idx: bool = True
) -> Writer:
    """`offset` is what stored zero points lack."""

    def write(weight: torch.Tensor, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        size, half, places = weight.shape[1] if group == -1 else group, 2 ** (bits - 1), list(range(32 // bits))
        groups = torch.arange(weight.shape[1]) // size
        if order:
            groups = groups[torch.randperm(len(groups), generator=generator)]
        sorted_by_group = weight[:, groups.argsort(stable=True)]
        if zeros:
            codes, zero, scale = asymmetric(sorted_by_group, size, bits)
            zero = zero.clamp(min=1)  # what version 1 can store
        else:
            codes, scale = symmetric(sorted_by_group, size, bits)
            codes, zero, scale = codes + half, torch.full(scale.shape, half, dtype=torch.int32), scale.half()
        codes = codes[:, groups.argsort(stable=True).argsort()]
        tensors = {
            "qweight": words_along(codes.T, 0, places),
            "qzeros": words_along((zero - offset).T, 1, places),
            "scales": scale.T,
        }
        if has_g_idx:
            tensors["g_idx"] = groups.int()
        return tensors, numbers_of(codes, zero, scale, groups)

    return write


def write_int8(strategy: str) -> Writer:
    def write(weight: torch.Tensor, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        most = weight.abs().amax(1, keepdim=True) if strategy == "channel" else weight.abs().amax().view(1)
        scale = (most / 127).bfloat16()
        codes = (weight / scale.float()).round().clamp(-128, 127).to(torch.int8)
        return {"weight": codes, "weight_scale": scale}, codes.float() * scale.float()

    return write


def write_modelopt_awq(group: int) -> Writer:
    """Every other matrix has its scale of activations folded into the layer before."""
    count = 0

    def write(weight: torch.Tensor, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        nonlocal count
        count += 1
        before = 0.5 + torch.rand(weight.shape[1], generator=generator)
        codes, scale = symmetric(weight / before, group)
        groups = torch.arange(weight.shape[1]) // group
        numbers = codes.float() * scale.float()[:, groups]
        twos = torch.where(codes < 0, codes + 16, codes)
        tensors = {"weight": (twos[::2] + 16 * twos[1::2]).to(torch.uint8), "weight_scale": scale.float()}
        if count % 2:
            return tensors, numbers
        return {**tensors, "pre_quant_scale": before}, numbers * before

    return write


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
