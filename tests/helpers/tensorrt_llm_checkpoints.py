"""Writes TensorRT-LLM's checkpoints of plain Hugging Face ones, from the description of the format: cut for any number
of ranks, plain, in FP8 or in W4A16_AWQ. It shares no code with the product.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from checkpoints import save_weights
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]


@dataclass
class _Ranks:
    """What is written: a checkpoint's numbers, cut for ranks.

    Attributes:
        weights: of the plain checkpoint, float32.
        kv_heads: of a layer.
        tp_size: ranks.
        kind, group, container: see `write_ranks`.
        tensors: of each rank.
        numbers: what is stored stands for, by the names of the plain checkpoint.
    """

    weights: Tensors
    kv_heads: int
    tp_size: int
    kind: str
    group: int
    container: torch.dtype | None
    tensors: list[Tensors] = field(default_factory=list)
    numbers: Tensors = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tensors = [{} for _ in range(self.tp_size)]
        self.numbers = dict(self.weights)

    def place(self, name: str, shares: Sequence[torch.Tensor]) -> None:
        """Each rank's share of a tensor."""
        for rank, share in zip(self.tensors, shares, strict=True):
            rank[name] = share.contiguous().clone()

    def everywhere(self, name: str, value: torch.Tensor) -> None:
        """The whole tensor on every rank."""
        self.place(name, [value] * self.tp_size)

    def rows(self, value: torch.Tensor) -> list[torch.Tensor]:
        """Cut along the first dimension, which is padded with zeros."""
        padded = torch.nn.functional.pad(value, (*[0, 0] * (value.dim() - 1), 0, -len(value) % self.tp_size))
        return list(padded.chunk(self.tp_size, 0))

    def of_keys(self, value: torch.Tensor) -> list[torch.Tensor]:
        """Rows of keys or values: a head goes to several ranks where there are more of these."""
        if self.kv_heads >= self.tp_size:
            return self.rows(value)
        every = value.view(self.kv_heads, -1, *value.shape[1:])
        return [every[rank * self.kv_heads // self.tp_size] for rank in range(self.tp_size)]

    def fuse(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Rows of one matrix; or of queries, keys and values, one behind the other on each rank."""
        if len(parts) == 1:
            return self.rows(parts[0])
        shares = self.rows(parts[0]), self.of_keys(parts[1]), self.of_keys(parts[2])
        return [torch.cat(own) for own in zip(*shares, strict=True)]

    def matrix(self, name: str, sources: Sequence[str], by_columns: bool) -> None:
        """One of the target's matrices with its scales and bias, made of those of the plain checkpoint."""
        values = [self.weights[f"{it}.weight"] for it in sources]

        def cut(parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            return list(parts[0].chunk(self.tp_size, 1)) if by_columns else self.fuse(parts)

        if self.kind == "plain":
            self.place(f"{name}.weight", cut(values))
        elif self.kind == "fp8":
            scale = torch.stack([it.abs().amax() for it in values]).amax() / 448
            codes = [(it / scale).to(torch.float8_e4m3fn) for it in values]
            for it, own in zip(sources, codes, strict=True):
                self.numbers[f"{it}.weight"] = own.float() * scale
            stored = cut([own.view(torch.uint8) for own in codes])
            self.place(f"{name}.weight", [own.view(self.container or torch.float8_e4m3fn) for own in stored])
            self.everywhere(f"{name}.weights_scaling_factor", scale.reshape(1))
            self.everywhere(f"{name}.activation_scaling_factor", torch.tensor([0.25]))
        else:
            before = torch.rand(values[0].shape[1], generator=torch.Generator().manual_seed(len(name))) + 0.5
            pairs = [self.in_4_bits(it, own, before) for it, own in zip(sources, values, strict=True)]
            self.place(f"{name}.weight", cut([packed for packed, _ in pairs]))
            self.place(f"{name}.weights_scaling_factor", cut([scale for _, scale in pairs]))
            self.place(f"{name}.prequant_scaling_factor", self.rows(before) if by_columns else [before] * self.tp_size)
        biases = [self.weights[f"{it}.bias"] for it in sources if f"{it}.bias" in self.weights]
        if biases:
            self.place(f"{name}.bias", [biases[0]] * self.tp_size if by_columns else self.fuse(biases))

    def in_4_bits(self, source: str, value: torch.Tensor, before: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes, two output features a byte, and the scales of groups."""
        groups = (value / before).view(value.shape[0], -1, self.group)
        scale = groups.abs().amax(-1, keepdim=True) / 7
        code = (groups / scale).round().clamp(-8, 7)
        self.numbers[f"{source}.weight"] = (code * scale).flatten(1) * before
        twos = code.flatten(1).to(torch.int8)
        return (twos[0::2] & 15) | (twos[1::2] << 4), scale.squeeze(-1)

    def layer(self, index: int) -> None:
        """A decoder layer."""
        theirs, ours = f"model.layers.{index}", f"transformer.layers.{index}"
        self.everywhere(f"{ours}.input_layernorm.weight", self.weights[f"{theirs}.input_layernorm.weight"])
        self.everywhere(f"{ours}.post_layernorm.weight", self.weights[f"{theirs}.post_attention_layernorm.weight"])
        for name in ("q", "k"):
            norm = self.weights.get(f"{theirs}.self_attn.{name}_norm.weight")
            if norm is not None:
                self.everywhere(f"{ours}.attention.{name}_layernorm.weight", norm)
        self.matrix(f"{ours}.attention.qkv", [f"{theirs}.self_attn.{name}_proj" for name in "qkv"], False)
        self.matrix(f"{ours}.attention.dense", [f"{theirs}.self_attn.o_proj"], True)
        self.matrix(f"{ours}.mlp.fc", [f"{theirs}.mlp.gate_proj"], False)
        self.matrix(f"{ours}.mlp.gate", [f"{theirs}.mlp.up_proj"], False)
        self.matrix(f"{ours}.mlp.proj", [f"{theirs}.mlp.down_proj"], True)
        self.everywhere(f"{ours}.attention.kv_cache_scaling_factor", torch.tensor([0.5 + index]))

    def ends(self, embedding: int | None) -> None:
        """Embedding, last norm and head."""
        table = self.weights["model.embed_tokens.weight"]
        shares = [table] * self.tp_size
        if embedding is not None:
            shares = self.rows(table) if embedding == 0 else list(table.chunk(self.tp_size, 1))
        self.place("transformer.vocab_embedding.weight", shares)
        self.everywhere("transformer.ln_f.weight", self.weights["model.norm.weight"])
        if "lm_head.weight" in self.weights:
            self.place("lm_head.weight", self.rows(self.weights["lm_head.weight"]))


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
    made = _Ranks(weights, kv_heads, tp_size, kind, group, container)
    for index in range(config["num_hidden_layers"]):
        made.layer(index)
    made.ends(embedding)
    output.mkdir(parents=True)
    for index, tensors in enumerate(made.tensors):
        save_file(tensors, output / f"rank{index}.safetensors")
    algorithm = {"plain": None, "fp8": "FP8", "awq": "W4A16_AWQ"}[kind]
    values = _config(config, tp_size, config.get("head_dim") or config["hidden_size"] // heads, kv_heads, embedding)
    values["quantization"] = {"quant_algo": algorithm, "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    if kind == "awq":
        values["quantization"] |= {"group_size": group, "has_zero_point": False, "pre_quant_scale": True}
    (output / "config.json").write_text(json.dumps(values), encoding="utf-8")
    return made.numbers


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
