"""What drafts for the targets of families, by method: sections of the configuration, and models and heads that are made
for a target and taught its texts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from decoder_heads import read_config, write_config
from dflash_heads import dflash, fitted_dflash, make_dflash, write_dflash
from eagle3_heads import eagle3, fitted, make_head, write_head
from eagle_heads import eagle, fitted_eagle, make_eagle_head, write_eagle_head
from medusa_heads import fitted as fitted_heads
from medusa_heads import make_heads, medusa, write_heads
from pipelines import noisy_copy


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
