"""What a configuration and a model's config.json come to together, before anything is loaded.

Pure functions that import no torch: a process that only starts ranks asks them, too. They know no rank and no memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trtrun.configuration.config import RuntimeConfig
from trtrun.configuration.drafting.drafting_methods import DraftModelSection
from trtrun.configuration.model_sections import ModelSection
from trtrun.errors import CheckpointError, ConfigError
from trtrun.heads.head_kinds import tell_heads
from trtrun.heads.heads import HeadsPlan, read_heads
from trtrun.models.config import ModelConfig

MADE_UP_LENGTH, MADE_UP_ROUNDS = 32, 4
"""Tokens of a row that a start makes up, where its context is not shorter, and the rounds that it may gain in."""


def resolve_dtype_name(section: ModelSection, config: ModelConfig) -> str:
    """Name of the dtype to compute in: the section's, or the checkpoint's for `auto`."""
    return config.checkpoint_dtype if section.dtype == "auto" else section.dtype


def read_target_heads(config: RuntimeConfig, model: ModelConfig) -> HeadsPlan | None:
    """The heads that draft from what the target computes; None where the method has none.

    Raises:
        CheckpointError: there are none in their directory, or they do not fit the target.
    """
    if config.heads is None:
        return None
    num_ranks = 1 if config.heads_apart else len(config.target.devices)
    try:
        return read_heads(config.heads.model, model, config.speculation, num_ranks)
    except CheckpointError as error:
        told = tell_heads(config.heads.model, config.speculation.method)
        if told is None or "speculation.method" in str(error):
            raise
        raise CheckpointError(f"heads: {config.heads.model}: {told}") from None


def target_context(config: RuntimeConfig, model: ModelConfig) -> int:
    """Most tokens of one request.

    Raises:
        ConfigError: scheduler.max_seq_len is beyond the target's context.
    """
    wanted = config.scheduler.max_seq_len
    if wanted is not None and wanted > model.max_position_embeddings:
        raise ConfigError(
            f"scheduler.max_seq_len is {wanted}, but the target's context is {model.max_position_embeddings} tokens"
        )
    return wanted or model.max_position_embeddings


def row_context(config: RuntimeConfig, model: ModelConfig) -> int:
    """Tokens that tables of rows and of rotation are made for, however long a context config.json speaks of: what a row
    can come to, by `target_context` and by what the KV store may hold; the rows that a start makes up may be longer.

    Raises:
        ConfigError: as of `target_context`.
    """
    context, stored, size = target_context(config, model), config.kv_cache.max_tokens, config.kv_cache.block_size
    if stored is None:
        return context
    made_up = max(config.scheduler.max_num_tokens + 1, MADE_UP_LENGTH + MADE_UP_ROUNDS * (config.draft_len + 1))
    return min(context, max(-(-stored // size) * size, made_up))


def mask_token(config: RuntimeConfig, draft: ModelConfig | None) -> int | None:
    """The mask token of a draft model, where all tokens of a draft come from one forward; None where they do not.

    Raises:
        ConfigError: speculation.parallel_drafting is on, and the draft model has none.
    """
    section = config.speculation
    if config.draft is None or draft is None:
        return None
    if not isinstance(section, DraftModelSection) or section.parallel_drafting == "off":
        return None
    if config.draft.is_translated:
        return None  # the mask token is one of the draft's, and its places are not the target's
    if draft.mask_token is None and section.parallel_drafting == "on":
        raise ConfigError(
            f"speculation.parallel_drafting is on, but {Path(config.draft.model, 'config.json')} names no mask token "
            "(pard_token): name a draft that was trained for it, or leave parallel_drafting out"
        )
    return draft.mask_token


@dataclass(frozen=True)
class JobModels:
    """What config.json says of the models of a job, and what follows from it for all ranks.

    Attributes:
        target: of the target.
        draft: of the draft model; None without one.
        context: see `row_context`.
        mask_token: see `mask_token`.
    """

    target: ModelConfig
    draft: ModelConfig | None
    context: int
    mask_token: int | None

    @classmethod
    def of(cls, config: RuntimeConfig, target: ModelConfig, draft: ModelConfig | None) -> JobModels:
        """The models of a configuration.

        Raises:
            ConfigError: see `row_context` and `mask_token`.
        """
        return cls(target, draft, row_context(config, target), mask_token(config, draft))

    def of_role(self, role: str) -> ModelConfig:
        """The model of an engine that the job has, "target" or "draft"."""
        model = self.draft if role == "draft" else self.target
        assert model is not None, "the job has no draft model"
        return model
