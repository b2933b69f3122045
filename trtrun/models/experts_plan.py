"""The plan of a feed-forward layer of experts. It names tensors and sizes, and imports torch only where it builds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from parallel.sharding import column_range
from trtrun.linear.stored.expert_layouts import DOWN, GATE_UP
from trtrun.linear.stored.layout import Layout, StoredLinear
from trtrun.models.decoder_plan import GatedMLPPlan
from trtrun.models.layer_plan import ModelShape
from trtrun.weights.weight import Axis, Share, StoredTensor, Weight

if TYPE_CHECKING:
    import torch

    from trtrun.kernels.arguments import Activation
    from trtrun.kernels.torch.experts import ExpertCodes, Experts
    from trtrun.layers.experts import ExpertsMLP, SharedExpert
    from trtrun.weights.weight_reader import WeightReader


def _first_rank(size: int, rank: int, ranks: int) -> range:
    """All for the first rank."""
    return range(0 if rank else size)


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
        has_bias: whether the router and all experts have biases, those of experts in one tensor for all.
        limit: of the activation, where it has one.
        in_one_tensor: how files have experts that lie in one tensor for all, gates and factors in turns; None where
            each is for itself.
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
    has_bias: bool = False
    limit: float = math.inf
    in_one_tensor: Layout | None = None

    @property
    def features(self) -> Axis:
        """Features of an expert's gate, cut over ranks."""
        return Axis(self.num_features, column_range)

    @property
    def router(self) -> Weight:
        """[experts, hidden]."""
        return self._whole(self.names.router, self.num_experts)

    @property
    def router_bias(self) -> Weight | None:
        """[experts]."""
        return self._bias(self.names.router + ".bias", (Axis(self.num_experts),))

    @property
    def gate_up_bias(self) -> Weight | None:
        """[experts, 2 * features], gates and factors in turns."""
        return self._bias(f"experts.{GATE_UP}_bias", (Axis(self.num_experts), self._in_turns))

    @property
    def down_bias(self) -> Weight | None:
        """[experts, hidden]: on the first rank, as ranks add up what they make; [0, hidden] on others."""
        return self._bias(f"experts.{DOWN}_bias", (Axis(self.num_experts, _first_rank), Axis(self.shape.hidden_size)))

    def gate_up(self, expert: int) -> Weight:
        """[2 * features, hidden] of one expert: gates, then as many factors."""
        if self.in_one_tensor is not None:
            return self._stacked(GATE_UP, expert, (self._in_turns, Axis(self.shape.hidden_size)))
        return self._of_expert((self.names.gate, self.names.up), expert, (self.features, Axis(self.shape.hidden_size)))

    def down(self, expert: int) -> Weight:
        """[hidden, features] of one expert."""
        if self.in_one_tensor is not None:
            return self._stacked(DOWN, expert, (Axis(self.shape.hidden_size), self.features))
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
        biases = (self.router_bias, self.gate_up_bias, self.down_bias)
        return (self.router, *self._of_experts(), *(bias for bias in biases if bias is not None), *shared)

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
        experts, router = self._build_experts(reader), reader.plain_product(self.router, self.router_bias)
        return ExpertsMLP(router, choose, experts, reader.communicator, self._build_shared(reader))

    def _build_experts(self, reader: WeightReader) -> Experts:

        from trtrun.kernels.chooser import operations_of
        from trtrun.kernels.torch.experts import ExpertCodes, ExpertWeights, HostExperts

        operations, numbers = operations_of(reader.device.type), range(self.num_experts)
        gate_up_bias, down_bias = self._read_biases(reader)
        if reader.device.type == "cpu":
            none = [None] * self.num_experts
            of_gates, of_down = (none if bias is None else bias for bias in (gate_up_bias, down_bias))
            gate_up = [reader.linear(self.gate_up(expert), of_gates[expert]) for expert in numbers]
            down = [reader.linear(self.down(expert), of_down[expert]) for expert in numbers]
            activate = partial(operations.activate_and_multiply, activation=self.activation, limit=self.limit)
            return HostExperts(gate_up, down, activate)

        def together(weights: Iterator[Weight]) -> torch.Tensor | ExpertCodes:
            """All experts' weights, or codes."""
            tensors: dict[str, torch.Tensor] = {}
            for expert, weight in enumerate(weights):
                held, (features, inputs) = reader.held(weight), weight.cut(reader.share).shape
                for name, part in reader.expert(weight).items():
                    if name not in tensors:
                        tensors[name] = part.new_empty((self.num_experts, *part.shape))
                    tensors[name][expert].copy_(part)
            return tensors.get("weight", ExpertCodes(tensors, features, inputs, held.rounds_activations))

        gates, outputs = together(map(self.gate_up, numbers)), together(map(self.down, numbers))
        weights = ExpertWeights(gates, outputs, gate_up_bias, down_bias)
        return operations.experts(weights, self.activation, self.limit)

    def _read_biases(self, reader: WeightReader) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """[experts, 2 * features] with gates first, and [experts, hidden] on the rank that adds it."""
        import torch

        if self.gate_up_bias is None or self.down_bias is None:
            return None, None
        in_turns, down = reader.tensor(self.gate_up_bias), reader.tensor(self.down_bias)
        return torch.cat((in_turns[:, ::2], in_turns[:, 1::2]), dim=1), down if len(down) else None

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

    def _stacked(self, matrix: str, expert: int, axes: tuple[Axis, ...]) -> Weight:
        assert self.in_one_tensor is not None
        name = f"{self.name}.experts.{expert}.{matrix}.weight"
        return Weight((StoredTensor(name, axes),), "expert", StoredLinear(self.in_one_tensor))

    @property
    def _in_turns(self) -> Axis:
        """Gates, each with its factor behind it."""
        return replace(self.features, unit=2)

    def _bias(self, name: str, axes: tuple[Axis, ...]) -> Weight | None:
        return Weight((StoredTensor(f"{self.name}.{name}", axes, 0.0),)) if self.has_bias else None

    def _whole(self, name: str, size: int) -> Weight:
        axes = (Axis(size), Axis(self.shape.hidden_size))
        return Weight((StoredTensor(f"{self.name}.{name}.weight", axes),))
