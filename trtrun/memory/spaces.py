"""Which rows and blocks a configuration sets aside beside the rows that requests have: for guesses, paths of draft
trees, heads and adapters; and what layers with a sliding window keep of a row.

These keep the window, and the longest chunk of a prompt or what the draft store lacks and rounds draft ahead, where
that is less than all of a row. Functions of the configuration and of config.json, for ranks, rank 0 and `trtrun plan`
alike.
"""

from __future__ import annotations

from trtrun.configuration.config import RuntimeConfig
from trtrun.engine.draft_paths import PathSpace
from trtrun.engine.heads.head_rows import HeadSpace
from trtrun.errors import ConfigError
from trtrun.kvcache.row_states import StateSpace
from trtrun.kvcache.sizing import PlaceDemand, format_bytes, useful_blocks
from trtrun.kvcache.specs import state_of
from trtrun.kvcache.window_blocks import WindowRule
from trtrun.linear.layer import AdapterSpace
from trtrun.loading.model_settings import JobModels
from trtrun.scheduling.limits import most_unfed
from trtrun.scheduling.planning import most_catch_up, most_lacking
from trtrun.speculation.ahead.policy import GuessSpace
from trtrun.weights.weight import Share

MOST_GUESSES = 128
MOST_GUESSES_WITH_PROBABILITIES = 32
"""Drafts that are made ahead in a round: a step of so many rows takes hardly longer than a step of one while the
weights dominate. With use_logits each keeps distributions over the whole vocabulary."""

_LEAST_CHUNK = 512
"""Tokens of a prompt that are read at once, however short windows and texts are."""

_CHUNK_SHARE = 4
"""What part of a text a longer chunk may be: of short texts rows would else keep nearly all. A round's weights are read
once for each chunk: those of a mixture's experts take as long as the products of some hundred tokens."""


def window_rule(config: RuntimeConfig, models: JobModels) -> WindowRule | None:
    """What layers with windows need of each row; None where all layers of the job keep all.

    A draft model with a tokenizer of its own has its own block tables, and keeps all; so do heads.
    """
    sharing = [models.target, models.draft if _shares_tables(config, models) else None]
    found = [window for model in sharing if model is not None for window in model.windows if window is not None]
    if not found:
        return None
    size, window = config.kv_cache.block_size, max(found)
    # Each engine writes what it drafts behind a row's newest token, and a plan ahead as much again; a draft engine
    # feeds what it has missed.
    drafted, lacking, fed_again = (config.draft_len + 1) * (1 + config.plans_ahead), 1, 0
    if _shares_tables(config, models):
        in_parallel = models.mask_token is not None
        lacking = most_lacking(config.draft_len, drafts_in_parallel=in_parallel)
        fed_again = most_unfed(config.draft_len, drafts_in_parallel=in_parallel) - 1
    stored = config.kv_cache.max_tokens
    longest = models.context if stored is None else min(models.context, stored)
    most = models.most_tokens
    least = min(max(_LEAST_CHUNK, window), most)
    chunk = min(max(least, longest // _CHUNK_SHARE), most)

    def count(read: int) -> int:
        return -(-(window + fed_again + max(read, lacking + drafted)) // size) + 1

    beside = count(least)
    if beside * size >= models.context or (stored is not None and beside * size > stored):
        return None  # a row is never longer
    return WindowRule(window, fed_again, chunk, count(chunk), beside)


def _shares_tables(config: RuntimeConfig, models: JobModels) -> bool:
    """Whether a draft model has the block tables of the target."""
    return models.draft is not None and not config.translates_drafts


def layers_in_places(config: RuntimeConfig, models: JobModels, role: str) -> tuple[bool, ...] | None:
    """Say of each layer of a role's model whether it keeps places of blocks; None where all of its layers keep all."""
    if window_rule(config, models) is None or (role == "draft" and not _shares_tables(config, models)):
        return None
    windowed = tuple(window is not None for window in models.of_role(role).windows)
    return windowed if any(windowed) else None


def place_demand(config: RuntimeConfig, models: JobModels) -> PlaceDemand | None:
    """Places that rows need in layers with windows; None where these keep all."""
    rule = window_rule(config, models)
    if rule is None:
        return None
    return PlaceDemand(config.scheduler.max_batch_size, rule.blocks_per_row, rule.blocks_beside)


def describe_windows(config: RuntimeConfig, models: JobModels, role: str) -> str | None:
    """Describe for people what layers with windows keep in a role's engine; None where all of its layers keep all."""
    rule, layers = window_rule(config, models), layers_in_places(config, models, role)
    if rule is None or layers is None:
        return None
    held = rule.blocks_per_row * config.kv_cache.block_size
    return (
        f"{layers.count(True)} of {len(layers)} layers have windows, and hold at most {held} tokens of each row; "
        f"prompts are read in chunks of {rule.chunk}"
    )


def state_space(config: RuntimeConfig, models: JobModels, role: str, num_blocks: int) -> StateSpace:
    """The rows that may have states in an engine's layers, and how far behind their newest tokens these stay; rows
    write to the `num_blocks` blocks that both engines have.

    A target's forward begins with a row's newest token, behind which it may verify a draft. A draft engine feeds again
    what it may have fed before, and goes on behind tokens that no verdict has reached.
    """
    verified, rows = config.draft_len + 1, config.scheduler.max_batch_size
    snapshots, dtype = max(1, num_snapshots(config, models)), config.kv_cache.state_dtype
    if role == "target":
        return StateSpace(rows, verified, begins_at_newest=True, num_snapshots=snapshots, dtype=dtype)
    fed = most_catch_up(config.draft_len, drafts_in_parallel=models.mask_token is not None)
    guesses = guess_space(config, num_blocks)
    blocks = [list(guesses.blocks(index)) for index in range(guesses.most_guesses)]
    refed = fed + 2 * verified * (1 + config.plans_ahead)
    return StateSpace(
        rows + len(blocks), refed, begins_at_newest=False, num_snapshots=snapshots, guess_blocks=blocks, dtype=dtype
    )


def num_snapshots(config: RuntimeConfig, models: JobModels) -> int:
    """Snapshots of states that all engines have, the null snapshot among them; 0 where none is kept, or no layer has
    any states.

    Raises:
        ConfigError: there is no room for one.
    """
    sizes = [_snapshot_bytes(config, models, "target")]
    if models.draft is not None and config.draft is not None:
        sizes.append(_snapshot_bytes(config, models, "draft"))
    kept, most = config.kv_cache.state_snapshots, 2 * config.scheduler.max_batch_size
    if not any(sizes) or not config.kv_cache.enable_block_reuse:
        return 0
    if kept is not None and 0 < kept < max(sizes):
        raise ConfigError(
            f"kv_cache.state_snapshots: {kept} bytes hold no snapshot of a row's states, which takes "
            f"{format_bytes(max(sizes))} on a rank; 0 keeps none"
        )
    count = most if kept is None else min(kept // size for size in sizes if size)
    return 1 + count if count else 0


def snapshot_bytes(config: RuntimeConfig, models: JobModels, role: str) -> int:
    """Bytes of all snapshots on one of an engine's ranks."""
    return num_snapshots(config, models) * _snapshot_bytes(config, models, role)


def _snapshot_bytes(config: RuntimeConfig, models: JobModels, role: str) -> int:
    """Bytes of one snapshot on a rank; 0 where no layer keeps a state."""
    section = config.draft if role == "draft" else config.target
    assert section is not None, "the job has no draft model"
    kept = [state_of(specs) for specs in models.of_role(role).keeps(Share(0, len(section.devices)))]
    return sum(spec.state_bytes(config.kv_cache.state_dtype) for spec in kept if spec is not None)


def describe_states(config: RuntimeConfig, models: JobModels, role: str) -> str | None:
    """Describe for people what layers that keep states take on a rank; None where none does."""
    model, section = models.of_role(role), config.draft if role == "draft" else config.target
    layers = model.layers_with_states
    if not layers or section is None:
        return None
    size, snapshots = _snapshot_bytes(config, models, role), num_snapshots(config, models)
    shared = f"{snapshots - 1} snapshots for prefixes" if snapshots else "no prefix is shared"
    return (
        f"{len(layers)} of {model.num_layers} layers keep a state of each row, {format_bytes(size)} a row on a rank; "
        f"{shared}"
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
