"""What can be known to be wrong before any rank starts: model directories, their split over devices, tokenizers.

The parent process calls it so that a user's mistake is one line from one process. It reads headers and configurations,
no weights.
"""

from __future__ import annotations

from pathlib import Path

import torch

from parallel.errors import ParallelError
from parallel.topology import Topology
from trtrun.config import ModelSection, RuntimeConfig
from trtrun.errors import CheckpointError, ConfigError
from trtrun.models.checkpoint import Checkpoint
from trtrun.models.config import ModelConfig, read_model_config
from trtrun.models.loading import shard_bytes
from trtrun.roles.startup import resolve_dtype, target_context
from trtrun.text import check_same_tokenizer, read_tokenizer


def check_job(config: RuntimeConfig, topology: Topology) -> None:
    """Raise the TrtrunError that starting this job would end in, as far as it can be told without weights.

    Args:
        config: of the run.
        topology: its ranks.
    """
    target = _check_model("target", config.target)
    target_context(config, target)
    if config.draft is not None:
        _check_model("draft", config.draft)
    check_devices(topology)
    tokenizer = read_tokenizer(config.tokenizer or config.target.model)
    draft_tokenizer = read_tokenizer(config.draft.model) if config.draft is not None else None
    if tokenizer is not None and draft_tokenizer is not None:
        check_same_tokenizer(tokenizer, draft_tokenizer)


def has_tokenizer(config: RuntimeConfig) -> bool:
    """Whether prompts may be text."""
    return read_tokenizer(config.tokenizer or config.target.model) is not None


def check_devices(topology: Topology) -> None:
    """Raise ConfigError for a GPU that this host does not have.

    A rank of another host is not checked here; its own start-up does it.
    """
    wanted = [slot.device for slot in topology.slots if slot.device.startswith("cuda")]
    if not wanted:
        return
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    missing = [device for device in wanted if int(device.partition(":")[2]) >= count]
    if missing:
        have = f"it has {count} (cuda:0 to cuda:{count - 1})" if count else "it has none"
        raise ConfigError(
            f'{missing[0]} is not on this host: {have}; use CPU slots such as "cpu:0" where there is no GPU'
        )


def _check_model(role: str, section: ModelSection) -> ModelConfig:
    """Read one model's configuration and the headers of its weights, and try its split over the section's devices."""
    try:
        config = read_model_config(section.model)
        Checkpoint(Path(section.model))
        for rank in range(len(section.devices)):
            shard_bytes(config, rank, len(section.devices), resolve_dtype(section, config))
    except (CheckpointError, ConfigError, ParallelError) as error:
        raise CheckpointError(f"{role}: {error}") from None
    return config
