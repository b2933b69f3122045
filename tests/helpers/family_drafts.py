"""What drafts for the targets of families, by method: sections of the configuration, and models and heads that are made
for a target and taught its texts."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from decoder_heads import read_config, write_config
from dflash_heads import dflash, fitted_dflash, make_dflash, write_dflash
from eagle3_heads import eagle3, fitted, make_head, write_head
from eagle_heads import eagle, fitted_eagle, make_eagle_head, write_eagle_head
from family_checkpoints import write_family
from medusa_heads import fitted as fitted_heads
from medusa_heads import make_heads, medusa, write_heads
from mixed_rows import PROMPTS, mixed_sampling, whole_texts
from pipelines import make_llm, noisy_copy, run_alone


class Method(NamedTuple):
    """A way to draft.

    Attributes:
        kind: of what drafts; empty where nothing is needed.
        section: of the configuration.
        least: so many draft tokens are accepted of some hundred.
    """

    kind: str
    section: dict[str, Any]
    least: int


_DYNAMIC: dict[str, Any] = {"eagle_topk": 2, "max_total_draft_tokens": 6, "draft_len": 3}
METHODS = {
    "a draft model": Method("model", {"draft_len": 4}, 30),
    "PARD": Method("parallel", {"draft_len": 4}, 10),
    "n-grams": Method("", {"method": "ngram", "draft_len": 4, "prompt_lookup_min": 1, "max_paths": 2}, 0),
    "suffixes": Method("", {"method": "suffix", "draft_len": 4, "max_paths": 2}, 0),
    "lookahead": Method("", {"method": "lookahead", "lookahead_config": [3, 3, 3]}, 0),
    "token recycling": Method("", {"method": "token_recycling", "draft_len": 3, "token_recycling_nodes": 8}, 0),
    "Medusa": Method("medusa", medusa(draft_len=3), 30),
    "EAGLE-1": Method("eagle", eagle(draft_len=3), 30),
    "EAGLE-2": Method("eagle", eagle(**_DYNAMIC), 30),
    "EAGLE-3": Method("eagle3", eagle3(draft_len=3), 30),
    "EAGLE-3, dynamic tree": Method("eagle3", eagle3(**_DYNAMIC), 30),
    "DFlash": Method("dflash", dflash(draft_len=3), 10),
}
"""By name."""


def write_drafter(path: Path, kind: str, target: Path, texts: Sequence[Sequence[int]]) -> None:
    """Write what drafts to `path`, unless it is there; heads are taught texts of the target's, prompts before them."""
    if path.exists():
        return
    if kind in ("model", "parallel"):
        draft = noisy_copy(path, target, 0.02)
        write_config(draft, read_config(draft) | ({"pard_token": 198} if kind == "parallel" else {}))
    elif kind == "medusa":
        write_heads(path, fitted_heads(make_heads(target), target, texts), "vllm")
    elif kind == "eagle":
        write_eagle_head(path, fitted_eagle(make_eagle_head(target, features=768), target, texts), "reference", target)
    elif kind == "dflash":
        write_dflash(path, fitted_dflash(make_dflash(target, "speculators"), target, texts), "speculators", target)
    else:
        head = make_head(target, boundaries=(1, 2, 3), num_tokens=150)
        write_head(path, fitted(head, target, texts), "specforge", target)


def models_of(folder: Path, method: Method) -> dict[str, Path]:
    """What drafts, as `pipelines.configuration` takes it, where `write_drafter` has put it below a folder by kind."""
    if not method.kind:
        return {}
    return {"draft" if method.kind in ("model", "parallel") else "heads": folder / method.kind}


def write_all(folder: Path, family: str) -> None:
    """Write a family's target to `folder`, what drafts for it by every method, and `methods.json`: what stands in a
    configuration for each, with names of directories in `folder`."""
    target = write_family(folder / "target", family, seed=1, dtype=torch.bfloat16, head_dim=32)
    with make_llm(target, dtype="bfloat16") as llm:
        texts = run_alone(llm, PROMPTS, mixed_sampling(30))
    methods = {}
    for name, method in METHODS.items():
        if method.kind:
            write_drafter(folder / method.kind, method.kind, target, whole_texts(texts))
        speculation = {"method": "draft_target", "pacing": "fixed", **method.section}
        has_devices = method.kind in ("model", "parallel")
        methods[name] = {"speculation": speculation, "model": method.kind, "has_devices": has_devices}
    (folder / "methods.json").write_text(json.dumps(methods), encoding="utf-8")


if __name__ == "__main__":
    for name in sys.argv[2:]:
        write_all(Path(sys.argv[1]) / name, name)
