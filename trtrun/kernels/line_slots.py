"""With which adapter each line of activations of a forward is computed, as products with adapters take it.

It knows numbers of slots. It does not know adapters, rows or forwards.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import torch

from trtrun.tensors import kept_range


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
        self._starts: dict[int, torch.Tensor] = {}

    def select(self, lines: torch.Tensor) -> LineSlots:
        """Those of some `lines` [n] int64, in their order."""
        return LineSlots(self.slots.index_select(0, lines))

    @cached_property
    def sorted(self) -> torch.return_types.sort:
        """`values` [lines] int64, the slots from the least on, and `indices` [lines] int64, the line of each of them.
        Lines of one slot keep their order."""
        return torch.sort(self.slots, stable=True)

    def starts(self, num_slots: int) -> torch.Tensor:
        """[num_slots + 1] int64: where in `sorted` the lines of each slot above 0 begin, and where the last end. Found
        once for all layers of a forward."""
        found = self._starts.get(num_slots)
        if found is None:
            values = self.sorted.values
            slots = kept_range(1, num_slots + 2, values.device)
            found = self._starts[num_slots] = torch.searchsorted(values, slots)
        return found

    @cached_property
    def groups(self) -> list[LineGroup]:
        """The lines of each slot above 0, by slot. It reads them on the host, so it is for CPUs."""
        found = sorted(set(self.slots.tolist()))
        if len(found) == 1:
            return [LineGroup(found[0], None)] if found[0] else []
        return [LineGroup(slot, (self.slots == slot).nonzero()[:, 0]) for slot in found if slot]
