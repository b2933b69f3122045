"""Limits of a scheduler whose layers have windows, as the job's own rule makes them, but for contexts of few tokens."""

from __future__ import annotations

from dataclasses import replace

from trtrun.kvcache.window_blocks import WindowRule
from trtrun.scheduling.limits import SchedulerLimits
from trtrun.scheduling.planning import most_lacking


def with_windows(plain: SchedulerLimits, window: int, chunk: int, most_rows: int) -> SchedulerLimits:
    """The same limits where layers have windows, with places for so many rows as long as they get."""
    chunk = min(chunk, plain.max_num_tokens)
    lacking = most_lacking(plain.draft_len, drafts_in_parallel=plain.drafts_in_parallel) if plain.has_draft_store else 1
    fed_again = plain.most_unfed(plain.draft_len) - 1 if plain.has_draft_store else 0
    drafted = (plain.draft_len + 1) * (plain.plans_ahead + 1)
    most = min(window + fed_again + max(chunk, lacking + drafted), plain.max_seq_len + drafted)
    blocks = -(-most // plain.block_size) + 1
    rule = WindowRule(window, fed_again, chunk, blocks, blocks)
    return replace(plain, windows=rule, most_chunk=chunk, num_places=1 + most_rows * blocks)
