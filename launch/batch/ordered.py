"""Output that is shown in input order as it comes: rows to a stream, or texts to the screen.

A row waits here for those before it, and nothing else is held. It knows output rows. It keeps nothing for --resume:
files are journal.py's.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import IO, Any, Protocol

from launch.batch.input import InputRows
from launch.batch.journal import RowJournal, cannot_write
from launch.batch.options import STANDARD_OUTPUT, is_stream
from launch.batch.rows import encode_row, is_refused


class RowWriter(Protocol):
    """Where the rows of a run go.

    Attributes:
        done: indexes of rows that need not run, or not again.
        num_done_before: how many rows an earlier run finished.
    """

    @property
    def done(self) -> Container[int]:
        """Prompts whose rows are written."""

    @property
    def num_done_before(self) -> int:
        """Rows that an earlier run finished."""

    def write(self, index: int, row: Mapping[str, object]) -> None:
        """Take the row of prompt `index`.

        Raises:
            ConfigError: the output cannot be written any more.
        """

    def finish(self) -> None:
        """All rows are there."""

    def close(self) -> None:
        """Let go of the output, finished or not."""


class _InOrder:
    """Gives rows back in input order, each as soon as all before it are there."""

    def __init__(self, first: int) -> None:
        self._next = first
        self._waiting: dict[int, Mapping[str, Any]] = {}

    def take(self, index: int, row: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        """The rows whose turn it is once this one is there."""
        self._waiting[index] = row
        while self._next in self._waiting:
            yield self._waiting.pop(self._next)
            self._next += 1


class RowStream:
    """Writes rows to a stream in input order, each as soon as all before it are there.

    Args:
        path: a pipe or a device, or "-" for standard output.
        rows: all input rows.
    """

    def __init__(self, path: str, rows: InputRows) -> None:
        self.done: Container[int] = ()
        self.num_done_before = 0
        self._path = path
        self._order = _InOrder(rows.indexes.start)
        try:
            self._file: IO[bytes] = sys.stdout.buffer if path == STANDARD_OUTPUT else open(path, "wb")  # noqa: SIM115
        except OSError as error:
            raise cannot_write(path, error) from None

    def write(self, index: int, row: Mapping[str, object]) -> None:
        """Take the row of prompt `index`.

        Raises:
            ConfigError: the stream cannot be written any more.
        """
        try:
            for ready in self._order.take(index, row):
                self._file.write(encode_row(ready))
            self._file.flush()
        except OSError as error:
            raise cannot_write(self._path, error) from None

    def finish(self) -> None:
        """Nothing is left to do after the last row."""

    def close(self) -> None:
        """Close the stream; a row whose predecessors never came is lost with the job that lost them."""
        if self._path != STANDARD_OUTPUT:
            with suppress(OSError):
                self._file.close()


class TextPrinter:
    """Prints the completions of each prompt under its index, in input order; refused rows have none.

    Args:
        rows: all input rows.
        has_text: whether there is a tokenizer; token ids are printed where there is none.
    """

    def __init__(self, rows: InputRows, has_text: bool) -> None:
        self.done: Container[int] = ()
        self.num_done_before = 0
        self._order = _InOrder(rows.indexes.start)
        self._has_text = has_text

    def write(self, index: int, row: Mapping[str, object]) -> None:
        """Take the row of prompt `index`, and print those whose turn it is."""
        for ready in self._order.take(index, row):
            if not is_refused(ready):
                self._print(ready)
        sys.stdout.flush()

    def finish(self) -> None:
        """Nothing is left to do after the last row."""

    def close(self) -> None:
        """Nothing is held."""

    def _print(self, row: Mapping[str, Any]) -> None:
        if "custom_id" in row:
            print(f"--- {row['index']} ({row['custom_id']})\n{json.dumps(row['response']['body'], ensure_ascii=False)}")
            return
        completions: Sequence[Mapping[str, Any]] = row.get("completions", [row])
        for place, completion in enumerate(completions):
            number = f"{row['index']}" if len(completions) == 1 else f"{row['index']}.{place}"
            print(f"--- {number} ({completion['finish_reason']})")
            print(completion["text"] if self._has_text else join_tokens(completion["token_ids"]))
            self._print_logprobs("token", completion.get("logprobs", ()))
        self._print_logprobs("prompt token", row.get("prompt_logprobs", ())[1:])

    @staticmethod
    def _print_logprobs(name: str, entries: Sequence[Mapping[str, Any]]) -> None:
        for entry in entries:
            alternatives = (f", {token}: {value:.4f}" for token, value in entry["alternatives"])
            print(f"    {name} {entry['token_id']}: logprob {entry['logprob']:.4f}" + "".join(alternatives))


def open_writer(output: str | None, rows: InputRows, resume: bool, has_text: bool = True) -> RowWriter:
    """What takes the rows of a run, by the kind of the output; without one, their texts are printed."""
    if output is None:
        return TextPrinter(rows, has_text)
    return RowStream(output, rows) if is_stream(output) else RowJournal(output, rows, resume)


def join_tokens(tokens: Sequence[int]) -> str:
    """Token ids as text, for a model without a tokenizer."""
    return " ".join(str(token) for token in tokens)
