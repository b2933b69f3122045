"""Writes TensorRT-LLM's checkpoints of plain Hugging Face ones, from the description of the format: cut for any number
of ranks, plain, in FP8 or in W4A16_AWQ. It shares no code with the product.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from checkpoints import save_weights
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]


def write_ranks(
    source: Path,
    output: Path,
    tp_size: int,
    kind: str = "plain",
    group: int = 32,
    embedding: int | None = None,
    container: torch.dtype | None = None,
) -> Tensors:
    """Write a checkpoint; returns the numbers that it stands for, by the names of `source`.

    Args:
        source: of one file.
        output: the directory.
        tp_size: ranks.
        kind: "plain", "fp8" or "awq"; the head stays plain.
        group: input features with one scale, of "awq".
        embedding: the dimension that the embedding is cut along; None leaves it whole on each rank.
        container: of FP8 codes, as older files have them.
    """
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    weights = {name: value.float() for name, value in load_file(source / "model.safetensors").items()}
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"] or config["num_attention_heads"]
    head = config.get("head_dim") or config["hidden_size"] // heads
    numbers = dict(weights)
    ranks: list[Tensors] = [{} for _ in range(tp_size)]

    def place(name: str, shares: Sequence[torch.Tensor]) -> None:
        for rank, share in zip(ranks, shares, strict=True):
            rank[name] = share.contiguous().clone()

    def rows(value: torch.Tensor) -> list[torch.Tensor]:
        return list(value.chunk(tp_size, 0))

    def of_keys(value: torch.Tensor) -> list[torch.Tensor]:
        if kv_heads >= tp_size:
            return rows(value)
        every = value.view(kv_heads, -1, *value.shape[1:])
        return [every[rank * kv_heads // tp_size] for rank in range(tp_size)]

    def fuse(parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        shares = (rows(parts[0]), of_keys(parts[1]), of_keys(parts[2])) if len(parts) == 3 else (rows(parts[0]),)
        return [torch.cat(own) for own in zip(*shares, strict=True)]

    def matrix(name: str, sources: Sequence[str], by_columns: bool) -> None:
        values = [weights[f"{it}.weight"] for it in sources]

        def cut(parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            return list(parts[0].chunk(tp_size, 1)) if by_columns else fuse(parts)

        if kind == "plain":
            place(f"{name}.weight", cut(values))
        elif kind == "fp8":
            scale = torch.stack([it.abs().amax() for it in values]).amax() / 448
            codes = [(it / scale).to(torch.float8_e4m3fn) for it in values]
            for it, own in zip(sources, codes, strict=True):
                numbers[f"{it}.weight"] = own.float() * scale
            stored = [own.view(torch.uint8) for own in codes]
            place(f"{name}.weight", [own.view(container or torch.float8_e4m3fn) for own in cut(stored)])
            place(f"{name}.weights_scaling_factor", [scale.reshape(1)] * tp_size)
            place(f"{name}.activation_scaling_factor", [torch.tensor([0.25])] * tp_size)
        else:
            before = torch.rand(values[0].shape[1], generator=torch.Generator().manual_seed(len(name))) + 0.5
            scales, packed = [], []
            for it, own in zip(sources, values, strict=True):
                groups = (own / before).view(own.shape[0], -1, group)
                scale = groups.abs().amax(-1, keepdim=True) / 7
                code = (groups / scale).round().clamp(-8, 7)
                numbers[f"{it}.weight"] = (code * scale).flatten(1) * before
                pairs = code.flatten(1).to(torch.int8)
                packed.append((pairs[0::2] & 15) | (pairs[1::2] << 4))
                scales.append(scale.squeeze(-1))
            place(f"{name}.weight", cut(packed))
            place(f"{name}.weights_scaling_factor", cut(scales))
            place(f"{name}.prequant_scaling_factor", rows(before) if by_columns else [before] * tp_size)
        biases = [weights[f"{it}.bias"] for it in sources if f"{it}.bias" in weights]
        if biases:
            place(f"{name}.bias", [biases[0]] * tp_size if by_columns else fuse(biases))

    for layer in range(config["num_hidden_layers"]):
        theirs, ours = f"model.layers.{layer}", f"transformer.layers.{layer}"
        place(f"{ours}.input_layernorm.weight", [weights[f"{theirs}.input_layernorm.weight"]] * tp_size)
        place(f"{ours}.post_layernorm.weight", [weights[f"{theirs}.post_attention_layernorm.weight"]] * tp_size)
        for name in ("q", "k"):
            if f"{theirs}.self_attn.{name}_norm.weight" in weights:
                norm = weights[f"{theirs}.self_attn.{name}_norm.weight"]
                place(f"{ours}.attention.{name}_layernorm.weight", [norm] * tp_size)
        matrix(f"{ours}.attention.qkv", [f"{theirs}.self_attn.{name}_proj" for name in "qkv"], False)
        matrix(f"{ours}.attention.dense", [f"{theirs}.self_attn.o_proj"], True)
        matrix(f"{ours}.mlp.fc", [f"{theirs}.mlp.gate_proj"], False)
        matrix(f"{ours}.mlp.gate", [f"{theirs}.mlp.up_proj"], False)
        matrix(f"{ours}.mlp.proj", [f"{theirs}.mlp.down_proj"], True)
        place(f"{ours}.attention.kv_cache_scaling_factor", [torch.tensor([0.5 + layer])] * tp_size)
    table = weights["model.embed_tokens.weight"]
    padded = torch.nn.functional.pad(table, (0, 0, 0, -len(table) % tp_size))
    shares = [table] * tp_size
    if embedding is not None:
        shares = rows(padded) if embedding == 0 else list(table.chunk(tp_size, 1))
    place("transformer.vocab_embedding.weight", shares)
    place("transformer.ln_f.weight", [weights["model.norm.weight"]] * tp_size)
    if "lm_head.weight" in weights:
        last = weights["lm_head.weight"]
        place("lm_head.weight", rows(torch.nn.functional.pad(last, (0, 0, 0, -len(last) % tp_size))))
    output.mkdir(parents=True)
    for index, tensors in enumerate(ranks):
        save_file(tensors, output / f"rank{index}.safetensors")
    algorithm = {"plain": None, "fp8": "FP8", "awq": "W4A16_AWQ"}[kind]
    values = _config(config, tp_size, head, kv_heads, embedding)
    values["quantization"] = {"quant_algo": algorithm, "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    if kind == "awq":
        values["quantization"] |= {"group_size": group, "has_zero_point": False, "pre_quant_scale": True}
    (output / "config.json").write_text(json.dumps(values), encoding="utf-8")
    return numbers


def _config(config: dict[str, Any], tp_size: int, head: int, kv_heads: int, embedding: int | None) -> dict[str, Any]:
    names = ("num_hidden_layers", "num_attention_heads", "hidden_size", "intermediate_size", "vocab_size")
    return {
        "architecture": config["architectures"][0],
        "dtype": "float32",
        "logits_dtype": "float32",
        **{name: config[name] for name in names},
        "num_key_value_heads": kv_heads,
        "head_size": head,
        "max_position_embeddings": config["max_position_embeddings"],
        "position_embedding_type": "rope_gpt_neox",
        "hidden_act": "silu",
        "norm_epsilon": config["rms_norm_eps"],
        "rotary_base": config["rope_parameters"]["rope_theta"],
        "rotary_scaling": None,
        "attn_bias": bool(config.get("attention_bias")) or config["architectures"] == ["Qwen2ForCausalLM"],
        "mlp_bias": bool(config.get("mlp_bias")),
        "use_parallel_embedding": embedding is not None,
        "embedding_sharding_dim": embedding or 0,
        "mapping": {"world_size": tp_size, "tp_size": tp_size, "pp_size": 1},
    }


def write_dense(source: Path, numbers: Tensors) -> Path:
    """Put other numbers in the place of a checkpoint's."""
    save_weights(source, {name: value.contiguous() for name, value in numbers.items()})
    return source
