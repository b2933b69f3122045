"""What `trtrun run` shows beside the rows of its output: refusals, and the line at its end.

It knows wording. It does not know how rows come about (run.py) or where they are kept (journal.py).
"""

from __future__ import annotations

import sys
from bisect import insort
from collections.abc import Mapping, Sequence
from typing import Any

from launch.batch.rows import MOST_OF_AN_ERROR, PromptRow
from trtrun.core.values import cut_text

MOST_REFUSALS = 20
"""Refusals that are told one by one; the others are counted."""


def join_tokens(tokens: Sequence[int]) -> str:
    """Token ids as text, for a model without a tokenizer."""
    return " ".join(str(token) for token in tokens)


def tell(line: str) -> None:
    """Say one line to the user."""
    print(f"trtrun: {line}", file=sys.stderr, flush=True)


class Refusals:
    """Why rows were refused: the first few in input order, and how many there are."""

    def __init__(self) -> None:
        self._first: list[tuple[int, str]] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, row: PromptRow, error: str) -> None:
        """Take in why a row was refused."""
        self._count += 1
        insort(self._first, (row.index, f"{row.name} refused: {cut_text(error, MOST_OF_AN_ERROR)}"))
        del self._first[MOST_REFUSALS:]

    def tell(self, has_rows: bool) -> None:
        """Say them to the user; `has_rows` says whether there are output rows that say the rest."""
        for _, line in self._first:
            tell(line)
        if self._count > len(self._first):
            where = ": the `error` of each output row says why" if has_rows else ""
            tell(f"{self._count - len(self._first)} more rows were refused{where}")


def summarize(num_rows: int, refused: int, elapsed: float, statistics: Mapping[str, Any]) -> str:
    """The figures of a run that came to its end; `elapsed` is in seconds, without loading."""
    tokens = statistics["num_tokens"]
    prompts = "1 prompt" if num_rows == 1 else f"{num_rows} prompts"
    line = f"{prompts}, {tokens} tokens in {elapsed:.2f} s ({tokens / max(elapsed, 1e-9):.1f} tokens/s)"
    if statistics["num_draft_tokens"]:
        line += f", mean acceptance length {statistics['mean_acceptance_length']:.2f}"
    line += f", {statistics['num_rounds']} rounds"
    if statistics["draft_losses"]:
        line += ", without drafts from the loss of the draft on"
    return line + (f", {refused} refused" if refused else "")


def describe_drain(cause: str | None, num_done: int, num_rows: int) -> str:
    """What a drained run leaves, and how to go on."""
    return (
        f"drained after {cause}: {num_done} of {num_rows} rows are done, {num_rows - num_done} are left; "
        "the same command with --resume runs them"
    )
