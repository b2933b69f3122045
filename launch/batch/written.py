"""Rows that stand in output files already: found, checked for damage, and remembered in a few bytes each.

It knows lines with an index and a hash of their input. It does not know how rows come about, or who writes the files
(journal.py, merge.py).
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from launch.batch.input import InputRows
from launch.batch.rows import NUM_INPUT_ROWS, is_refused
from trtrun.errors import ConfigError

_ROW_START = b'{"index": '
_HASH = re.compile(r"[0-9a-f]{16}")


class WrittenRow(NamedTuple):
    """Where an output row stands.

    Attributes:
        row_index: of its prompt.
        offset, length: in bytes, with its line end.
        input_hash: of its input row.
        is_refused: whether it has an error instead of a completion.
        file: number of its file, where there are several.
        num_input_rows: rows of the whole input, as the row of a part tells it; 0 where it does not.
    """

    row_index: int
    offset: int
    length: int
    input_hash: int
    is_refused: bool = False
    file: int = 0
    num_input_rows: int = 0


class RowTable:
    """Places of output rows, in arrays: millions of them fit."""

    def __init__(self) -> None:
        self._columns = tuple(array(kind) for kind in "qqqQBiq")

    def __len__(self) -> int:
        """How many there are, an index that stands twice counted twice."""
        return len(self._columns[0])

    def append(self, row: WrittenRow) -> None:
        """Take in a row."""
        for column, value in zip(self._columns, row, strict=True):
            column.append(value)

    def __getitem__(self, position: int) -> WrittenRow:
        index, offset, length, digest, is_refused, file, num_input_rows = (column[position] for column in self._columns)
        return WrittenRow(index, offset, length, digest, bool(is_refused), file, num_input_rows)

    @property
    def num_input_rows(self) -> int:
        """Rows of the whole input, as far as its parts tell: the most of them, as it may have grown since."""
        return max(self._columns[-1], default=0)

    def in_order(self) -> Iterator[WrittenRow]:
        """The rows by index; those of the same index in the order in which they were taken in."""
        for position in np.argsort(np.array(self._columns[0]), kind="stable"):
            yield self[int(position)]

    def distinct_in_order(self) -> Iterator[WrittenRow]:
        """The rows by index, of the same index the one that was taken in first."""
        last: int | None = None
        for row in self.in_order():
            if row.row_index != last:
                yield row
            last = row.row_index


class IndexSet:
    """Which of a range of indexes are in, a byte each."""

    def __init__(self, indexes: range) -> None:
        self._start = indexes.start
        self._marks = bytearray(len(indexes))
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, index: object) -> bool:
        return isinstance(index, int) and bool(self._marks[index - self._start])

    def add(self, index: int) -> None:
        """Put an index of the range in."""
        self._count += not self._marks[index - self._start]
        self._marks[index - self._start] = 1


def read_lines(path: Path, file_number: int = 0) -> Iterator[WrittenRow]:
    """The place of each whole row of a file, up to its torn last line.

    A line is torn when it is the last, lacks its line end and begins as an output row begins.

    Raises:
        ConfigError: the file cannot be read, or another line is not an output row.
    """
    offset = 0
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n") and line[: len(_ROW_START)] == _ROW_START[: len(line)]:
                    return
                row = _read_row(line, offset, file_number)
                if row is None:
                    raise ConfigError(
                        f"{path}: line {number} is not a whole output row with its input_hash; "
                        "remove that line to run its prompt again"
                    )
                yield row
                offset += len(line)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None


def _read_row(line: bytes, offset: int, file_number: int) -> WrittenRow | None:
    try:
        values = json.loads(line)
        index, digest = values["index"], values["input_hash"]
        total = values.get(NUM_INPUT_ROWS, 0)
        numbers = (index, total)
        is_row = line.endswith(b"\n") and all(type(number) is int and 0 <= number < 2**63 for number in numbers)
        refused = is_refused(values)
        is_row = is_row and _HASH.fullmatch(digest) is not None
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return None
    if not is_row:
        return None
    return WrittenRow(index, offset, len(line), int(digest, 16), refused, file_number, total)


def read_written(path: Path) -> tuple[RowTable, int]:
    """Finished rows of a file, and the number of bytes before its torn last line (all, if none is torn).

    Rows with an error count as not finished.

    Raises:
        ConfigError: see `read_lines`.
    """
    written = RowTable()
    end = 0
    for row in read_lines(path):
        if not row.is_refused:
            written.append(row)
        end = row.offset + row.length
    return written, end


def find_difference(written: RowTable, rows: InputRows) -> tuple[WrittenRow, str] | None:
    """The first written row that is not of this input, and what is wrong with it; None where all are its rows.

    Of the input, only rows that are written are looked at.
    """
    if not len(written):
        return None
    indexes, outside = rows.indexes, None
    marks = IndexSet(indexes)
    for place in written.distinct_in_order():
        if place.row_index in indexes:
            marks.add(place.row_index)
        elif outside is None:
            outside = place
    inside = (place for place in written.distinct_in_order() if place.row_index in indexes)
    for place, row in zip(inside, rows.read(marks.__contains__), strict=True):
        if outside is not None and outside.row_index < place.row_index:
            break
        if place.input_hash != int(row.input_hash, 16):
            return place, "is of another input row or sampling options"
    return None if outside is None else (outside, "is not in the input")
