"""Models and tokenizers whose token ids are shuffled: other vocabularies, in which every token has its counterpart."""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch
from checkpoints import save_weights
from safetensors.torch import load_file


def permute_tokenizer(source: Path, path: Path, seed: int) -> list[int]:
    """Write the tokenizer of `source` with other ids to `path`; returns the new id of each old one."""
    path.mkdir(parents=True, exist_ok=True)
    file = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = file["model"]["vocab"]
    new = list(range(len(vocabulary)))
    random.Random(seed).shuffle(new)
    moved = {token: new[index] for token, index in vocabulary.items()}
    file["model"]["vocab"] = dict(sorted(moved.items(), key=lambda item: item[1]))
    for added in file["added_tokens"]:
        added["id"] = new[added["id"]]
    for special in ((file["post_processor"] or {}).get("special_tokens") or {}).values():
        special["ids"] = [new[token] for token in special["ids"]]
    (path / "tokenizer.json").write_text(json.dumps(file), encoding="utf-8")
    return new


def permuted_copy(path: Path, source: Path, seed: int = 11) -> Path:
    """A model that says of texts what that of `source` says, with other ids for tokens; returns `path`."""
    new = permute_tokenizer(source, path, seed)
    weights = load_file(source / "model.safetensors")
    places = torch.arange(next(len(value) for name, value in weights.items() if "embed_tokens" in name))
    places[: len(new)] = torch.tensor(new)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in weights:
            moved = torch.empty_like(weights[name])
            moved[places] = weights[name]
            weights[name] = moved
    save_weights(path, weights)
    for name in ("config.json", "generation_config.json"):
        values = json.loads((source / name).read_text(encoding="utf-8"))
        for key in ("bos_token_id", "eos_token_id"):
            if isinstance(values.get(key), int):
                values[key] = new[values[key]]
        (path / name).write_text(json.dumps(values), encoding="utf-8")
    return path
