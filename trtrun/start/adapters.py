"""Adapters that a configuration names, on a rank of the target: each in the slot of its place there, from 1 on.

It knows the configuration and a loaded model. It does not know who asks for which adapter.
"""

from __future__ import annotations

from trtrun.adapters.lora_config import hash_adapter_files
from trtrun.adapters.lora_loading import load_adapter
from trtrun.configuration.config import RuntimeConfig
from trtrun.errors import CheckpointError
from trtrun.models.decoder import CausalLM


def load_adapters(config: RuntimeConfig, model: CausalLM) -> None:
    """Fill the slots of a rank's layers.

    Raises:
        CheckpointError: one of them is damaged, not supported or not for this model; the line names it.
    """
    for slot, (name, path) in enumerate(config.adapters.items(), start=1):
        try:
            load_adapter(model, slot, path)
        except CheckpointError as error:
            raise CheckpointError(f"adapters.{name}: {error}") from None


def adapter_hashes(config: RuntimeConfig) -> list[str]:
    """Tell the files of each adapter from others, and its name."""
    return [f"{name}={hash_adapter_files(path)}" for name, path in config.adapters.items()]
