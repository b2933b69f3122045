"""A model family with memory of two kinds, which is not the product's: layers in turns attend, and keep a sum of what
they have read, which decays with each token by as much as the token says. A layer with a state is written as here.
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

from parallel.sharding import column_range
from trtrun.kvcache.specs import LayerSpecs, RecurrentState
from trtrun.kvcache.store import LayerCache
from trtrun.layers.decoder_layer import MLP, RMSNorm, RowParallelLinear
from trtrun.layers.recurrence import go_through
from trtrun.linear.layer import Linear
from trtrun.models.config import ModelFamily, read_model_config
from trtrun.models.layer_plan import AttentionPlan, DecoderPlan, GatedMLPPlan, LayerPlan, ModelShape, NormPlan
from trtrun.registry import MODEL_FAMILIES
from trtrun.weights.weight import Axis, LinearPlan, Share, Weight
from trtrun.weights.weight_reader import WeightReader

ARCHITECTURE = "DecayingForCausalLM"
CONFIG: dict[str, Any] = {
    "architectures": [ARCHITECTURE],
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class DecayPlan:
    """state = decay * state + (1 - decay) * value, of which out_proj makes what is added to the stream."""

    name: str
    shape: ModelShape
    input_norm: NormPlan
    post_attention_norm: NormPlan
    mlp: GatedMLPPlan

    @property
    def features(self) -> Axis:
        return Axis(self.shape.intermediate_size, column_range)

    @property
    def brought(self) -> LinearPlan:
        """Hidden to values, then as many decays."""
        outputs = {"value_proj": self.features, "decay_proj": self.features}
        return LinearPlan(f"{self.name}.sum", outputs, Axis(self.shape.hidden_size))

    @property
    def output(self) -> LinearPlan:
        return LinearPlan(f"{self.name}.sum", {"out_proj": Axis(self.shape.hidden_size)}, self.features)

    def weights(self) -> Sequence[Weight]:
        norms = self.input_norm.weight, self.post_attention_norm.weight
        return (*norms, *self.brought.weights, *self.output.weights, *self.mlp.weights())

    def token_bytes(self, share: Share, item_bytes: int) -> int:
        hidden, features = self.shape.hidden_size, len(self.features.held(share))
        return (8 * hidden + 2 * features + self.mlp.token_numbers(share)) * item_bytes + 8 * features * 4 + 12 * hidden

    def keeps(self, share: Share) -> LayerSpecs:
        features = len(self.features.held(share))
        return (RecurrentState(((features,),), ((features,), (features,))),)

    def build(self, reader: WeightReader) -> DecayingLayer:
        return DecayingLayer(
            self.input_norm.build(reader),
            reader.linear(self.brought.weight, self.brought.bias),
            reader.row_parallel(self.output.weight, self.output.bias),
            self.post_attention_norm.build(reader),
            self.mlp.build(reader),
        )


@dataclass
class DecayingLayer:
    input_norm: RMSNorm
    brought: Linear
    output: RowParallelLinear
    post_attention_norm: RMSNorm
    mlp: MLP

    def attend(
        self,
        hidden: torch.Tensor,
        delta: torch.Tensor | None,
        angles: tuple[torch.Tensor, torch.Tensor],
        cache: LayerCache,
    ) -> torch.Tensor:
        normed = self.input_norm(hidden) if delta is None else self.input_norm.add(hidden, delta)
        value, decay = self.brought(normed).float().chunk(2, dim=1)
        return go_through(_decay, (value, decay.sigmoid()), cache, value.shape[1]).to(hidden.dtype)

    def feed_forward(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.post_attention_norm.add(hidden, self.output(attended)))


def _decay(
    state: Sequence[torch.Tensor], brought: Sequence[torch.Tensor]
) -> tuple[Sequence[torch.Tensor], torch.Tensor]:
    (total,), (value, decay) = state, brought
    total = total * decay + value * (1 - decay)
    return (total,), total


def plan_layers(shape: ModelShape, values: Mapping[str, Any]) -> Sequence[LayerPlan]:
    layers: list[LayerPlan] = []
    for index in range(shape.num_layers):
        name = f"model.layers.{index}"
        ordinary = DecoderPlan.of_layer(
            index, AttentionPlan(f"{name}.self_attn", shape), GatedMLPPlan(f"{name}.mlp", shape)
        )
        norms = ordinary.ordinary.input_norm, ordinary.ordinary.post_attention_norm
        layers.append(DecayPlan(name, shape, *norms, ordinary.ordinary.mlp) if index % 2 == 0 else ordinary)
    return layers


FAMILY = ModelFamily({"rms_norm_eps": 1e-6}, plan_layers)


@contextmanager
def decaying_family() -> Iterator[None]:
    """The family of this file is there, as those of the product are."""
    MODEL_FAMILIES.register(ARCHITECTURE)(FAMILY)
    try:
        yield
    finally:
        del MODEL_FAMILIES._items[ARCHITECTURE]


def make_decaying_checkpoint(path: Path, seed: int = 1, dtype: torch.dtype = torch.float32, **overrides: Any) -> Path:
    """Write config.json and random weights of the family to `path`; returns `path`."""
    path.mkdir(parents=True)
    values = {**CONFIG, "dtype": str(dtype).removeprefix("torch."), **overrides}
    (path / "config.json").write_text(json.dumps(values), encoding="utf-8")
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for part in (part for weight in read_model_config(path).weights for part in weight.parts):
        made = torch.randn(part.shape, generator=generator)
        if "embed_tokens" not in part.name:
            made = 1 + 0.2 * made if len(part.shape) == 1 else 2.5 * part.shape[1] ** -0.5 * made
        weights[part.name] = made.to(dtype)
    save_weights(path, weights)
    return path


class DecayingReference:
    """The same model in plain torch, a text at a time."""

    def __init__(self, path: Path) -> None:
        self._values = json.loads((path / "config.json").read_text(encoding="utf-8"))
        self._weights = {name: value.float() for name, value in load_file(path / "model.safetensors").items()}

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self._weights[f"{name}.weight"]

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ self._weights[f"{name}.weight"].T

    def _sum(self, x: torch.Tensor, name: str) -> torch.Tensor:
        values, decays = self._linear(x, f"{name}.value_proj"), self._linear(x, f"{name}.decay_proj").sigmoid()
        state, found = torch.zeros(values.shape[1]), []
        for value, decay in zip(values, decays, strict=True):
            state = state * decay + value * (1 - decay)
            found.append(state)
        return self._linear(torch.stack(found), f"{name}.out_proj")

    def _attend(self, x: torch.Tensor, name: str) -> torch.Tensor:
        size, length = self._values["head_dim"], len(x)
        group = self._values["num_attention_heads"] // self._values["num_key_value_heads"]
        query, key, value = (
            self._linear(x, f"{name}.{part}_proj").view(length, -1, size).transpose(0, 1) for part in "qkv"
        )
        angles = torch.outer(torch.arange(length), 10000.0 ** (-torch.arange(0, size, 2) / size)).repeat(1, 2)

        def rotate(heads: torch.Tensor) -> torch.Tensor:
            first, second = heads.chunk(2, dim=-1)
            return heads * angles.cos() + torch.cat((-second, first), dim=-1) * angles.sin()

        key, value = rotate(key).repeat_interleave(group, 0), value.repeat_interleave(group, 0)
        scores = rotate(query) @ key.transpose(1, 2) * size**-0.5
        hidden = torch.ones(length, length).triu(1).bool()
        attended = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ value
        return self._linear(attended.transpose(0, 1).flatten(1), f"{name}.o_proj")

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """[tokens, vocab] float32."""
        hidden = self._weights["model.embed_tokens.weight"][list(tokens)]
        for index in range(self._values["num_hidden_layers"]):
            name = f"model.layers.{index}"
            normed = self._norm(hidden, f"{name}.input_layernorm")
            reads = self._attend(normed, f"{name}.self_attn") if index % 2 else self._sum(normed, f"{name}.sum")
            hidden = hidden + reads
            normed = self._norm(hidden, f"{name}.post_attention_layernorm")
            gate = torch.nn.functional.silu(self._linear(normed, f"{name}.mlp.gate_proj"))
            hidden = hidden + self._linear(gate * self._linear(normed, f"{name}.mlp.up_proj"), f"{name}.mlp.down_proj")
        return self._linear(self._norm(hidden, "model.norm"), "lm_head")

    def greedy(self, prompt: Sequence[int], count: int) -> tuple[int, ...]:
        """The likeliest tokens behind a prompt."""
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.logits(tokens)[-1].argmax()))
        return tuple(tokens[len(prompt) :])
