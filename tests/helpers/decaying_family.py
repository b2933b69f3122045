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
from custom_family import PlainReference

from parallel.sharding import column_range
from trtrun.kernels.torch.recurrence import go_through
from trtrun.kvcache.specs import RecurrentState
from trtrun.kvcache.store import LayerCache
from trtrun.layers.decoder_layer import RowParallelLinear
from trtrun.linear.layer import Linear
from trtrun.models.attention_plan import AttentionPlan
from trtrun.models.config import ModelFamily, read_model_config
from trtrun.models.decoder_plan import DecoderPlan, GatedMLPPlan
from trtrun.models.layer_plan import LayerPlan, MixerPlan, ModelShape
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

    @property
    def features(self) -> Axis:
        return Axis(self.shape.intermediate_size, column_range)

    @property
    def brought(self) -> LinearPlan:
        """Hidden to values, then as many decays."""
        return LinearPlan(
            self.name, {"value_proj": self.features, "decay_proj": self.features}, Axis(self.shape.hidden_size)
        )

    @property
    def output(self) -> LinearPlan:
        return LinearPlan(self.name, {"out_proj": Axis(self.shape.hidden_size)}, self.features)

    def weights(self) -> Sequence[Weight]:
        return (*self.brought.weights, *self.output.weights)

    def token_numbers(self, share: Share) -> int:
        """Two as they are made, and eight in float32, each of which is as long as two."""
        return 2 * self.shape.hidden_size + 18 * len(self.features.held(share))

    def keeps(self, share: Share) -> RecurrentState:
        features = len(self.features.held(share))
        return RecurrentState(((features,),), ((features,), (features,)))

    def build(self, reader: WeightReader) -> Decay:
        brought = reader.linear(self.brought.weight, self.brought.bias)
        return Decay(brought, reader.row_parallel(self.output.weight, self.output.bias))


@dataclass
class Decay:
    brought: Linear
    output: RowParallelLinear

    takes_rounded_rows = None

    def __call__(self, x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor], cache: LayerCache) -> torch.Tensor:
        value, decay = self.brought(x).float().chunk(2, dim=1)
        assert cache.states is not None and cache.segment_states is not None
        brought = value, decay.sigmoid()
        return go_through(_decay, brought, cache.states, cache.segment_states, value.shape[1]).to(x.dtype)


def _decay(
    state: Sequence[torch.Tensor], brought: Sequence[torch.Tensor]
) -> tuple[Sequence[torch.Tensor], torch.Tensor]:
    (total,), (value, decay) = state, brought
    total = total * decay + value * (1 - decay)
    return (total,), total


def plan_layers(shape: ModelShape, values: Mapping[str, Any]) -> Sequence[LayerPlan]:
    def plan_mixer(index: int) -> MixerPlan:
        name = f"model.layers.{index}"
        return AttentionPlan(f"{name}.self_attn", shape) if index % 2 else DecayPlan(f"{name}.sum", shape)

    return [
        DecoderPlan.of_layer(index, plan_mixer(index), GatedMLPPlan(f"model.layers.{index}.mlp", shape))
        for index in range(shape.num_layers)
    ]


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


class DecayingReference(PlainReference):
    """The same model in plain torch, a text at a time."""

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

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """[tokens, vocab] float32."""
        hidden = self._weights["model.embed_tokens.weight"][list(tokens)]
        for index in range(self._values["num_hidden_layers"]):
            name = f"model.layers.{index}"
            normed = self._norm(hidden, f"{name}.input_layernorm")
            reads = self._attend(normed, f"{name}.self_attn", None) if index % 2 else self._sum(normed, f"{name}.sum")
            hidden = hidden + reads
            normed = self._norm(hidden, f"{name}.post_attention_layernorm")
            gate = torch.nn.functional.silu(self._linear(normed, f"{name}.mlp.gate_proj"))
            hidden = hidden + self._linear(gate * self._linear(normed, f"{name}.mlp.up_proj"), f"{name}.mlp.down_proj")
        return self._linear(self._norm(hidden, "model.norm"), "lm_head")
