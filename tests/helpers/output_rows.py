"""Output rows of `trtrun run` as tests compare them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

DRAFTING_FIGURES = frozenset(
    {"num_rounds", "num_draft_tokens", "num_accepted_draft_tokens", "mean_acceptance_length", "draft_hit_rate"}
)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of a JSON lines file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def without_times(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Output rows without the figures that no two runs share.

    How much was drafted stays: runs that are compared set `speculation.pacing` to `fixed`, as it follows from
    times otherwise.
    """
    kept = [{name: value for name, value in row.items() if not name.endswith("_s")} for row in rows]
    return [row | {"completions": without_times(row["completions"])} if "completions" in row else row for row in kept]


def without_drafting(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same without how much was drafted, too: a draft rank with a device of its own may come too late in any
    round, and the target goes on without it."""
    kept = [{name: value for name, value in row.items() if name not in DRAFTING_FIGURES} for row in without_times(rows)]
    return [
        row | {"completions": without_drafting(row["completions"])} if "completions" in row else row for row in kept
    ]
