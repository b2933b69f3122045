"""The plan of a feed-forward layer of experts. It names tensors and sizes, and imports torch only where it builds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from parallel.sharding import column_range, expert_range
from trtrun.kernels.routing import USUAL, Routing
from trtrun.linear.stored.expert_layouts import DOWN, GATE_UP
from trtrun.linear.stored.layout import Layout, StoredLinear
from trtrun.models.decoder_plan import GatedMLPPlan
from trtrun.models.layer_plan import ModelShape
from trtrun.weights.weight import Axis, Share, StoredTensor, Weight

if TYPE_CHECKING:
    import torch

    from trtrun.kernels.arguments import Activation
    from trtrun.kernels.torch.experts import Choice, Choose, ExpertCodes, Experts
    from trtrun.layers.experts import ExpertsMLP, SharedExpert
    from trtrun.weights.weight_reader import WeightReader


def _first_rank(size: int, rank: int, ranks: int) -> range:
    """All for the first rank."""
    return range(0 if rank else size)


@dataclass(frozen=True)
class _OfHolder:
    """The cut of an expert that one rank holds whole: all for that one.

    Attributes:
        expert: which one it is.
        num_experts: of the layer.
    """

    expert: int
    num_experts: int

    def __call__(self, size: int, rank: int, ranks: int) -> range:
        return range(size if self.expert in expert_range(self.num_experts, rank, ranks) else 0)


def cut_by_experts(plan: Any, *, by_experts: bool = True) -> Any:
    """A plan, or what is a part of one, whose experts lie whole on ranks, or again in features; the same object where
    it has none."""
    if isinstance(plan, ExpertsPlan):
        return plan if plan.by_experts == by_experts else replace(plan, by_experts=by_experts)
    cut = {name: cut_by_experts(part, by_experts=by_experts) for name, part in _parts_of(plan)}
    changed = {name: part for name, part in cut.items() if part is not getattr(plan, name)}
    return replace(plan, **changed) if changed else plan


def find_experts(plan: Any) -> Iterator[ExpertsPlan]:
    """Plans of experts in a plan, or in what is a part of one."""
    if isinstance(plan, ExpertsPlan):
        yield plan
        return
    for _, part in _parts_of(plan):
        yield from find_experts(part)


def _parts_of(plan: Any) -> list[tuple[str, Any]]:
    """What a dataclass holds, by name; nothing of other objects."""
    if not is_dataclass(plan) or isinstance(plan, type):
        return []
    return [(field.name, getattr(plan, field.name)) for field in fields(plan) if field.init]


@dataclass(frozen=True)
class ExpertNames:
    """Names of a layer's tensors behind its own; in those of experts stands the number of one.

    Attributes:
        router: hidden to a logit of each expert.
        gate, up, down: of an expert.
        shared: the expert of all tokens.
        shared_gate: of that expert; None where it has none.
        choice_bias: what scores have beside for the choice; behind the router's name where it is empty.
        has_bias_row: whether that is a matrix of one row.
    """

    router: str = "gate"
    gate: str = "experts.{}.gate_proj"
    up: str = "experts.{}.up_proj"
    down: str = "experts.{}.down_proj"
    shared: str = "shared_expert"
    shared_gate: str | None = "shared_expert_gate"
    choice_bias: str = ""
    has_bias_row: bool = False


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
        num_shared_features: of an expert of all tokens; 0 without.
        has_bias: whether the router and all experts have biases, those of experts in one tensor for all.
        limit: of the activation, where it has one.
        in_one_tensor: how files have experts that lie in one tensor for all, gates and factors in turns; None where
            each is for itself.
        routing: how experts are chosen.
        share_factors: name behind the layer's of what the share of each expert is multiplied by at last, [experts];
            empty where it stays.
        by_experts: whether each rank holds some experts, whole, in place of features of all.
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
    routing: Routing = USUAL
    share_factors: str = ""
    by_experts: bool = False

    @property
    def features(self) -> Axis:
        """Features of an expert's gate, cut over ranks unless experts are."""
        return Axis(self.num_features, None if self.by_experts else column_range)

    @property
    def experts(self) -> Axis:
        """Experts of which a rank has any part."""
        return Axis(self.num_experts, expert_range if self.by_experts else None)

    @property
    def router(self) -> Weight:
        """[experts, hidden]."""
        return self._whole(self.names.router, self.num_experts)

    @property
    def router_bias(self) -> Weight | None:
        """[experts]."""
        return self._bias(self.names.router + ".bias", (Axis(self.num_experts),))

    @property
    def choice_bias(self) -> Weight | None:
        """[experts], or [1, experts]: what scores have beside for the choice. Dummy ones change nothing."""
        if not self.routing.has_bias:
            return None
        name = self.names.choice_bias or f"{self.names.router}.e_score_correction_bias"
        axes = (*([Axis(1)] if self.names.has_bias_row else []), Axis(self.num_experts))
        return Weight((StoredTensor(f"{self.name}.{name}", axes, 0.0),), "float32")

    @property
    def gate_up_bias(self) -> Weight | None:
        """[experts, 2 * features], gates and factors in turns."""
        return self._bias(f"experts.{GATE_UP}_bias", (self.experts, replace(self.features, unit=2)))

    @property
    def down_bias(self) -> Weight | None:
        """[experts, hidden]: where ranks add up what they make on the first rank, and [0, hidden] on others."""
        experts = self.experts if self.by_experts else Axis(self.num_experts, _first_rank)
        return self._bias(f"experts.{DOWN}_bias", (experts, Axis(self.shape.hidden_size)))

    def gate_up(self, expert: int) -> Weight:
        """[2 * features, hidden] of one expert: gates, then as many factors."""
        features, hidden = self._held(self.features, expert), Axis(self.shape.hidden_size)
        if self.in_one_tensor is not None:
            return self._stacked(GATE_UP, expert, (replace(features, unit=2), hidden))
        return self._of_expert((self.names.gate, self.names.up), expert, (features, hidden))

    def down(self, expert: int) -> Weight:
        """[hidden, features] of one expert."""
        axes = self._held(Axis(self.shape.hidden_size), expert), self._held(self.features, expert)
        if self.in_one_tensor is not None:
            return self._stacked(DOWN, expert, axes)
        return self._of_expert((self.names.down,), expert, axes)

    @property
    def shared(self) -> GatedMLPPlan | None:
        """The expert of all tokens."""
        if not self.num_shared_features:
            return None
        shape = replace(self.shape, intermediate_size=self.num_shared_features)
        return GatedMLPPlan(f"{self.name}.{self.names.shared}", shape, activation=self.activation)

    @property
    def shared_gate(self) -> Weight | None:
        """[1, hidden]."""
        gate = self.names.shared_gate
        return self._whole(gate, 1) if self.num_shared_features and gate is not None else None

    def weights(self) -> Sequence[Weight]:
        shared = () if self.shared is None else self.shared.weights()
        others = (
            self.router_bias,
            self.choice_bias,
            self.gate_up_bias,
            self.down_bias,
            self.shared_gate,
            self._factors,
        )
        return (self.router, *self._of_experts(), *(other for other in others if other is not None), *shared)

    @property
    def _factors(self) -> Weight | None:
        """[experts]."""
        if not self.share_factors:
            return None
        return Weight((StoredTensor(f"{self.name}.{self.share_factors}", (Axis(self.num_experts),)),))

    def token_numbers(self, share: Share) -> int:
        """Numbers of activations that a token has at once: logits and shares in float32, in copies where groups are
        ranked; and of each of its experts what goes in, both kinds of features, what comes of them, and what is added
        up; where ranks exchange it also what is sent, what is received, and both in order."""
        features, hidden = len(self.features.held(share)), self.shape.hidden_size
        shared = 0 if self.shared is None else self.shared.token_numbers(share) + 2 * hidden
        scores, copies = 8 if self.routing == USUAL else 32, 5 if self.by_experts else 2
        return scores * self.num_experts + self.num_chosen * (copies * hidden + 3 * features) + 4 * hidden + shared

    def build(self, reader: WeightReader) -> ExpertsMLP:
        from trtrun.kernels.chooser import operations_of
        from trtrun.kernels.torch.experts import ScaledChoice
        from trtrun.layers.experts import ExchangedExperts, ExpertsMLP, SummedExperts

        choose_experts = operations_of(reader.device.type).choose_experts
        choose: Choose
        bias = None if self.choice_bias is None else reader.tensor(self.choice_bias).flatten()
        num_shared = self._count_shared(reader)
        has_gate = num_shared > 0 and self.shared_gate is not None
        choose = partial(
            choose_experts,
            num_chosen=self.num_chosen,
            renormalises=self.renormalises,
            routing=replace(self.routing, num_shared=num_shared, is_gated=has_gate),
            bias=bias,
        )
        if self._factors is not None:
            choose = ScaledChoice(choose, reader.tensor(self._factors).float())
        held = self._build_experts(reader, num_shared)
        experts: Callable[[torch.Tensor, Choice], torch.Tensor] = held
        if reader.share.size > 1 and self.by_experts:
            experts = ExchangedExperts(held, self.num_experts, reader.communicator)
        elif reader.share.size > 1:
            experts = SummedExperts(held, reader.communicator)
        shared = None if num_shared else self._build_shared(reader)
        # Not on CPUs, where what is left of padding would be any number, and all tokens are looked at for overflow.
        padding = reader.padding if reader.device.type != "cpu" and not self.by_experts else None
        return ExpertsMLP(self._build_router(reader, has_gate), choose, experts, shared, padding)

    def _build_router(self, reader: WeightReader, has_gate: bool) -> Callable[[torch.Tensor], torch.Tensor]:
        """Hidden to a logit of each expert, and behind these, where it `has_gate`, to that of the shared expert."""
        if self.routing.in_float32:
            return reader.wide_product(self.router)
        if has_gate and self.shared_gate is not None:
            joined = reader.joined_product(self.router, self.shared_gate)
            assert joined is not None, "experts of all tokens among others are held as they are"
            return joined
        return reader.plain_product(self.router, self.router_bias)

    def _count_shared(self, reader: WeightReader) -> int:
        """As how many more experts the one of all tokens goes through their products, on GPUs; 0 where it is apart."""
        if self.shared is None or reader.device.type == "cpu" or self.by_experts or self._factors is not None:
            return 0
        if self.has_bias or (self.shared_gate is not None and self.routing.in_float32):
            return 0
        own, shared = (len(axis.held(reader.share)) for axis in (self.features, self.shared.features))
        weights = self.gate_up(0), self.down(0), self.shared.gate_up.weight, self.shared.down.weight
        return shared // own if shared % own == 0 and reader.are_plain(*weights) else 0

    def _build_experts(self, reader: WeightReader, num_shared: int) -> Experts:
        """The rank's, and so many behind them, which are parts of the one of all tokens."""
        import torch

        from trtrun.kernels.chooser import operations_of
        from trtrun.kernels.torch.experts import ExpertCodes, ExpertWeights

        operations, numbers = operations_of(reader.device.type), self.experts.held(reader.share)
        gate_up_bias, down_bias = self._read_biases(reader)
        if reader.device.type == "cpu":
            none, places = [None] * len(numbers), list(enumerate(numbers))
            of_gates, of_down = (none if bias is None else bias for bias in (gate_up_bias, down_bias))
            gate_up = [reader.linear(self.gate_up(expert), of_gates[place]).product for place, expert in places]
            down = [reader.linear(self.down(expert), of_down[place]).product for place, expert in places]
            activate = partial(operations.activate_and_multiply, activation=self.activation, limit=self.limit)
            return operations.host_experts(gate_up, down, activate)

        def together(weights: Iterator[Weight]) -> torch.Tensor | ExpertCodes:
            """All experts' weights, or codes."""
            tensors: dict[str, torch.Tensor] = {}
            for place, weight in enumerate(weights):
                held, (features, inputs) = reader.held(weight), weight.cut(reader.share).shape
                for name, part in reader.expert(weight).items():
                    if name not in tensors:
                        tensors[name] = part.new_empty((len(numbers) + num_shared, *part.shape))
                    tensors[name][place].copy_(part)
            return tensors.get("weight", ExpertCodes(tensors, features, inputs, held.rounds_activations))

        gates, outputs = together(map(self.gate_up, numbers)), together(map(self.down, numbers))
        if num_shared and self.shared is not None:
            assert isinstance(gates, torch.Tensor) and isinstance(outputs, torch.Tensor)
            of_gates, of_factors = reader.tensor(self.shared.gate_up.weight).chunk(2)
            for place, parts in enumerate(zip(of_gates.chunk(num_shared), of_factors.chunk(num_shared), strict=True)):
                gates[len(numbers) + place].copy_(torch.cat(parts))
            for place, part in enumerate(reader.tensor(self.shared.down.weight).chunk(num_shared, dim=1)):
                outputs[len(numbers) + place].copy_(part)
        weights = ExpertWeights(gates, outputs, gate_up_bias, down_bias)
        return operations.experts(weights, self.activation, self.limit)

    def _read_biases(self, reader: WeightReader) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """[experts, 2 * features] with gates first, and [experts, hidden] on ranks that add it."""
        import torch

        if self.gate_up_bias is None or self.down_bias is None:
            return None, None
        in_turns, down = reader.tensor(self.gate_up_bias), reader.tensor(self.down_bias)
        return torch.cat((in_turns[:, ::2], in_turns[:, 1::2]), dim=1), down if len(down) else None

    def _build_shared(self, reader: WeightReader) -> SharedExpert | None:
        from trtrun.layers.experts import SharedExpert

        if self.shared is None:
            return None
        gate = None if self.shared_gate is None else reader.plain_product(self.shared_gate)
        return SharedExpert(self.shared.build(reader), gate)

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

    def _held(self, axis: Axis, expert: int) -> Axis:
        """A dimension of an expert, of which other ranks than its holder have nothing where experts lie whole."""
        return replace(axis, cut=_OfHolder(expert, self.num_experts)) if self.by_experts else axis

    def _bias(self, name: str, axes: tuple[Axis, ...]) -> Weight | None:
        return Weight((StoredTensor(f"{self.name}.{name}", axes, 0.0),)) if self.has_bias else None

    def _whole(self, name: str, size: int) -> Weight:
        axes = (Axis(size), Axis(self.shape.hidden_size))
        return Weight((StoredTensor(f"{self.name}.{name}.weight", axes),))
