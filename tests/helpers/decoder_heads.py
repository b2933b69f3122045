"""Made-up heads of decoder layers for tests: what those of EAGLE, EAGLE-3 and DFlash share, in plain torch, random
numbers for their layers, and files."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from medusa_heads import Proposals
from pipelines import Reference
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import gelu, linear, silu

EPS = 1e-5
THETA = 5000.0
NUM_HEADS = 4
FEATURES = 96
"""Numbers inside an MLP."""


@dataclass(frozen=True)
class DecoderHead:
    """A head, with tensors by the names that its authors have for them.

    Attributes:
        boundaries: of the target that it reads.
        hidden_act: what gates go through.
        window: tokens back that its layers see, each one's own included; None where they see all.
    """

    hidden_act = "silu"
    window = None

    tensors: dict[str, Tensor]
    boundaries: tuple[int, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    embedding: Tensor

    @property
    def num_layers(self) -> int:
        return 1 + max(int(name.split(".")[1]) for name in self.tensors if name.startswith("layers."))

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * self.tensors[f"{name}.weight"]

    def linear(self, x: Tensor, name: str) -> Tensor:
        return linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def gated(self, x: Tensor, name: str) -> Tensor:
        """What the down_proj of a layer's MLP reads, of a stream behind attention."""
        behind = self.norm(x, f"{name}.post_attention_layernorm")
        gate = self.linear(behind, f"{name}.mlp.gate_proj")
        gate = silu(gate) if self.hidden_act == "silu" else gelu(gate, approximate="tanh")
        return gate * self.linear(behind, f"{name}.mlp.up_proj")

    def attend(
        self, x: Tensor, name: str, *, context: Tensor | None = None, is_causal: bool = True, theta: float = THETA
    ) -> Tensor:
        """Attention of [n, features] to itself behind a context [before, features], rotated by positions from 0."""
        every = x if context is None else torch.cat((context, x))
        before, half = len(every) - len(x), self.head_dim // 2
        query, key, value = (
            self.linear(every, f"{name}.{one}_proj").view(len(every), -1, self.head_dim) for one in "qkv"
        )
        if f"{name}.q_norm.weight" in self.tensors:
            query, key = self.norm(query, f"{name}.q_norm"), self.norm(key, f"{name}.k_norm")
        angles = torch.outer(torch.arange(len(every)).float(), theta ** -(torch.arange(half).float() / half))
        cosine, sine = (torch.cat((part, part), 1).unsqueeze(1) for part in (angles.cos(), angles.sin()))
        query, key = (one * cosine + torch.cat((-one[..., half:], one[..., :half]), -1) * sine for one in (query, key))
        key, value = (one.repeat_interleave(self.num_heads // self.num_kv_heads, 1) for one in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query[before:], key) * self.head_dim**-0.5
        if is_causal:
            scores = scores + torch.full((len(x), len(every)), -torch.inf).triu(before + 1)
        if self.window is not None:
            scores = scores + torch.full((len(x), len(every)), -torch.inf).tril(before - self.window)
        return self.linear(torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).flatten(1), f"{name}.o_proj")


class RandomTensors:
    """Random tensors by their names.

    Args:
        seed: of the numbers.
    """

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.tensors: dict[str, Tensor] = {}

    def matrix(self, name: str, rows: int, columns: int, bias: bool = False) -> None:
        self.tensors[f"{name}.weight"] = torch.randn(rows, columns, generator=self.generator) * 1.5 * columns**-0.5
        if bias:
            self.tensors[f"{name}.bias"] = torch.randn(rows, generator=self.generator) * 0.3

    def norm(self, name: str, columns: int) -> None:
        self.tensors[f"{name}.weight"] = 1 + 0.3 * torch.randn(columns, generator=self.generator)

    def layer(
        self,
        name: str,
        hidden: int,
        *,
        inputs: int,
        num_kv_heads: int,
        head_dim: int,
        features: int = FEATURES,
        biases: bool = False,
        head_norms: bool = False,
    ) -> None:
        """A decoder layer whose attention reads `inputs` numbers, without the norms of its stream."""
        for one, heads in (("q", NUM_HEADS), ("k", num_kv_heads), ("v", num_kv_heads)):
            self.matrix(f"{name}.self_attn.{one}_proj", heads * head_dim, inputs, biases)
        self.matrix(f"{name}.self_attn.o_proj", hidden, NUM_HEADS * head_dim, biases)
        for one in "qk" if head_norms else "":
            self.norm(f"{name}.self_attn.{one}_norm", head_dim)
        for one in ("gate", "up"):
            self.matrix(f"{name}.mlp.{one}_proj", features, hidden, biases)
        self.matrix(f"{name}.mlp.down_proj", hidden, features, biases)

    def token_ids(self, vocab_size: int, num_tokens: int | None) -> Tensor | None:
        """So many of a vocabulary's ids, ascending; None where all are meant."""
        if num_tokens is None:
            return None
        return torch.randperm(vocab_size, generator=self.generator)[:num_tokens].sort().values


def read_config(target: Path) -> dict[str, Any]:
    """The values of a target's config.json."""
    return dict(json.loads((target / "config.json").read_text(encoding="utf-8")))


def write_config(path: Path, values: dict[str, Any]) -> None:
    """Write config.json; what is None is left out."""
    kept = {name: value for name, value in values.items() if value is not None}
    (path / "config.json").write_text(json.dumps(kept), encoding="utf-8")


def token_tables(token_ids: Tensor | None, vocab_size: int) -> dict[str, Tensor]:
    """The tensors d2t and t2d of a head that knows some of the target's tokens alone."""
    if token_ids is None:
        return {}
    is_known = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, token_ids, True)
    return {"d2t": token_ids - torch.arange(len(token_ids)), "t2d": is_known}


def layer_values(head: DecoderHead, vocab_size: int, theta: float = THETA) -> dict[str, Any]:
    """What config.json says of a head's layers."""
    features, hidden = head.tensors["layers.0.mlp.up_proj.weight"].shape
    return {
        "hidden_size": hidden,
        "intermediate_size": features,
        "num_hidden_layers": head.num_layers,
        "num_attention_heads": head.num_heads,
        "num_key_value_heads": head.num_kv_heads,
        "head_dim": head.head_dim,
        "rms_norm_eps": EPS,
        "rope_theta": theta,
        "hidden_act": head.hidden_act,
        "max_position_embeddings": 64,
        "vocab_size": vocab_size,
    }


def write_files(path: Path, tensors: dict[str, Tensor], config: dict[str, Any], changes: dict[str, Any]) -> Path:
    """Write a head's directory; `changes` are values of config.json, None leaves one out. Returns the directory."""
    path.mkdir(parents=True, exist_ok=True)
    write_config(path, config | changes)
    save_file({key: value.contiguous().clone() for key, value in tensors.items()}, path / "model.safetensors")
    return path


def change_config(path: Path, **changes: Any) -> None:
    """Change values of a head's config.json; None leaves one out."""
    write_config(path, read_config(path) | changes)


def change_tensors(path: Path, **changes: Callable[[torch.Tensor], torch.Tensor] | None) -> None:
    """Tensors of a file made anew, or left out; `_` stands for a point in their names."""
    found = {name.replace(".", "_"): (name, value) for name, value in load_file(path / "model.safetensors").items()}
    for key, made in changes.items():
        name, value = found.pop(key)
        if made is not None:
            found[key] = name, made(value).contiguous()
    save_file(dict(found.values()), path / "model.safetensors")


Draft = Callable[[Reference, list[int], int, float, int], list[int]]
"""What a head says behind a text, in plain torch: of the target, the text, how many tokens, temperature and seed."""


def check_drafts(seen: Proposals, target: Path, draft: Draft) -> int:
    """Compare what was proposed with what a head says in plain torch; returns how many drafts there were."""
    reference, count = Reference(target), 0
    for text, temperature, seed, tokens, draft_len in seen.seen:
        if draft_len > 0:
            assert tokens[:draft_len] == draft(reference, text, draft_len, temperature, seed), len(text)
            count += 1
    return count
