"""Whether two processes of a server have read the same configuration and the same files.

The front compares what it has read with what each engine says. It knows no engine, and does without torch.
"""

from __future__ import annotations

import hashlib

from trtrun.configuration.config import RuntimeConfig
from trtrun.heads.heads import HEADS_FILES
from trtrun.lora.lora_config import hash_adapter_files
from trtrun.tokens.text import hash_tokenizer_files
from trtrun.weights.model_files import hash_model_files


def hash_config(config: RuntimeConfig) -> str:
    """Tells whether front and engine, or an engine and the one before it, have read the same."""
    return hashlib.sha256(config.model_dump_json().encode()).hexdigest()


def hash_files(config: RuntimeConfig) -> dict[str, str]:
    """Tells front and engine, or an engine and the one before it, whether they have read the same files: on this host,
    where front and rank 0 are, by what they are."""
    sections = {"target": config.target, "draft": config.draft}
    hashes = {
        f"the {name}'s model": hash_model_files(section.model, section.load_format != "dummy")
        for name, section in sections.items()
        if section is not None
    }
    if config.heads is not None:
        hashes["the heads"] = hash_model_files(config.heads.model, single_files=HEADS_FILES)
    hashes |= {f"the adapter {name}": hash_adapter_files(path) for name, path in config.adapters.items()}
    hashes |= {f"the draft's adapter {name}": hash_adapter_files(path) for name, path in config.draft_adapters.items()}
    return hashes | {"the tokenizer": hash_tokenizer_files(config.tokenizer or config.target.model)}
