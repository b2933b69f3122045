"""How large the rings are in which layers with a sliding window keep keys and values, where there are any.

There are where blocks are not reused: of a prefix that another row may want nothing can be given up. A ring has the
window, the longest chunk of a prompt, and what rounds draft ahead; so chunks are short. Pure functions of the
configuration and of config.json, for ranks, rank 0 and `trtrun plan` alike.
"""

from __future__ import annotations

from trtrun.configuration.config import RuntimeConfig
from trtrun.kvcache.store import RingSpace
from trtrun.models.config import ModelConfig
from trtrun.models.layer_plan import ModelShape
from trtrun.scheduling.planning import most_catch_up

_SHARE_OF_WINDOW = 4
"""A chunk has at most one part in so many of the window."""

_LEAST_CHUNK = 64
"""Tokens of a chunk that are read at once, however short the window is."""


def ring_space(config: RuntimeConfig, model: ModelShape) -> RingSpace | None:
    """The rings of a model's engine; None where all of its layers keep all.

    Args:
        config: of the job.
        model: of the engine; the layers of heads have no rings.
    """
    if config.kv_cache.enable_block_reuse or not isinstance(model, ModelConfig):
        return None
    found = [window for window in model.windows if window is not None]
    if not found:
        return None
    size, rows = config.kv_cache.block_size, config.scheduler.max_batch_size
    # Each engine writes what it drafts behind a row's newest token, and a plan ahead as much again; a draft engine
    # feeds what it has missed.
    drafted = 2 * (config.draft_len + 1) * (1 + config.plans_ahead)
    written = max(_chunk(config, max(found)), most_catch_up(config.draft_len, drafts_in_parallel=True)) + drafted
    blocks = -(-(max(found) + written) // size) + 1
    context = min(config.scheduler.max_seq_len or model.max_position_embeddings, model.max_position_embeddings)
    stored = config.kv_cache.max_tokens
    if blocks * size >= context or (stored is not None and rows * blocks * size >= stored):
        return None  # a ring would be no shorter than a row, or all rings no smaller than the store
    return RingSpace(tuple(window is not None for window in model.windows), rows, blocks)


def most_chunk(config: RuntimeConfig, *models: ModelConfig | None) -> int | None:
    """Tokens of a prompt that a row reads in a round, at most, where some of the engines have rings; else None."""
    with_rings = [model for model in models if model is not None and ring_space(config, model) is not None]
    windows = [max(window for window in model.windows if window is not None) for model in with_rings]
    return _chunk(config, min(windows)) if windows else None


def _chunk(config: RuntimeConfig, window: int) -> int:
    return min(max(_LEAST_CHUNK, window // _SHARE_OF_WINDOW), config.scheduler.max_num_tokens)


def describe_rings(config: RuntimeConfig, model: ModelConfig) -> str | None:
    """For people; None where there are no rings."""
    space, chunk = ring_space(config, model), most_chunk(config, model)
    if space is None:
        return None
    kept = space.blocks_per_row * config.kv_cache.block_size
    return (
        f"{space.layers.count(True)} of {len(space.layers)} layers have windows, and keep {kept} tokens of each row; "
        f"prompts are read in chunks of {chunk}"
    )
