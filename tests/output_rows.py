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
    """Output rows without the figures that no two runs share: times, and with them how much was drafted in time."""
    kept = [
        {name: value for name, value in row.items() if not name.endswith("_s") and name not in DRAFTING_FIGURES}
        for row in rows
    ]
    return [row | {"completions": without_times(row["completions"])} if "completions" in row else row for row in kept]
