"""Output rows of `trtrun run` as tests compare them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of a JSON lines file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def without_times(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Output rows without what no two runs share: times, and how much was drafted, which follows from times."""
    kept = [{name: value for name, value in row.items() if not _depends_on_times(name)} for row in rows]
    return [row | {"completions": without_times(row["completions"])} if "completions" in row else row for row in kept]


def _depends_on_times(name: str) -> bool:
    return name.endswith("_s") or name.startswith(("num_", "mean_"))
