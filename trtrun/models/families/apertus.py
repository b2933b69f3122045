"""Apertus: Llama's layers under other names, with norms of queries and keys per head, and a feed-forward layer without
a gate, whose activation xIELU (arXiv:2411.13010) has numbers of its own in each layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from parallel.sharding import column_range
from trtrun.models.attention_plan import AttentionPlan
from trtrun.models.config import ModelFamily, read_flag
from trtrun.models.decoder_plan import DecoderPlan
from trtrun.models.layer_plan import LayerPlan, ModelShape, NormPlan
from trtrun.registry import MODEL_FAMILIES
from trtrun.weights.weight import Axis, LinearPlan, Share, StoredTensor, Weight

if TYPE_CHECKING:
    from trtrun.layers.xielu_mlp import XieluMLP
    from trtrun.weights.weight_reader import WeightReader

_BETA, _EPSILON = 0.5, -1e-6
"""Of xIELU, where the files do not have them."""
_POSITIVE, _NEGATIVE = 0.2, -1.05
"""Of dummy weights, about what training begins with."""


@dataclass(frozen=True)
class XieluMLPPlan:
    """The feed-forward layer down(xielu(up(x))): up_proj and down_proj, and act_fn with the numbers of xIELU.

    Attributes:
        name: in front of its tensors, such as "model.layers.0.mlp".
        shape: of the model.
    """

    name: str
    shape: ModelShape

    @property
    def features(self) -> Axis:
        """Between the two."""
        return Axis(self.shape.intermediate_size, column_range)

    @property
    def up(self) -> LinearPlan:
        """Hidden to features."""
        return LinearPlan(self.name, {"up_proj": self.features}, Axis(self.shape.hidden_size))

    @property
    def down(self) -> LinearPlan:
        """Features back to hidden."""
        return LinearPlan(self.name, {"down_proj": Axis(self.shape.hidden_size)}, self.features)

    @property
    def numbers(self) -> Weight:
        """[4]: alpha_p and alpha_n, as they were trained, beta and eps."""

        def number(name: str, dummy: float, is_optional: bool) -> StoredTensor:
            return StoredTensor(f"{self.name}.act_fn.{name}", (Axis(1),), dummy, is_optional)

        trained = number("alpha_p", _POSITIVE, False), number("alpha_n", _NEGATIVE, False)
        return Weight((*trained, number("beta", _BETA, True), number("eps", _EPSILON, True)))

    def weights(self) -> Sequence[Weight]:
        return (*self.up.weights, *self.down.weights, self.numbers)

    def token_numbers(self, share: Share) -> int:
        """Numbers of activations that a token has at once: features, before and behind the activation."""
        return 2 * len(self.features.held(share))

    def build(self, reader: WeightReader) -> XieluMLP:
        import torch
        from torch.nn import functional

        from trtrun.layers.xielu_mlp import XieluMLP

        positive, negative, beta, epsilon = reader.tensor(self.numbers).float().unbind()
        factors = functional.softplus(positive), beta + functional.softplus(negative)
        numbers = torch.stack((*factors, beta, epsilon))
        return XieluMLP(reader.linear(self.up.weight), reader.row_parallel(self.down.weight), numbers)


def _plan_layers(shape: ModelShape, values: Mapping[str, Any]) -> Sequence[LayerPlan]:
    has_bias = read_flag(values, "attention_bias")

    def norm(index: int, name: str) -> NormPlan:
        return NormPlan(f"model.layers.{index}.{name}", shape.hidden_size, shape.rms_norm_eps)

    return [
        DecoderPlan(
            norm(index, "attention_layernorm"),
            AttentionPlan(f"model.layers.{index}.self_attn", shape, None, has_bias, has_bias, head_norm=True),
            norm(index, "feedforward_layernorm"),
            XieluMLPPlan(f"model.layers.{index}.mlp", shape),
        )
        for index in range(shape.num_layers)
    ]


APERTUS = MODEL_FAMILIES.register("ApertusForCausalLM")(
    ModelFamily(
        defaults={
            "max_position_embeddings": 65536,
            "rms_norm_eps": 1e-5,
            "eos_token_id": 2,
            "rope_theta": 12_000_000.0,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 12_000_000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 8192,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            },
        },
        plan_layers=_plan_layers,
        activations=("xielu",),
        model_type="apertus",
    )
)
