"""EleutherAI's harness: its scores with drafts of a model, without drafts, and with those of EAGLE-3's head are one. It
starts nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from scripts.clients.real_clients.calls import Call, Client, Place

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
