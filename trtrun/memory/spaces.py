"""Which rows and blocks a configuration sets aside beside the rows that requests have: for guesses, paths of draft
trees, heads and adapters; and the rings in which layers with a sliding window keep keys and values.

There are rings where blocks are not reused: of a prefix that another row may want nothing can be given up. A ring has
the window, the longest chunk of a prompt, and what rounds draft ahead; so chunks are short. Functions of the
configuration and of config.json, for ranks, rank 0 and `trtrun plan` alike.
"""

from __future__ import annotations

from trtrun.configuration.config import RuntimeConfig
from trtrun.engine.draft_paths import PathSpace
from trtrun.engine.heads.head_rows import HeadSpace
from trtrun.kvcache.row_states import StateSpace
from trtrun.kvcache.sizing import useful_blocks
from trtrun.kvcache.store import RingSpace
from trtrun.linear.layer import AdapterSpace
from trtrun.loading.model_settings import JobModels
from trtrun.models.config import ModelConfig
from trtrun.models.layer_plan import ModelShape
from trtrun.scheduling.planning import most_catch_up
from trtrun.speculation.ahead.policy import GuessSpace

MOST_GUESSES = 128
MOST_GUESSES_WITH_PROBABILITIES = 32
"""Drafts that are made ahead in a round: a step of so many rows takes hardly longer than a step of one while the
weights dominate. With use_logits each keeps distributions over the whole vocabulary."""

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
    """Describe the rings for people; None where there are none."""
    space, chunk = ring_space(config, model), most_chunk(config, model)
    if space is None:
        return None
    kept = space.blocks_per_row * config.kv_cache.block_size
    return (
        f"{space.layers.count(True)} of {len(space.layers)} layers have windows, and keep {kept} tokens of each row; "
        f"prompts are read in chunks of {chunk}"
    )


def state_space(config: RuntimeConfig, models: JobModels, role: str, num_blocks: int) -> StateSpace:
    """The rows that may have states in an engine's layers, and how far behind their newest tokens these stay; rows
    write to the `num_blocks` blocks that both engines have.

    A target's forward begins with a row's newest token, behind which it may verify a draft. A draft engine feeds again
    what it may have fed before, and goes on behind tokens that no verdict has reached.
    """
    verified, rows = config.draft_len + 1, config.scheduler.max_batch_size
    if role == "target":
        return StateSpace(rows, verified, begins_at_newest=True)
    fed = most_catch_up(config.draft_len, drafts_in_parallel=models.mask_token is not None)
    guesses = guess_space(config, num_blocks)
    blocks = [list(guesses.blocks(index)) for index in range(guesses.most_guesses)]
    return StateSpace(
        rows + len(blocks), fed + 2 * verified * (1 + config.plans_ahead), begins_at_newest=False, guess_blocks=blocks
    )


def adapter_space(config: RuntimeConfig, role: str) -> AdapterSpace | None:
    """Room for adapters of an engine; None without any."""
    if not (config.num_adapter_slots if role == "target" else config.draft_adapters):
        return None
    return AdapterSpace(config.num_adapter_slots, config.adapter_slots.max_rank)


def most_useful_blocks(config: RuntimeConfig, context: int) -> int:
    """Blocks beyond which running requests could use no more (see `kvcache.sizing.useful_blocks`)."""
    return useful_blocks(
        config.scheduler.max_batch_size,
        context,
        config.kv_cache.block_size,
        config.draft_len,
        config.plans_ahead,
    )


def guess_space(config: RuntimeConfig, num_blocks: int) -> GuessSpace:
    """What of the draft's engine belongs to guesses, behind its rows and the `num_blocks` blocks that both engines
    have."""
    size, draft_len = config.kv_cache.block_size, config.draft_len
    most = MOST_GUESSES_WITH_PROBABILITIES if config.speculation.use_logits else MOST_GUESSES
    return GuessSpace(
        most_guesses=min(most, 4 * (draft_len + 1) * config.scheduler.max_batch_size) if config.drafts_ahead else 0,
        first_row=config.scheduler.max_batch_size,
        first_block=num_blocks + (head_space(config, 0).num_blocks if config.heads_apart else 0),
        # A guess begins anywhere in its first block, and feeds a token of a verdict and all but the last of a draft.
        blocks_per_guess=(size + draft_len - 2) // size + 1,
    )


def path_space(config: RuntimeConfig, num_blocks: int) -> PathSpace:
    """What of the target's store belongs to paths of draft trees, behind the `num_blocks` blocks that both engines
    have."""
    size = config.kv_cache.block_size
    return PathSpace(
        most_paths=config.max_paths,
        max_rows=config.scheduler.max_batch_size,
        first_block=num_blocks,
        # A path begins anywhere in its first block, with the row's newest token.
        blocks_per_path=(size + config.draft_len - 1) // size + 1,
        sizes=tuple(config.draft_size(length) for length in range(config.draft_len + 1)),
    )


def head_space(config: RuntimeConfig, num_blocks: int) -> HeadSpace:
    """What of the store of heads belongs to draft trees while they grow, behind the `num_blocks` blocks of rows."""
    size = config.kv_cache.block_size
    return HeadSpace(
        most_fed=config.speculation.most_fed,
        max_rows=config.scheduler.max_batch_size,
        first_block=num_blocks,
        # The first token is fed anywhere in its block, and the last of a path not at all.
        blocks_per_path=(size + config.draft_len - 2) // size + 1,
    )


def guess_steps(config: RuntimeConfig) -> list[int]:
    """Numbers of guesses that a round may have: few on GPUs, where each is a graph and most cost the same."""
    most = guess_space(config, 0).most_guesses
    factor = 4 if config.target.devices[0].rpartition("/")[2].startswith("cuda") else 2
    steps = [most]
    while steps[-1] >= 4 * factor:
        steps.append(steps[-1] // factor)
    return sorted(steps) if most else []
