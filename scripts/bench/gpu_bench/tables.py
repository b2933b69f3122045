"""Markdown tables that grow row by row, and names of workloads in them. It knows texts and numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Table:
    """A titled table.

    Attributes:
        title: stands above it.
        columns: names.
        rows: cells as texts.
    """

    title: str
    columns: Sequence[str]
    rows: list[list[str]] = field(default_factory=list)

    def add(self, *cells: object) -> None:
        """Add a row; numbers are rounded to what is worth reading, None is an empty cell.

        Raises:
            ValueError: another number of cells than columns.
        """
        if len(cells) != len(self.columns):
            raise ValueError(f"{self.title}: {len(cells)} cells for {len(self.columns)} columns")
        self.rows.append([show(cell) for cell in cells])

    def markdown(self) -> str:
        """The whole table, with its title in bold."""
        lines = ["| " + " | ".join(self.columns) + " |", "|" + "---|" * len(self.columns)]
        return "\n".join([f"**{self.title}**", "", *lines, *("| " + " | ".join(row) + " |" for row in self.rows)])


def show(value: object) -> str:
    """A cell: three digits or more of a number, "yes" or "no", the text itself otherwise."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        size = abs(value)
        return f"{value:.0f}" if size >= 1000 else f"{value:.1f}" if size >= 100 else f"{value:.2f}"
    return str(value).replace("|", "\\|").replace("\n", " ")


def gibibytes(number: float) -> str:
    """Bytes as GiB, or MiB where they are few."""
    return f"{number / 2**30:.2f} GiB" if number >= 2**27 else f"{number / 2**20:.1f} MiB"


def name_workload(entry: dict[str, Any]) -> str:
    """ "8", "8 of 2000 tokens", "8 at 0.8"."""
    name = str(entry["rows"])
    if entry["prompt_tokens"] != 32:
        name += f" of {entry['prompt_tokens']} tokens"
    return name + (f" at {entry['temperature']:g}" if entry["temperature"] else "")
