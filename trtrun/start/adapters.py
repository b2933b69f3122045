"""Adapters that a configuration names, on a rank of the target: each in the slot of its place there, from 1 on.

It knows the configuration and a loaded model. It does not know who asks for which adapter.
"""

from __future__ import annotations

from trtrun.configuration.config import RuntimeConfig
from trtrun.errors import CheckpointError
from trtrun.lora.lora_config import hash_adapter_files
from trtrun.lora.lora_loading import load_adapter
from trtrun.models.decoder import CausalLM


def load_adapters(config: RuntimeConfig, role: str, model: CausalLM) -> None:
    """Fill the slots of a rank's layers, which draft and target number alike.

    Raises:
        CheckpointError: one of them is damaged, not supported or not for this model; the line names it.
    """
    key, paths = ("adapters", config.adapters) if role == "target" else ("draft_adapters", config.draft_adapters)
    for slot, name in enumerate(config.adapters, start=1):
        if name not in paths:
            continue
        try:
            load_adapter(model, slot, paths[name])
        except CheckpointError as error:
            raise CheckpointError(f"{key}.{name}: {error}") from None


def adapter_hashes(config: RuntimeConfig) -> list[str]:
    """Tell the files of each adapter from others, and its name."""
    paths = [*config.adapters.items(), *config.draft_adapters.items()]
    return [f"{name}={hash_adapter_files(path)}" for name, path in paths]
