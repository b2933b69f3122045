"""The plan of a feed-forward layer of experts. It names tensors and sizes, and imports torch only where it builds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from parallel.sharding import column_range
from trtrun.models.layer_plan import GatedMLPPlan, ModelShape
from trtrun.weights.weight import Axis, Share, StoredTensor, Weight

if TYPE_CHECKING:
    from trtrun.kernels.arguments import Activation
    from trtrun.kernels.torch.experts import Experts
    from trtrun.layers.experts import ExpertsMLP, SharedExpert
    from trtrun.weights.weight_reader import WeightReader


@dataclass(frozen=True)
class ExpertNames:
    """Names of a layer's tensors behind its own; in those of experts stands the number of one.

    Attributes:
        router: hidden to a logit of each expert.
        gate, up, down: of an expert.
    """

    router: str = "gate"
    gate: str = "experts.{}.gate_proj"
    up: str = "experts.{}.up_proj"
    down: str = "experts.{}.down_proj"


@dataclass(frozen=True)
class ExpertsPlan:
    """Experts of the kind of GatedMLPPlan, of which each token goes through some.

    Attributes:
        name: in front of the layer's tensors, such as "model.layers.0.mlp".
        shape: of the model.
        num_experts: of the layer.
        num_chosen: by a token.
        num_features: of the gate of an expert.
        names: of its tensors.
        renormalises: whether the shares of a token's experts sum to 1.
        activation: what gates go through.
        num_shared_features: of an expert of all tokens, `name`.shared_expert; 0 without.
    """

    name: str
    shape: ModelShape
    num_experts: int
    num_chosen: int
    num_features: int
    names: ExpertNames = ExpertNames()
    renormalises: bool = True
    activation: Activation = "silu"
    num_shared_features: int = 0

    @property
    def features(self) -> Axis:
        """Features of an expert's gate, cut over ranks."""
        return Axis(self.num_features, column_range)

    @property
    def router(self) -> Weight:
        """[experts, hidden]."""
        return self._whole(self.names.router, self.num_experts)

    def gate_up(self, expert: int) -> Weight:
        """[2 * features, hidden] of one expert: gates, then as many factors."""
        return self._of_expert((self.names.gate, self.names.up), expert, (self.features, Axis(self.shape.hidden_size)))

    def down(self, expert: int) -> Weight:
        """[hidden, features] of one expert."""
        return self._of_expert((self.names.down,), expert, (Axis(self.shape.hidden_size), self.features))

    @property
    def shared(self) -> GatedMLPPlan | None:
        """The expert of all tokens."""
        if not self.num_shared_features:
            return None
        shape = replace(self.shape, intermediate_size=self.num_shared_features)
        return GatedMLPPlan(f"{self.name}.shared_expert", shape, activation=self.activation)

    @property
    def shared_gate(self) -> Weight:
        """[1, hidden]."""
        return self._whole("shared_expert_gate", 1)

    def weights(self) -> Sequence[Weight]:
        shared = () if self.shared is None else (*self.shared.weights(), self.shared_gate)
        return (self.router, *self._of_experts(), *shared)

    def token_numbers(self, share: Share) -> int:
        """Numbers of activations that a token has at once: logits and shares in float32, and of each of its experts
        what goes in, both kinds of features, what comes of them, and what is added up."""
        features, hidden = len(self.features.held(share)), self.shape.hidden_size
        shared = 0 if self.shared is None else self.shared.token_numbers(share) + 2 * hidden
        return 8 * self.num_experts + self.num_chosen * (2 * hidden + 3 * features) + 4 * hidden + shared

    def build(self, reader: WeightReader) -> ExpertsMLP:
        from trtrun.kernels.chooser import operations_of
        from trtrun.layers.experts import ExpertsMLP

        choose_experts = operations_of(reader.device.type).choose_experts
        choose = partial(choose_experts, num_chosen=self.num_chosen, renormalises=self.renormalises)
        experts, router = self._build_experts(reader), reader.plain_product(self.router)
        return ExpertsMLP(router, choose, experts, reader.communicator, self._build_shared(reader))

    def _build_experts(self, reader: WeightReader) -> Experts:
        import torch

        from trtrun.kernels.chooser import operations_of
        from trtrun.kernels.torch.experts import HostExperts

        operations, numbers = operations_of(reader.device.type), range(self.num_experts)
        if reader.device.type == "cpu":
            gate_up = [reader.linear(self.gate_up(expert)) for expert in numbers]
            down = [reader.linear(self.down(expert)) for expert in numbers]
            return HostExperts(gate_up, down, partial(operations.activate_and_multiply, activation=self.activation))

        def together(weights: Iterator[Weight], shape: tuple[int, ...]) -> torch.Tensor:
            held = torch.empty((self.num_experts, *shape), dtype=reader.dtype, device=reader.device)
            for place, weight in zip(held, weights, strict=True):
                place.copy_(reader.tensor(weight))
            return held

        share = reader.share
        return operations.experts(
            together(map(self.gate_up, numbers), self.gate_up(0).cut(share).shape),
            together(map(self.down, numbers), self.down(0).cut(share).shape),
            self.activation,
        )

    def _build_shared(self, reader: WeightReader) -> SharedExpert | None:
        from trtrun.layers.experts import SharedExpert

        if self.shared is None:
            return None
        return SharedExpert(self.shared.build(reader), reader.plain_product(self.shared_gate))

    def _of_experts(self) -> Iterator[Weight]:
        for expert in range(self.num_experts):
            yield self.gate_up(expert)
            yield self.down(expert)

    def _of_expert(self, names: Sequence[str], expert: int, axes: tuple[Axis, ...]) -> Weight:
        parts = (StoredTensor(f"{self.name}.{name.format(expert)}.weight", axes) for name in names)
        return Weight(tuple(parts), "expert")

    def _whole(self, name: str, size: int) -> Weight:
        axes = (Axis(size), Axis(self.shape.hidden_size))
        return Weight((StoredTensor(f"{self.name}.{name}.weight", axes),))
