"""A model family that is not the product's, and touches no file of it: start here when you add one.

A layer has four norms, whose weights are what they multiply by less 1; attention that slides in every other layer; and
a feed-forward layer without a gate, with tensors of its own names. A family is a function from config.json to plans of
layers; a plan says its weights, what a token takes, and builds the layer. The product's own are in
trtrun/models/layer_plan.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from checkpoints import save_weights
from safetensors.torch import load_file
from torch.nn import functional

from parallel.sharding import column_range
from trtrun.kvcache.specs import LayerSpecs
from trtrun.kvcache.store import LayerCache
from trtrun.layers.decoder_layer import Attention, RMSNorm, RowParallelLinear
from trtrun.linear.layer import Linear
from trtrun.models.attention_plan import AttentionPlan
from trtrun.models.config import ModelFamily, read_model_config, read_window
from trtrun.models.layer_plan import LayerPlan, ModelShape, NormPlan
from trtrun.registry import MODEL_FAMILIES
from trtrun.weights.weight import Axis, LinearPlan, Share, StoredTensor, Weight
from trtrun.weights.weight_reader import WeightReader

ARCHITECTURE = "FourNormsForCausalLM"
CONFIG: dict[str, Any] = {
    "architectures": [ARCHITECTURE],
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "max_position_embeddings": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "sliding_window": 7,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class CentredNormPlan(NormPlan):
    """RMSNorm that multiplies by 1 + weight."""

    @property
    def weight(self) -> Weight:
        return Weight((StoredTensor(f"{self.name}.weight", (Axis(self.size),), dummy_scale=0.0),))

    def build(self, reader: WeightReader) -> RMSNorm:
        return RMSNorm(1 + reader.tensor(self.weight), self.eps)


@dataclass(frozen=True)
class PlainMLPPlan:
    """fc_out(gelu(fc_in(x))), the first with biases."""

    name: str
    shape: ModelShape

    @property
    def features(self) -> Axis:
        return Axis(self.shape.intermediate_size, column_range)

    @property
    def first(self) -> LinearPlan:
        return LinearPlan(self.name, {"fc_in": self.features}, Axis(self.shape.hidden_size), has_bias=True)

    @property
    def second(self) -> LinearPlan:
        return LinearPlan(self.name, {"fc_out": Axis(self.shape.hidden_size)}, self.features)

    def build(self, reader: WeightReader) -> PlainMLP:
        first = reader.linear(self.first.weight, self.first.bias)
        return PlainMLP(first, reader.row_parallel(self.second.weight, self.second.bias))


@dataclass
class PlainMLP:
    first: Linear
    second: RowParallelLinear

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(functional.gelu(self.first(x), approximate="tanh"))


@dataclass(frozen=True)
class FourNormsPlan:
    """A layer: a norm in front of attention and one behind it, and the same around the feed-forward layer."""

    norms: tuple[NormPlan, ...]
    attention: AttentionPlan
    mlp: PlainMLPPlan

    def weights(self) -> Sequence[Weight]:
        own = (*self.mlp.first.weights, *self.mlp.second.weights)
        return (*(norm.weight for norm in self.norms), *self.attention.weights(), *own)

    def token_bytes(self, share: Share, item_bytes: int) -> int:
        hidden, features = self.attention.shape.hidden_size, len(self.mlp.features.held(share))
        held = 8 * hidden + self.attention.token_numbers(share) + 2 * features
        return held * item_bytes + 3 * max(hidden, self.attention.token_numbers(share)) * 4

    def keeps(self, share: Share) -> LayerSpecs:
        return (self.attention.keeps(share),)

    def build(self, reader: WeightReader) -> FourNormsLayer:
        norms = [norm.build(reader) for norm in self.norms]
        return FourNormsLayer(*norms, self.attention.build(reader), self.mlp.build(reader))


@dataclass
class FourNormsLayer:
    before_attention: RMSNorm
    behind_attention: RMSNorm
    before_mlp: RMSNorm
    behind_mlp: RMSNorm
    attention: Attention
    mlp: PlainMLP

    def attend(
        self,
        hidden: torch.Tensor,
        delta: torch.Tensor | None,
        angles: tuple[torch.Tensor, torch.Tensor],
        cache: LayerCache,
    ) -> torch.Tensor:
        normed = self.before_attention(hidden) if delta is None else self.before_attention.add(hidden, delta)
        return self.attention(normed, angles, cache)

    def feed_forward(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        delta = self.behind_attention(self.attention.output(attended))
        return self.behind_mlp(self.mlp(self.before_mlp.add(hidden, delta)))


NORMS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")


def plan_layers(shape: ModelShape, values: Mapping[str, Any]) -> Sequence[LayerPlan]:
    window = read_window(values)
    return [
        FourNormsPlan(
            tuple(CentredNormPlan(f"{name}.{norm}", shape.hidden_size, shape.rms_norm_eps) for norm in NORMS),
            AttentionPlan(f"{name}.self_attn", shape, window if index % 2 == 0 else None),
            PlainMLPPlan(f"{name}.mlp", shape),
        )
        for index, name in ((index, f"model.layers.{index}") for index in range(shape.num_layers))
    ]


FAMILY = ModelFamily({"rms_norm_eps": 1e-6}, plan_layers, activations=("gelu_pytorch_tanh",))


@contextmanager
def custom_family() -> Iterator[None]:
    """The family of this file is there, as those of the product are."""
    MODEL_FAMILIES.register(ARCHITECTURE)(FAMILY)
    try:
        yield
    finally:
        del MODEL_FAMILIES._items[ARCHITECTURE]


def make_custom_checkpoint(path: Path, seed: int = 1, dtype: torch.dtype = torch.float32, **overrides: Any) -> Path:
    """Write config.json and random weights of the family to `path`; returns `path`."""
    path.mkdir(parents=True)
    values = {**CONFIG, "dtype": str(dtype).removeprefix("torch."), **overrides}
    (path / "config.json").write_text(json.dumps(values), encoding="utf-8")
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for part in (part for weight in read_model_config(path).weights for part in weight.parts):
        made = torch.randn(part.shape, generator=generator)
        if "embed_tokens" not in part.name:
            made *= 0.2 if len(part.shape) == 1 else 1.5 * part.shape[1] ** -0.5
        weights[part.name] = made.to(dtype)
    save_weights(path, weights)
    return path


class PlainReference:
    """The same model in plain torch, without a store: what the names and shapes of its tensors mean."""

    def __init__(self, path: Path) -> None:
        self._values = json.loads((path / "config.json").read_text(encoding="utf-8"))
        self._weights = {name: value.float() for name, value in load_file(path / "model.safetensors").items()}

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * (1 + self._weights[f"{name}.weight"])

    def _attend(self, x: torch.Tensor, name: str, window: int | None) -> torch.Tensor:
        head_dim, length = self._values["head_dim"], len(x)
        group = self._values["num_attention_heads"] // self._values["num_key_value_heads"]
        query, key, value = (
            (x @ self._weights[f"{name}.{part}_proj.weight"].T).view(length, -1, head_dim).transpose(0, 1)
            for part in "qkv"
        )
        angles = torch.outer(torch.arange(length), 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)).repeat(1, 2)

        def rotate(heads: torch.Tensor) -> torch.Tensor:
            first, second = heads.chunk(2, dim=-1)
            return heads * angles.cos() + torch.cat((-second, first), dim=-1) * angles.sin()

        key, value = rotate(key).repeat_interleave(group, 0), value.repeat_interleave(group, 0)
        scores = rotate(query) @ key.transpose(1, 2) * head_dim**-0.5
        back = torch.arange(length).unsqueeze(1) - torch.arange(length)
        hidden = (back < 0) | (back >= (window or length))
        attended = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ value
        return attended.transpose(0, 1).flatten(1) @ self._weights[f"{name}.o_proj.weight"].T

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """[tokens, vocab] float32."""
        hidden = self._weights["model.embed_tokens.weight"][list(tokens)]
        for index in range(self._values["num_hidden_layers"]):
            name, window = f"model.layers.{index}", self._values["sliding_window"] if index % 2 == 0 else None
            attended = self._attend(self._norm(hidden, f"{name}.{NORMS[0]}"), f"{name}.self_attn", window)
            hidden = hidden + self._norm(attended, f"{name}.{NORMS[1]}")
            wide = self._norm(hidden, f"{name}.{NORMS[2]}") @ self._weights[f"{name}.mlp.fc_in.weight"].T
            features = functional.gelu(wide + self._weights[f"{name}.mlp.fc_in.bias"], approximate="tanh")
            hidden = hidden + self._norm(features @ self._weights[f"{name}.mlp.fc_out.weight"].T, f"{name}.{NORMS[3]}")
        normed = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-6) * self._weights["model.norm.weight"]
        return normed @ self._weights["lm_head.weight"].T

    def greedy(self, prompt: Sequence[int], count: int) -> tuple[int, ...]:
        """The likeliest tokens behind a prompt."""
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.logits(tokens)[-1].argmax()))
        return tuple(tokens[len(prompt) :])
