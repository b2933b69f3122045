"""EleutherAI's harness: its scores with drafts of a model, without drafts, and with those of EAGLE-3's head are one; in
float32 they are those that it has of transformers. It starts nothing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from scripts.clients.real_clients.calls import Call, Client, Place
from trtrun.configuration.model_paths import ASSETS

PROGRAM = Path(__file__).resolve().parent / "harness.py"


def _scores(name: str, *options: str) -> Call:
    def words(place: Place) -> Sequence[object]:
        return (PROGRAM, place.url, place.model, place.tokenizer)

    def check(said: str, place: Place) -> str:
        told = said.strip().splitlines()[-1]
        if json.loads(told)["answers"] < 800:
            return "answers are missing"
        first = place.folder.parent / "scores"  # of the calls before, too
        if not first.exists():
            first.write_text(told, encoding="utf-8")
        before = first.read_text(encoding="utf-8")
        return "" if told == before else f"the scores are others than before: {before}"

    return Call(name, words, check, [word for option in options for word in ("--set", option)])


def _beside(name: str, directory: Path, *options: str) -> Call:
    """The harness with a model in float32, and with transformers on the same directory."""

    def words(place: Place) -> Sequence[object]:
        return (PROGRAM, place.url, place.model, directory, directory)

    def check(said: str, place: Place) -> str:
        told = json.loads(said.strip().splitlines()[-1])
        return f"other than transformers: {told['different'][:3]}" if told["different"] or not told["answers"] else ""

    options = (*options, f"tokenizer={directory}", "target.dtype=float32", "draft.dtype=float32")
    return Call(name, words, check, [word for option in options for word in ("--set", option)])


def _real_models() -> list[Call]:
    """Of what scripts/dev/real_models.sh makes, where TRTRUN_REAL_MODELS names that."""
    folder = os.environ.get("TRTRUN_REAL_MODELS")
    if not folder:
        return []
    model = Path(folder).resolve() / "smollm2-135m"
    return [_beside("SmolLM2 beside transformers", model, f"target.model={model}", f"draft.model={model}")]


HARNESS = Client(
    "EleutherAI's lm_eval",
    "0.4.13",
    [
        _scores("local-completions, local-chat-completions"),
        _scores("the same with method none", "speculation.method=none"),
        _scores("the same with method eagle3", "speculation.method=eagle3", "draft={model: 'asset:eagle3'}"),
    ],
    ["lm_eval[api]==0.4.13", "transformers>=5,<6"],
)
HARNESS_BESIDE = Client(
    "EleutherAI's lm_eval and its hf",
    "0.4.13",
    [_beside("the pair beside transformers", ASSETS / "target"), *_real_models()],
    ["lm_eval[api,hf]==0.4.13", "transformers>=5,<6"],
)
"""Apart, as this one's environment has torch: gigabytes."""
