"""Latent attention (DeepSeek-V2, arXiv:2405.04434) on one rank: a token keeps one latent for all heads, of which each
head's matrices would make its key and its value. They are multiplied into queries and outputs instead, for rounds and
prompts alike, so that heads attend over the latents themselves and a token has the same bits in both.

It knows weights, heads and latents. It does not know which layer it is, or how its weights are held.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trtrun.attention.latents import LatentBackend, attend_over_latents
from trtrun.kernels.arguments import Activations, LatentCall, Rounding
from trtrun.kernels.torch.operations import HeadProducts
from trtrun.kvcache.store import LayerCache
from trtrun.layers.decoder_layer import RMSNorm, RowParallelLinear
from trtrun.linear.layer import Linear


@dataclass(frozen=True)
class LatentSizes:
    """Sizes of a layer, and how it turns.

    Attributes:
        plain, turned: numbers of a head's query that are not rotated, and those behind them that are.
        rank: of latents.
        scale: factor of the scores.
        interleaved: see LatentCall.
    """

    plain: int
    turned: int
    rank: int
    scale: float
    interleaved: bool


@dataclass
class LatentAttention:
    """The layer.

    Attributes:
        sizes: of it.
        inputs: hidden to this rank's queries, or to what they are made of; behind it a latent and a key to be rotated.
        query_norm: of what queries are made of; None where they come at once.
        queries: that to this rank's queries; None likewise.
        latent_norm: of latents.
        into_latents: of each head, the part of a query that is not rotated to what is multiplied with latents.
        into_values: of each head, attended latents to its value.
        output: this rank's heads back to hidden, for whoever is handed what was attended.
        backend: that attends.
    """

    sizes: LatentSizes
    inputs: Linear
    query_norm: RMSNorm | None
    queries: Linear | None
    latent_norm: RMSNorm
    into_latents: HeadProducts
    into_values: HeadProducts
    output: RowParallelLinear
    backend: LatentBackend

    @property
    def takes_rounded_rows(self) -> Rounding | None:
        return self.inputs.takes_rounded_rows

    def __call__(self, x: Activations, angles: tuple[torch.Tensor, torch.Tensor], cache: LayerCache) -> torch.Tensor:
        """x [tokens, hidden], normalised → [tokens, this rank's heads * numbers of a value], for `output`."""
        sizes, made = self.sizes, self.inputs(x)
        behind = made.shape[1] - sizes.rank - sizes.turned
        query, latent, key = made[:, :behind], made[:, behind : -sizes.turned], made[:, -sizes.turned :]
        if self.queries is not None:
            assert self.query_norm is not None
            query = self.queries(self.query_norm(query))
        heads = query.view(len(query), -1, sizes.plain + sizes.turned)
        call = LatentCall(
            self.into_latents(heads[..., : sizes.plain]),
            heads[..., sizes.plain :],
            self.latent_norm(latent),
            key,
            angles,
            sizes.interleaved,
            cache.keys_and_values,
            cache.batch,
            sizes.scale,
        )
        return self.into_values(attend_over_latents(self.backend, call)).flatten(1)
