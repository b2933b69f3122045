"""The plan of latent attention, as DeepSeek-V2 and those after it have it.

It names tensors and sizes, and imports torch only where it builds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from parallel.sharding import query_heads_for_rank
from trtrun.kvcache.specs import PagedLatent
from trtrun.models.layer_plan import ModelShape, NormPlan
from trtrun.weights.weight import Axis, LinearPlan, Share, StoredTensor, Weight

if TYPE_CHECKING:
    from trtrun.layers.latent_attention import LatentAttention
    from trtrun.weights.weight_reader import WeightReader

_EPSILON = 1e-6
"""Epsilon of norms of latents, whatever config.json says of others."""


@dataclass(frozen=True)
class LatentAttentionPlan:
    """Attention over latents, which all heads share and every rank has; heads are shared out.

    Attributes:
        name: in front of its tensors, such as "model.layers.0.self_attn".
        shape: of the model; its `head_dim` is the rotated part of queries and keys.
        rank: numbers of a latent.
        plain_dim: numbers of a head's query that are not rotated, in front of those that are.
        value_dim: numbers of a head's value.
        scale: factor of the scores.
        query_rank: numbers of what queries are made of (q_a_proj, q_a_layernorm, q_b_proj); None where they come at
            once (q_proj).
        has_bias: whether q_a_proj, kv_a_proj_with_mqa and o_proj have biases; only with a `query_rank`.
        interleaved: whether neighbouring numbers are rotated together, and not those half a head apart.
    """

    name: str
    shape: ModelShape
    rank: int
    plain_dim: int
    value_dim: int
    scale: float
    query_rank: int | None = None
    has_bias: bool = False
    interleaved: bool = True

    @property
    def heads(self) -> Axis:
        """Features of all queries."""
        return self._of_heads(self.plain_dim + self.shape.head_dim)

    @property
    def values(self) -> Axis:
        """Features of all values."""
        return self._of_heads(self.value_dim)

    def _of_heads(self, unit: int) -> Axis:
        return Axis(self.shape.num_heads, query_heads_for_rank, unit)

    @property
    def width(self) -> int:
        """Numbers that are kept of a token."""
        return self.rank + self.shape.head_dim

    @property
    def inputs(self) -> LinearPlan:
        """Hidden to queries, or to what they are made of, then to a latent and the part of its key that is rotated."""
        first = {"q_proj": self.heads} if self.query_rank is None else {"q_a_proj": Axis(self.query_rank)}
        outputs = {**first, "kv_a_proj_with_mqa": Axis(self.width)}
        return LinearPlan(self.name, outputs, Axis(self.shape.hidden_size), self.has_bias, dummy_scales={"q_proj": 2.0})

    @property
    def queries(self) -> LinearPlan | None:
        """What queries are made of to queries."""
        if self.query_rank is None:
            return None
        return LinearPlan(self.name, {"q_b_proj": self.heads}, Axis(self.query_rank), dummy_scales={"q_b_proj": 2.0})

    @property
    def norms(self) -> tuple[NormPlan, ...]:
        """That of latents, and that of what queries are made of."""
        latents = NormPlan(f"{self.name}.kv_a_layernorm", self.rank, _EPSILON)
        if self.query_rank is None:
            return (latents,)
        return latents, NormPlan(f"{self.name}.q_a_layernorm", self.query_rank, _EPSILON)

    @property
    def of_latents(self) -> Weight:
        """Latents to each head's key and, behind it, its value: [heads * (plain + value), rank]. Dummy ones tell tokens
        apart."""
        axes = self._of_heads(self.plain_dim + self.value_dim), Axis(self.rank)
        return Weight((StoredTensor(f"{self.name}.kv_b_proj.weight", axes, 2.0),), "dense")

    @property
    def output(self) -> LinearPlan:
        """Heads back to hidden."""
        return LinearPlan(self.name, {"o_proj": Axis(self.shape.hidden_size)}, self.values, self.has_bias)

    def weights(self) -> Sequence[Weight]:
        queries = () if self.queries is None else self.queries.weights
        norms = (norm.weight for norm in self.norms)
        return (*self.inputs.weights, *queries, self.of_latents, *self.output.weights, *norms)

    def keeps(self, share: Share) -> PagedLatent:
        """The whole latent, on every rank."""
        return PagedLatent(self.width)

    def token_numbers(self, share: Share) -> int:
        """Numbers of activations that a token has at once: what is made of hidden, as it is made and in parts;
        queries, beside latents and as they attend; what is attended; and values."""
        heads, queries = len(self.heads.units(share)), len(self.heads.held(share))
        made = 2 * (self.query_rank or queries) + 3 * self.width
        return made + 2 * queries + 5 * heads * self.width + 2 * len(self.values.held(share))

    def build(self, reader: WeightReader) -> LatentAttention:
        from trtrun.layers.latent_attention import LatentAttention, LatentSizes

        latent_norm, *query_norm = (norm.build(reader) for norm in self.norms)
        inputs = reader.linear(self.inputs.weight, self.inputs.bias)
        queries = None if self.queries is None else reader.linear(self.queries.weight)
        both = reader.dense(self.of_latents).view(-1, self.plain_dim + self.value_dim, self.rank)
        keys, values = both[:, : self.plain_dim], both[:, self.plain_dim :]
        into_latents, into_values = reader.head_products(keys.transpose(1, 2)), reader.head_products(values)
        return LatentAttention(
            LatentSizes(self.plain_dim, self.shape.head_dim, self.rank, self.scale, self.interleaved),
            inputs=inputs,
            query_norm=query_norm[0] if query_norm else None,
            queries=queries,
            latent_norm=latent_norm,
            into_latents=into_latents,
            into_values=into_values,
            output=reader.row_parallel(self.output.weight, self.output.bias),
            backend=reader.latent_attention(self.width),
        )
