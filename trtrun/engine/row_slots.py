"""With which adapter rows are computed, told to a store by their blocks (trtrun/kvcache/block_slots.py).

It knows plans and blocks. It does not know adapters or forwards.
"""

from __future__ import annotations

from trtrun.core.nouns import RoundPlan
from trtrun.engine.draft_paths import DraftPaths
from trtrun.kvcache.block_slots import BlockSlots


def announce_slots(slots: BlockSlots, plan: RoundPlan, paths: DraftPaths | None) -> None:
    """Give blocks of the rows that a plan admits the slots of their adapters: their first ones, and those of the paths
    of their drafts, which may stand in the place of these."""
    admitted = {item.row: item.adapter_slot for item in plan.admissions}
    found = [
        (block, admitted[row]) for row, index, block in plan.block_updates.tolist() if index == 0 and row in admitted
    ]
    if paths is not None:
        found += [(block, slot) for row, slot in admitted.items() for block in paths.blocks_of(row)]
    slots.assign([block for block, _ in found], [slot for _, slot in found])
