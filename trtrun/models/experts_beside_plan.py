"""The plan of a feed-forward layer beside experts, as Gemma 4 has it. It names tensors and sizes, and imports torch
only where it builds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trtrun.models.decoder_plan import GatedMLPPlan
from trtrun.models.experts_plan import ExpertsPlan
from trtrun.models.layer_plan import ModelShape, NormPlan
from trtrun.weights.weight import Axis, Share, StoredTensor, Weight

if TYPE_CHECKING:
    from trtrun.layers.decoder_layer import RMSNorm
    from trtrun.layers.experts import ExpertsBesideMLP
    from trtrun.weights.weight_reader import WeightReader


@dataclass(frozen=True)
class ExpertsBesidePlan:
    """Both read the residual stream through norms, and their results are added behind others.

    Attributes:
        layer: in front of the names of the norms, such as "model.layers.0".
        mlp: of all tokens.
        experts: of which each token chooses some.
    """

    layer: str
    mlp: GatedMLPPlan
    experts: ExpertsPlan

    @property
    def name(self) -> str:
        """In front of the tensors of the part of all tokens."""
        return self.mlp.name

    @property
    def shape(self) -> ModelShape:
        """Sizes of the model."""
        return self.mlp.shape

    @property
    def norms(self) -> tuple[NormPlan, ...]:
        """In front of both and behind them."""
        names = (
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm_1",
            "pre_feedforward_layernorm_2",
            "post_feedforward_layernorm_2",
        )
        size, eps = self.shape.hidden_size, self.shape.rms_norm_eps
        return tuple(NormPlan(f"{self.layer}.{name}", size, eps, in_float32=True) for name in names)

    @property
    def router_scale(self) -> Weight:
        """[hidden]: what the router reads is multiplied by it, and divided by the root of its size."""
        return Weight((StoredTensor(f"{self.layer}.router.scale", (Axis(self.shape.hidden_size),)),))

    def weights(self) -> Sequence[Weight]:
        norms = (norm.weight for norm in self.norms)
        return (*self.mlp.weights(), *self.experts.weights(), *norms, self.router_scale)

    def token_numbers(self, share: Share) -> int:
        """Numbers of activations that a token has at once: those of both, and what norms make."""
        return self.mlp.token_numbers(share) + self.experts.token_numbers(share) + 9 * self.shape.hidden_size

    def build(self, reader: WeightReader) -> ExpertsBesideMLP:
        from trtrun.layers.experts import ExpertsBesideMLP

        mlp, experts = self.mlp.build(reader), self.experts.build(reader)
        return ExpertsBesideMLP(mlp, experts, self._build_norm(reader), *(norm.build(reader) for norm in self.norms))

    def _build_norm(self, reader: WeightReader) -> RMSNorm:
        from trtrun.layers.decoder_layer import RMSNorm

        weight = reader.tensor(self.router_scale).float() * self.shape.hidden_size**-0.5
        return RMSNorm(weight, self.shape.rms_norm_eps)
