"""Arguments of operations beside plain tensors: what attention takes, activations that are rounded already, and the
adapter of each line."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeVar

import torch

from parallel.communicator import Communicator
from trtrun.kvcache.segments import AttentionBatch

GROUP = 128
"""Numbers of a row that share a scale where it is rounded in groups."""

Rounding = Literal["row", "group"]
"""By the largest number of a whole row, or by that of each `GROUP` of its numbers."""


class RoundedRows(NamedTuple):
    """Rows of activations: row r is codes[r] * scale[r], or in groups its number i codes[r, i] * scale[r, i // GROUP].

    Attributes:
        codes: [rows, at least as many as there are inputs] E4M3, without gaps in a row.
        scale: float32 [rows]; in groups [rows, groups], whose rows lie beside each other in memory, with room for a
            multiple of 16 of them.
        dtype: of the activations before they were rounded, and of what is made of them.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    dtype: torch.dtype


Activations = torch.Tensor | RoundedRows
"""What a linear layer may be given: RoundedRows only where it says that it takes them, rounded as it says."""


class RankSum(NamedTuple):
    """What the ranks of a group computed and is not summed yet: `communicator` sums it in the order of the ranks.

    Attributes:
        part: [tokens, hidden], contiguous: this rank's.
        communicator: of the group.
    """

    part: torch.Tensor
    communicator: Communicator


class ExpertSums(NamedTuple):
    """What chosen experts made of tokens, not added up yet: a token's sum is that of made * shares, in the order of its
    experts, in float32, and then rounded.

    Attributes:
        made: [tokens, chosen, hidden], contiguous.
        shares: [tokens, chosen] float32, contiguous.
    """

    made: torch.Tensor
    shares: torch.Tensor


Delta = torch.Tensor | ExpertSums | RankSum
"""What is left to add to the residual stream: [tokens, hidden], or sums that are made on the way."""


Activation = Literal["silu", "gelu_tanh", "clamped_swiglu", "sigmoid"]
"""What gates go through, before factors are multiplied with: x * sigmoid(x), or GELU's approximation by tanh
(arXiv:1606.08415), which is x * sigmoid(2 * sqrt(2 / pi) * (x + 0.044715 * x^3)); or sigmoid(x).

That of gpt-oss, "clamped_swiglu", has a limit: gates are at most so large, factors of at most that size, and what comes
of them is x * sigmoid(1.702 * x) * (factor + 1), in float32 and rounded once."""

GELU_LINEAR, GELU_CUBIC = 2 * (2 / math.pi) ** 0.5, 0.044715
"""Numbers of the second one."""

SWIGLU_SLOPE = 1.702
"""The number of the third."""


T = TypeVar("T")


class LineGroup(NamedTuple):
    """Lines of one slot: their indices [n] int64, or None for all lines."""

    slot: int
    lines: torch.Tensor | None


class LineSlots:
    """The slots of the lines of a forward's activations.

    Attributes:
        slots: [lines] int64 on the device of the activations, without gaps; 0 where a line has no adapter.
    """

    def __init__(self, slots: torch.Tensor) -> None:
        # Those of one row are a number that is repeated, of which torch may have one in memory; kernels read them all.
        self.slots = slots.contiguous()
        self._found: dict[Hashable, Any] = {}

    def select(self, lines: torch.Tensor) -> LineSlots:
        """Slots of some `lines` [n] int64, in their order."""
        return LineSlots(self.slots.index_select(0, lines))

    def once(self, key: Hashable, find: Callable[[torch.Tensor], T]) -> T:
        """What `find` makes of the slots, once for all layers of a forward. A key is always found the same way."""
        if key not in self._found:
            self._found[key] = find(self.slots)
        found: T = self._found[key]
        return found

    @cached_property
    def groups(self) -> list[LineGroup]:
        """The lines of each slot above 0, by slot. It reads them on the host, so it is for CPUs."""
        found = sorted(set(self.slots.tolist()))
        if len(found) == 1:
            return [LineGroup(found[0], None)] if found[0] else []
        return [LineGroup(slot, (self.slots == slot).nonzero()[:, 0]) for slot in found if slot]


class AttentionCall(NamedTuple):
    """All that one layer's attention takes of a forward. What a backend cannot do it refuses when it is chosen.

    Attributes:
        query_key: [tokens, heads + kv_heads, head]: the queries, then the keys, not rotated yet; of a batch with forks
            those of its tokens where the backend `reads_forks`, else of its places.
        value: [tokens, kv_heads, head] of the same tokens; with no heads where the layer attends in keys and values
            of another, and writes none: then there are only queries in front of it.
        angles: cosines and signed sines, [places, 1, head] each; see RotaryEmbedding.
        store_layer: keys, then values of this layer, [2, blocks, kv_heads, block, head] as the format has it.
        batch: the forward's segments, which say who sees whom.
        scale: factor of the scores.
        window: sliding window in tokens, None for full attention.
        kv_scales: of the layer's keys and values by head, [2, kv_heads] float32 (numbers of bfloat16), where the
            store's format has scales of layers.
        soft_cap: c of c * tanh(score / c), which scores become before it is seen who sees whom; None leaves them.
        sinks: [heads] float32: one more score of each query head, neither scaled nor capped, which every query meets
            and which has no value (arXiv:2309.17453, as gpt-oss learns them); None without.
    """

    query_key: torch.Tensor
    value: torch.Tensor
    angles: tuple[torch.Tensor, torch.Tensor]
    store_layer: torch.Tensor
    batch: AttentionBatch
    scale: float
    window: int | None
    kv_scales: torch.Tensor | None = None
    soft_cap: float | None = None
    sinks: torch.Tensor | None = None

    @property
    def writes(self) -> bool:
        """Whether there are keys and values to store."""
        return self.value.shape[1] > 0


class LatentCall(NamedTuple):
    """All that one layer's attention over latents takes of a forward (arXiv:2405.04434, with what makes keys and values
    of latents multiplied into queries and outputs).

    Attributes:
        query: [tokens, heads, rank], to be multiplied with latents; of a batch with forks of its tokens or its places.
        turned_query: [tokens, heads, rotated] of the same tokens, not rotated yet.
        latent: [tokens, rank] of the same tokens.
        turned_key: [tokens, rotated] of the same tokens, for all heads, not rotated yet.
        angles: cosines and signed sines, [places, 1, rotated] each; see RotaryEmbedding.
        interleaved: whether neighbouring numbers are rotated together, and not those half of `rotated` apart.
        store_layer: latents, with rotated keys behind them, [1, blocks, 1, block, rank + rotated] as the format has it.
        batch, scale: see AttentionCall.
    """

    query: torch.Tensor
    turned_query: torch.Tensor
    latent: torch.Tensor
    turned_key: torch.Tensor
    angles: tuple[torch.Tensor, torch.Tensor]
    interleaved: bool
    store_layer: torch.Tensor
    batch: AttentionBatch
    scale: float
