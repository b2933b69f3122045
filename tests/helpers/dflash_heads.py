"""Made-up DFlash and DSpark heads for tests: of every layout that files have them in, and in plain torch, from what
their authors say of them (DFlash: arXiv:2602.06036; DSpark: github.com/deepseek-ai/DeepSpec).

A draft is a block: the row's newest token, and mask tokens behind it. Layers run over the block; the keys and values
that its queries meet are those of the block, and those that the same projections make of the target's states, fused and
normed. Nothing is masked. There is no cache: each draft takes the whole text anew.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from medusa_heads import Proposals, ranked
from own_drafters import hidden_states
from pipelines import Reference
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import linear, silu

EPS = 1e-5
THETA = 5000.0
MASK_TOKEN = 198
BLOCK = 6
LAYOUTS = ("dflash", "speculators", "dspark", "speculators dspark")


@dataclass(frozen=True)
class DFlash:
    """A head, with tensors by the names that its authors have for them.

    Attributes:
        boundaries: of the target that it reads.
        embedding, head: its own or the target's.
        token_ids: the target's id of each line of `head`; None where they are the same.
        from_newest: whether what stands at the newest token says the first draft token.
    """

    tensors: dict[str, Tensor]
    boundaries: tuple[int, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    embedding: Tensor
    head: Tensor
    token_ids: Tensor | None
    from_newest: bool
    is_causal: bool = False

    @property
    def num_layers(self) -> int:
        return 1 + max(int(name.split(".")[1]) for name in self.tensors if name.startswith("layers."))

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * self.tensors[f"{name}.weight"]

    def linear(self, x: Tensor, name: str) -> Tensor:
        return linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def rotate(self, x: Tensor) -> Tensor:
        """x [n, heads, head_dim], turned by positions from 0."""
        half = self.head_dim // 2
        angles = torch.outer(torch.arange(len(x)).float(), self.theta() ** -(torch.arange(half).float() / half))
        cosine, sine = (torch.cat((part, part), 1).unsqueeze(1) for part in (angles.cos(), angles.sin()))
        return x * cosine + torch.cat((-x[..., half:], x[..., :half]), -1) * sine

    @staticmethod
    def theta() -> float:
        return THETA

    def attention(self, x: Tensor, context: Tensor, name: str) -> Tensor:
        """Of a block [n, features] behind a context [before, features]."""
        every, before = torch.cat((context, x)), len(context)
        query, key, value = (
            self.linear(every, f"{name}.{one}_proj").view(len(every), -1, self.head_dim) for one in "qkv"
        )
        query, key = self.norm(query, f"{name}.q_norm"), self.norm(key, f"{name}.k_norm")
        query, key = self.rotate(query)[before:], self.rotate(key)
        key, value = (one.repeat_interleave(self.num_heads // self.num_kv_heads, 1) for one in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query, key) * self.head_dim**-0.5
        if self.is_causal:
            scores = scores + torch.full((len(x), len(every)), -torch.inf).triu(before + 1)
        return self.linear(torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).flatten(1), f"{name}.o_proj")

    def states(self, text: Sequence[int], hidden: Tensor, count: int) -> Tensor:
        """[count, hidden]: what says the tokens behind a text, of the target's states [text - 1, boundaries, size]."""
        context = self.norm(self.linear(hidden[:, list(self.boundaries)].flatten(1), "fc"), "hidden_norm")
        first = 0 if self.from_newest else 1
        stream = self.embedding[[text[-1], *[MASK_TOKEN] * (count + first - 1)]]
        for layer in range(self.num_layers):
            name = f"layers.{layer}"
            stream = stream + self.attention(self.norm(stream, f"{name}.input_layernorm"), context, f"{name}.self_attn")
            behind = self.norm(stream, f"{name}.post_attention_layernorm")
            gated = silu(self.linear(behind, f"{name}.mlp.gate_proj")) * self.linear(behind, f"{name}.mlp.up_proj")
            stream = stream + self.linear(gated, f"{name}.mlp.down_proj")
        return self.norm(stream, "norm")[first:]

    @torch.inference_mode()
    def draft(self, target: Reference, text: list[int], count: int, temperature: float, seed: int) -> list[int]:
        """Tokens behind a text, each chosen as a row with such parameters chooses."""
        states = self.states(text, hidden_states(target, text[:-1]), count)
        drafted: list[int] = []
        for state in states:
            found = self.head @ state
            if "markov_head.markov_w1.weight" in self.tensors:
                before = self.tensors["markov_head.markov_w1.weight"][(text + drafted)[-1]]
                if "markov_head.gate_proj.weight" in self.tensors:
                    before = before * torch.sigmoid(self.linear(torch.cat((state, before)), "markov_head.gate_proj"))
                found = found + self.tensors["markov_head.markov_w2.weight"] @ before
            if self.token_ids is not None:
                found = torch.full((len(self.embedding),), -torch.inf).index_copy_(0, self.token_ids, found)
            drafted.append(int(ranked(found.unsqueeze(0), 1, temperature, seed, len(text) + len(drafted))))
        return drafted


def make_dflash(
    target: Path,
    layout: str = "dflash",
    *,
    boundaries: Sequence[int] = (1, 0, 3),
    num_layers: int = 2,
    num_tokens: int | None = None,
    is_causal: bool = False,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    is_gated: bool = False,
    seed: int = 3,
) -> DFlash:
    """A random head for a target; for `num_tokens` of its tokens where it has a head of its own."""
    size = json.loads((target / "config.json").read_text(encoding="utf-8"))["hidden_size"]
    weights = load_file(target / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"].float()
    head = weights.get("lm_head.weight", embedding).float()
    generator, num_heads, features = torch.Generator().manual_seed(seed), 4, 96
    tensors: dict[str, Tensor] = {}

    def matrix(name: str, rows: int, columns: int) -> None:
        tensors[f"{name}.weight"] = torch.randn(rows, columns, generator=generator) * 1.5 * columns**-0.5

    def norm(name: str, columns: int) -> None:
        tensors[f"{name}.weight"] = 1 + 0.3 * torch.randn(columns, generator=generator)

    matrix("fc", size, len(boundaries) * size)
    for layer in range(num_layers):
        name = f"layers.{layer}"
        for one, heads in (("q", num_heads), ("k", num_kv_heads), ("v", num_kv_heads)):
            matrix(f"{name}.self_attn.{one}_proj", heads * head_dim, size)
        matrix(f"{name}.self_attn.o_proj", size, num_heads * head_dim)
        for one in "qk":
            norm(f"{name}.self_attn.{one}_norm", head_dim)
        for one in ("gate", "up"):
            matrix(f"{name}.mlp.{one}_proj", features, size)
        matrix(f"{name}.mlp.down_proj", size, features)
        for one in ("input_layernorm", "post_attention_layernorm"):
            norm(f"{name}.{one}", size)
    norm("hidden_norm", size)
    norm("norm", size)
    token_ids = None
    if layout != "dflash":
        matrix("lm_head", num_tokens or len(embedding), size)
        head = tensors["lm_head.weight"]
        tensors["embed_tokens.weight"] = embedding
    if num_tokens is not None:
        token_ids = torch.randperm(len(embedding), generator=generator)[:num_tokens].sort().values
    if layout.endswith("dspark"):
        matrix("markov_head.markov_w1", len(embedding), 8)
        matrix("markov_head.markov_w2", len(head), 8)
        if is_gated:
            matrix("markov_head.gate_proj", 8, size + 8)
            tensors["markov_head.gate_proj.bias"] = torch.randn(8, generator=generator)
        matrix("confidence_head.proj", 1, size + 8)
        tensors["confidence_head.proj.bias"] = torch.zeros(1)
    shape = (num_heads, num_kv_heads, head_dim)
    from_newest = layout.endswith("dspark")
    return DFlash(tensors, tuple(boundaries), *shape, embedding, head, token_ids, from_newest, is_causal)


def fitted_dflash(head: DFlash, target: Path, texts: Iterable[Sequence[int]], count: int = 3) -> DFlash:
    """The head with an lm_head that says by least squares what the texts go on with, where it knows the token."""
    reference, listed = Reference(target), [list(text) for text in texts]
    read, wanted = list[Tensor](), list[int]()
    with torch.inference_mode():
        for text in listed:
            hidden = hidden_states(reference, text)
            for end in range(2, len(text) - count):
                read.append(head.states(text[:end], hidden[: end - 1], count))
                wanted += text[end : end + count]
    expected = torch.nn.functional.one_hot(torch.tensor(wanted), len(head.embedding)).float()
    solution = torch.linalg.lstsq(torch.cat(read), expected, driver="gelsd").solution.T * 10
    lines = (solution if head.token_ids is None else solution[head.token_ids]).contiguous()
    return replace(head, tensors={**head.tensors, "lm_head.weight": lines}, head=lines)


def write_dflash(path: Path, head: DFlash, layout: str, target: Path, **changes: Any) -> Path:
    """Write a head in a layout; `changes` are values of config.json, None leaves one out. Returns the directory."""
    of_target = json.loads((target / "config.json").read_text(encoding="utf-8"))
    vocab_size = of_target["vocab_size"]
    path.mkdir(parents=True, exist_ok=True)
    tensors = dict(head.tensors)
    if head.token_ids is not None:
        tensors["d2t"] = head.token_ids - torch.arange(len(head.token_ids))
        tensors["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, head.token_ids, True)
    layers: dict[str, Any] = {
        "model_type": "qwen3",
        "hidden_size": head.tensors["norm.weight"].shape[0],
        "intermediate_size": 96,
        "num_hidden_layers": head.num_layers,
        "num_attention_heads": head.num_heads,
        "num_key_value_heads": head.num_kv_heads,
        "head_dim": head.head_dim,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "hidden_act": "silu",
        "layer_types": ["full_attention"] * head.num_layers,
        "max_position_embeddings": 64,
        "vocab_size": vocab_size,
    }
    outputs = [one - 1 for one in head.boundaries]
    of_block = {"block_size": BLOCK, "mask_token_id": MASK_TOKEN}
    kind = "gated" if "markov_head.gate_proj.weight" in tensors else "vanilla"
    markov = {"markov_rank": 8, "markov_head_type": kind, "enable_confidence_head": True}
    if layout == "dflash":
        nested = {"mask_token_id": MASK_TOKEN, "target_layer_ids": outputs, "causal": head.is_causal}
        of_block = {"block_size": BLOCK, "dflash_config": nested, "num_target_layers": of_target["num_hidden_layers"]}
        config = {"architectures": ["DFlashDraftModel"], **layers, **of_block}
    elif layout == "dspark":
        config = {"architectures": ["Qwen3DSparkModel"], **layers, **of_block, "target_layer_ids": outputs, **markov}
    else:
        kind = layout.removeprefix("speculators").strip() or "dflash"
        ids = {"aux_hidden_state_layer_ids": list(head.boundaries), "draft_vocab_size": len(head.head)}
        config = {"speculators_model_type": kind, "transformer_layer_config": layers, **of_block, **ids}
        config |= {**markov, "sample_from_anchor": True} if kind == "dspark" else {}
    kept = {name: value for name, value in {**config, **changes}.items() if value is not None}
    (path / "config.json").write_text(json.dumps(kept), encoding="utf-8")
    save_file({key: value.contiguous().clone() for key, value in tensors.items()}, path / "model.safetensors")
    return path


def check_proposals(seen: Proposals, target: Path, head: DFlash) -> int:
    """Compare what was proposed with the head in plain torch; returns how many drafts there were."""
    reference, count = Reference(target), 0
    for text, temperature, seed, tokens, draft_len in seen.seen:
        if draft_len > 0:
            expected = head.draft(reference, text, draft_len, temperature, seed)
            assert tokens[:draft_len] == expected, len(text)
            count += 1
    return count


def method_of(layout: str) -> str:
    """Which method drafts with heads of a layout."""
    return "dspark" if layout.endswith("dspark") else "dflash"


def dflash(layout: str = "dflash", **options: Any) -> dict[str, Any]:
    """The section of the method."""
    return {"method": method_of(layout), **options}
