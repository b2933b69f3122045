"""Hidden states of texts on their way through a model, batch by batch, and what is seen of them on the way.

Batches are shared out over devices in turn; what they do not have to hold lies on the host. It knows tensors. It does
not know layers or formats.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trtrun.tools.quantizing.texts import Tokens

TOKENS_AT_ONCE = 4096
"""Tokens of a batch."""

FLOWS_AT_ONCE = 6
"""Tensors as large as the samples' hidden states that there are at once at most: what enters a layer, what leaves it,
and what a search compares with."""

_SHARE_OF_MEMORY = 0.4


@dataclass(frozen=True)
class Devices:
    """Where batches are computed.

    Attributes:
        slots: a device each; one may stand there several times.
        dtype: of activations.
        on_host: whether flows lie on the host.
    """

    slots: tuple[torch.device, ...]
    dtype: torch.dtype
    on_host: bool = False

    def slot(self, batch: int) -> int:
        """The slot that a batch is computed in."""
        return batch % len(self.slots)

    def copies(self, tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> list[dict[str, Tensor]]:
        """Tensors by name on each slot's device, in a dtype, if given."""
        return [{name: value.to(slot, dtype) for name, value in tensors.items()} for slot in self.slots]


class Flow:
    """Hidden states of all batches, [texts, tokens, features] each."""

    def __init__(self, devices: Devices, batches: Sequence[Tensor] = ()) -> None:
        self._devices = devices
        self._batches: list[Tensor] = []
        for batch in batches:
            self.append(batch)

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: int) -> Tensor:
        """A batch on its slot's device."""
        return self._batches[index].to(self._devices.slots[self._devices.slot(index)])

    def append(self, batch: Tensor) -> None:
        """Put one behind the others."""
        self._batches.append(batch.cpu() if self._devices.on_host else batch)

    def map(self, function: Callable[[int, Tensor], Tensor]) -> Flow:
        """What a function makes of each batch, by the batch's slot."""
        found = Flow(self._devices)
        for index in range(len(self)):
            found.append(function(self._devices.slot(index), self[index]))
        return found


def make_batches(texts: Sequence[Tokens]) -> list[Tensor]:
    """Texts of one length each, as int64 [texts, tokens] on the host: nothing is padded."""
    by_length: dict[int, list[Tokens]] = {}
    for text in texts:
        by_length.setdefault(len(text), []).append(text)
    batches = []
    for length, rows in sorted(by_length.items()):
        step = max(1, TOKENS_AT_ONCE // length)
        batches += [torch.tensor(rows[start : start + step]) for start in range(0, len(rows), step)]
    return batches


def lies_on_host(slots: Sequence[torch.device], num_bytes: int) -> bool:
    """Whether flows of so many bytes each are too much for devices to hold FLOWS_AT_ONCE of them."""
    gpus = [slot for slot in slots if slot.type == "cuda"]
    if not gpus:
        return False
    free = min(torch.cuda.mem_get_info(slot)[0] for slot in gpus)
    return FLOWS_AT_ONCE * num_bytes / len(slots) > _SHARE_OF_MEMORY * free


@dataclass
class _Seen:
    """What was seen in one slot, by site."""

    sums: dict[str, Tensor] = field(default_factory=dict)
    largest: dict[str, Tensor] = field(default_factory=dict)
    products: dict[str, Tensor] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)


class Observer:
    """Sees what passes the sites of a layer.

    Args:
        devices: of the batches.
        with_products: whether products of features are summed up, too: [features, features] for each site.
    """

    def __init__(self, devices: Devices, with_products: bool) -> None:
        self._seen = [_Seen() for _ in devices.slots]
        self._device = devices.slots[0]
        self._with_products = with_products

    def watch(self, slot: int) -> Callable[[str, Tensor], None]:
        """What a layer in a slot is to call."""
        seen = self._seen[slot]

        def see(site: str, inputs: Tensor) -> None:
            if site in ("keys", "values"):
                return
            rows = inputs.flatten(0, -2).float()
            seen.counts[site] = seen.counts.get(site, 0) + len(rows)
            sizes = rows.abs()
            if site not in seen.sums:
                seen.sums[site], seen.largest[site] = sizes.sum(0), sizes.amax(0)
                if self._with_products:
                    seen.products[site] = rows.T @ rows
                return
            seen.sums[site] += sizes.sum(0)
            seen.largest[site] = torch.maximum(seen.largest[site], sizes.amax(0))
            if self._with_products:
                seen.products[site].addmm_(rows.T, rows)

        return see

    def count(self, site: str) -> int:
        """Tokens that passed a site."""
        return sum(seen.counts.get(site, 0) for seen in self._seen)

    def mean_size(self, site: str) -> Tensor:
        """[features] float32: the mean of |x| over all tokens."""
        return self._sum([seen.sums for seen in self._seen], site) / self.count(site)

    def largest(self, site: str) -> Tensor:
        """[features] float32: the largest |x|."""
        found = [seen.largest[site].to(self._device) for seen in self._seen if site in seen.largest]
        return torch.stack(found).amax(0)

    def products(self, site: str) -> Tensor:
        """[features, features] float32: the mean of x xᵀ."""
        return self._sum([seen.products for seen in self._seen], site) / self.count(site)

    def _sum(self, parts: Sequence[Mapping[str, Tensor]], site: str) -> Tensor:
        found = [part[site].to(self._device) for part in parts if site in part]
        return torch.stack(found).sum(0) if found[1:] else found[0]


class LargestKeys:
    """The largest keys and values that pass in a layer, for scales of a KV cache."""

    def __init__(self) -> None:
        self._found: dict[str, list[Tensor]] = {"keys": [], "values": []}

    def watch(self, site: str, heads: Tensor) -> None:
        """What a layer is to call."""
        if site in self._found:
            self._found[site].append(heads.abs().amax())

    def result(self) -> tuple[float, float]:
        """The largest numbers of keys, and of values."""
        keys, values = (max(float(value) for value in self._found[site]) for site in ("keys", "values"))
        return keys, values
