"""The plan of a gated delta net, which Qwen3-Next and Qwen3.5 have in three of four layers in place of attention. It
names tensors and sizes, and imports torch only where it builds.

Ranks share out value heads. A key head, with its queries, is on each rank that has a value head of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from parallel.sharding import kv_heads_for_rank, query_heads_for_rank
from trtrun.kernels.triton.attention.attention_tiles import LARGEST_TILE
from trtrun.kvcache.specs import RecurrentState
from trtrun.kvcache.tile_widths import prompt_width
from trtrun.models.layer_plan import ModelShape, NormPlan
from trtrun.weights.weight import Axis, LinearPlan, Rows, Share, StoredTensor, Weight

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trtrun.layers.delta_net import DeltaNet
    from trtrun.weights.weight_reader import WeightReader

_FLOAT_NUMBERS = 2
"""Numbers of activations that one of float32 may take the place of."""


@dataclass(frozen=True)
class DeltaNetPlan:
    """A gated delta net.

    Attributes:
        name: in front of its tensors, such as "model.layers.0.linear_attn".
        shape: of the model.
        key_heads, value_heads: a whole number of value heads goes with each key head.
        key_dim, value_dim: numbers of a key or query, and of a value.
        kernel: tokens that the convolution sees, the newest included.
        is_packed: whether files have what is of one key head together, in in_proj_qkvz and in_proj_ba; else there are
            in_proj_qkv, in_proj_z, in_proj_b and in_proj_a.
    """

    name: str
    shape: ModelShape
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    is_packed: bool

    @property
    def keys(self) -> Axis:
        """Features of all key heads; there are as many of queries."""
        return Axis(self.key_heads, kv_heads_for_rank, self.key_dim)

    @property
    def values(self) -> Axis:
        """Features of all value heads; there are as many of their gates."""
        return Axis(self.value_heads, query_heads_for_rank, self.value_dim)

    @property
    def rates(self) -> Axis:
        """A number of each value head."""
        return Axis(self.value_heads, query_heads_for_rank)

    @property
    def states(self) -> LinearPlan:
        """Hidden to queries, keys, values and gates, in this order."""
        parts = {"queries": self.keys, "keys": self.keys, "values": self.values}
        if self.is_packed:
            outputs = {**parts, "gates": self.values}
            return self._inputs(outputs, _packed("in_proj_qkvz", outputs, self.key_heads))
        inside = {name: ("in_proj_qkv", rows) for name, rows in _behind_each_other(parts).items()}
        return self._inputs({**parts, "in_proj_z": self.values}, inside)

    @property
    def corrections(self) -> LinearPlan:
        """Hidden to what says how much heads correct, then to what says how they fade."""
        if self.is_packed:
            outputs = {"b": self.rates, "a": self.rates}
            return self._inputs(outputs, _packed("in_proj_ba", outputs, self.key_heads))
        return self._inputs({"in_proj_b": self.rates, "in_proj_a": self.rates}, {})

    def _inputs(self, outputs: Mapping[str, Axis], inside: Mapping[str, tuple[str, Rows]]) -> LinearPlan:
        return LinearPlan(self.name, outputs, Axis(self.shape.hidden_size), inside=inside)

    @property
    def convolution(self) -> Weight:
        """[channels, 1, kernel]: of queries, keys and values. Dummy ones let tokens through at about their size."""
        parts = {"queries": self.keys, "keys": self.keys, "values": self.values}
        name, others = f"{self.name}.conv1d.weight", (Axis(1), Axis(self.kernel))
        places = _behind_each_other(parts)
        return Weight(tuple(StoredTensor(name, (parts[part], *others), 25.0, rows=places[part]) for part in parts))

    @property
    def fading(self) -> Weight:
        """[value heads]: the logarithm of how fast each fades."""
        return Weight((StoredTensor(f"{self.name}.A_log", (self.rates,), 0.0),))

    @property
    def fading_bias(self) -> Weight:
        """[value heads]."""
        return Weight((StoredTensor(f"{self.name}.dt_bias", (self.rates,)),))

    @property
    def norm(self) -> NormPlan:
        """The norm of what a value head reads."""
        return NormPlan(f"{self.name}.norm", self.value_dim, self.shape.rms_norm_eps)

    @property
    def output(self) -> LinearPlan:
        """Value heads back to hidden."""
        return LinearPlan(self.name, {"out_proj": Axis(self.shape.hidden_size)}, self.values)

    def weights(self) -> Sequence[Weight]:
        linear = *self.states.weights, *self.corrections.weights, *self.output.weights
        return (*linear, self.convolution, self.fading, self.fading_bias, self.norm.weight)

    def keeps(self, share: Share) -> RecurrentState:
        """What the convolution sees of tokens before, and a matrix of each value head."""
        channels, heads = self._channels(share), len(self.rates.units(share))
        parts = (self.kernel - 1, channels), (heads, self.key_dim, self.value_dim)
        return RecurrentState(parts, ((channels,), (heads,), (heads,)), num_narrow=1)

    def token_numbers(self, share: Share) -> int:
        """Numbers of activations that a token has at once: what it brings, as it is made, and in float32 before the
        convolution, beside others, and behind it; and what heads read, in float32, normalised, beside its gates, and
        gated."""
        channels, values, heads = self._channels(share), len(self.values.held(share)), len(self.rates.units(share))
        return channels + values + _FLOAT_NUMBERS * (3 * channels + 12 * heads + 7 * values)

    def _channels(self, share: Share) -> int:
        return 2 * len(self.keys.held(share)) + len(self.values.held(share))

    def build(self, reader: WeightReader) -> DeltaNet:
        import torch

        from trtrun.kernels.torch.delta_net import DeltaNetWeights
        from trtrun.layers.delta_net import DeltaNet

        shape, keys, values = self.shape, self.keys.units(reader.share), self.values.units(reader.share)
        tile = prompt_width(LARGEST_TILE, *(len(axis.units(reader.share)) for axis in (shape.queries, shape.keys)))
        assert tile is not None
        of_key = self.value_heads // self.key_heads
        weights = DeltaNetWeights(
            len(keys),
            len(values),
            self.key_dim,
            self.value_dim,
            key_of_value=torch.tensor([head // of_key - keys.start for head in values], device=reader.device),
            convolution=reader.tensor(self.convolution).float()[:, 0].T.contiguous(),
            fading=reader.tensor(self.fading).float().exp(),
            fading_bias=reader.tensor(self.fading_bias).float(),
            norm=self.norm.read(reader),
            epsilon=self.norm.eps,
            tile=tile,
        )
        states, rates = self.states.weight, self.corrections.weight
        product = reader.joined_product(states, rates)
        inputs = [reader.linear(states), reader.linear(rates)] if product is None else [product]
        return DeltaNet(weights, inputs, reader.row_parallel(self.output.weight))


def _sizes(parts: Mapping[str, Axis]) -> dict[str, int]:
    return {name: axis.size * axis.unit for name, axis in parts.items()}


def _behind_each_other(parts: Mapping[str, Axis]) -> dict[str, Rows]:
    """Where parts lie in a tensor that has one behind the other."""
    found, first, sizes = {}, 0, _sizes(parts)
    for name, size in sizes.items():
        found[name] = Rows(first, sum(sizes.values()))
        first += size
    return found


def _packed(tensor: str, parts: Mapping[str, Axis], key_heads: int) -> dict[str, tuple[str, Rows]]:
    """Where parts lie in a tensor that has those of the first key head, then those of the next one."""
    found, first, whole = {}, 0, sum(_sizes(parts).values())
    for name, size in _sizes(parts).items():
        found[name] = (tensor, Rows(first, whole, parts[name].size // key_heads, whole // key_heads))
        first += size // key_heads
    return found
