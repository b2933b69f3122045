"""What a configuration and a model's config.json come to together, before anything is loaded.

Pure functions that import no torch: a process that only starts ranks asks them, too. They know no rank and no memory.
"""

from __future__ import annotations

from trtrun.configuration.config import ModelSection, RuntimeConfig
from trtrun.errors import ConfigError
from trtrun.models.config import ModelConfig


def resolve_dtype_name(section: ModelSection, config: ModelConfig) -> str:
    """Name of the dtype to compute in: the section's, or the checkpoint's for `auto`."""
    return config.checkpoint_dtype if section.dtype == "auto" else section.dtype


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
