"""`trtrun merge`: the outputs of all parts of a run become one output, in input order.

It knows output rows by their index and the hash of their input. It takes only what is whole: every row, from parts that
are finished. It does not know how rows were made, and reads no model.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from launch.batch.input import InputRows
from launch.batch.journal import check_output, working_path
from launch.batch.options import STANDARD_OUTPUT, is_stream
from launch.batch.rows import without_part_fields
from launch.batch.written import RowTable, WrittenRow, find_difference, read_lines
from launch.exit_codes import FailedError
from trtrun.errors import ConfigError
from trtrun.files import replace_file

_PART_NAME = re.compile(r"(?P<stem>.*)\.part-(?P<number>[0-9]+)-of-(?P<count>[0-9]+)(?P<suffix>\.[^.]*)?")
MOST_NAMED = 5
"""Runs of missing rows that a message names, before it counts the rest."""


def part_path(output: str | os.PathLike[str], number: int, count: int) -> Path:
    """Where part `number` of `count`, from 1, of an output is kept: `out.part-2-of-8.jsonl` for `out.jsonl`."""
    path = Path(output)
    return path.with_name(f"{path.stem}.part-{number}-of-{count}{path.suffix}")


@dataclass(frozen=True)
class Merged:
    """What an output was made of.

    Attributes:
        num_rows: in it.
        num_refused: of them.
        is_end_known: whether it is known that no row is missing behind the last one.
    """

    num_rows: int
    num_refused: int
    is_end_known: bool


def merge_parts(output: str, parts: Sequence[Path], rows: InputRows | None, prompts_file: Path | None = None) -> Merged:
    """Write the rows of all parts to `output`, in input order and, where it is a file, in one step.

    Args:
        output: the file to make or replace, or "-" for standard output.
        parts: output files of runs with --part, or of any runs whose rows complete one another.
        rows: the input, where the parts are to be compared with it.
        prompts_file: of the input, which the output may not replace.

    Raises:
        ConfigError: a part is missing, unfinished or damaged; rows are missing, of another input, or there twice and
            different. Nothing is written then.
        FailedError: writing failed.
    """
    check_output(output, prompts_file)
    _check_parts(output, parts)
    parts = list(dict.fromkeys(parts))
    found = _read_parts(parts)
    if rows is not None:
        _compare(parts, found, rows)
    indexes = _known_indexes(found, rows)
    missing = list(_find_gaps(found, indexes))
    if missing:
        raise ConfigError(f"cannot merge: {_describe_rows(missing)} missing in all parts; {_WAYS_OUT}")
    _write(output, _lines(parts, found))
    refused = [row.is_refused for row in found.distinct_in_order()]
    return Merged(len(refused), sum(refused), indexes is not None or _are_named_as_all(parts))


_WAYS_OUT = "give the output of every part"


def _check_parts(output: str, parts: Sequence[Path]) -> None:
    """Raise ConfigError that names every part that is not there as a whole."""
    target = Path(output).resolve()
    problems = [problem for part in dict.fromkeys(parts) if (problem := _find_problem(part)) is not None]
    if not is_stream(output):
        problems += [f"{part} is the output itself" for part in parts if part.resolve() == target]
        if working_path(output).exists():
            problems.append(f"{working_path(output)} belongs to a run on the output that did not end")
    problems += _absent_parts(parts)
    if problems:
        raise ConfigError(f"cannot merge: {'; '.join(problems)}")


def _find_problem(part: Path) -> str | None:
    working = working_path(str(part))
    if working.exists():
        return f"{part} is not finished: {working.name} is there; run that part again with --resume"
    if not part.exists():
        return f"{part} does not exist; run that part first"
    return None if part.is_file() else f"{part} is not a file"


def _absent_parts(parts: Sequence[Path]) -> list[str]:
    """Parts that the names of the others, where they follow `part_path`, say there must be."""
    given: dict[tuple[Path, int], set[int]] = {}
    for part in parts:
        match = _PART_NAME.fullmatch(part.name)
        if match:
            whole = part.with_name(match["stem"] + (match["suffix"] or ""))
            given.setdefault((whole, int(match["count"])), set()).add(int(match["number"]))
    return [
        f"{part_path(whole, number, count)} is not among the parts"
        for (whole, count), numbers in given.items()
        for number in range(1, count + 1)
        if number not in numbers
    ]


def _read_parts(parts: Sequence[Path]) -> RowTable:
    """Where each row stands; rows that are there twice must be equal."""
    found = RowTable()
    for number, part in enumerate(parts):
        end = 0
        for row in read_lines(part, number):
            found.append(row)
            end = row.offset + row.length
        if end != part.stat().st_size:
            raise ConfigError(f"cannot merge: the last line of {part} is torn; run that part again with --resume")
    earlier: WrittenRow | None = None
    for row in found.in_order():
        if (
            earlier is not None
            and earlier.row_index == row.row_index
            and _content(parts, earlier) != _content(parts, row)
        ):
            one, other = parts[earlier.file], parts[row.file]
            where = f"twice in {one}" if one == other else f"in {one} and in {other}"
            raise ConfigError(f"cannot merge: row {row.row_index} stands {where}, and the two differ; give one of them")
        earlier = row
    return found


def _content(parts: Sequence[Path], row: WrittenRow) -> object:
    """A row without its times, which are no run's like another's, and without what only a part's row has."""
    with open(parts[row.file], "rb") as file:
        return _without_times(json.loads(without_part_fields(os.pread(file.fileno(), row.length, row.offset))))


def _without_times(value: object) -> object:
    if isinstance(value, list):
        return [_without_times(item) for item in value]
    if isinstance(value, dict):
        return {name: _without_times(item) for name, item in value.items() if not name.endswith("_s")}
    return value


def _compare(parts: Sequence[Path], found: RowTable, rows: InputRows) -> None:
    different = find_difference(found, rows)
    if different is not None:
        row, reason = different
        raise ConfigError(
            f"cannot merge: row {row.row_index} of {parts[row.file]} {reason}; "
            "give the prompts and sampling options of the runs"
        )


def _find_gaps(found: RowTable, indexes: range | None) -> Iterator[range]:
    """The runs of indexes without a row: among `indexes`, or before the last row where they are not known."""
    expected = 0 if indexes is None else indexes.start
    for row in found.distinct_in_order():
        if row.row_index > expected:
            yield range(expected, row.row_index)
        expected = row.row_index + 1
    if indexes is not None and expected < indexes.stop:
        yield range(expected, indexes.stop)


def _known_indexes(found: RowTable, rows: InputRows | None) -> range | None:
    """The indexes of the whole input: by itself, or by what the rows of its parts tell; None where neither knows."""
    if rows is not None:
        return rows.indexes
    return range(found.num_input_rows) if found.num_input_rows else None


def _are_named_as_all(parts: Sequence[Path]) -> bool:
    """Whether the names of the parts, none of which is absent, say that there are no others."""
    return all(_PART_NAME.fullmatch(part.name) for part in parts)


def _describe_rows(gaps: Sequence[range]) -> str:
    """`rows 3, 7 to 9 and 12 are`."""
    count = sum(map(len, gaps))
    words = [f"{gap.start}" if len(gap) == 1 else f"{gap.start} to {gap.stop - 1}" for gap in gaps[:MOST_NAMED]]
    if len(gaps) > MOST_NAMED:
        words.append(f"others, {count} in all,")
    listed = words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
    return f"row {listed} is" if count == 1 else f"rows {listed} are"


def _lines(parts: Sequence[Path], found: RowTable) -> Iterator[bytes]:
    """All rows in order, with one part open at a time: an array may have more parts than a process may have files."""
    opened: tuple[int, int] | None = None
    try:
        for row in found.distinct_in_order():
            if opened is None or opened[0] != row.file:
                if opened is not None:
                    os.close(opened[1])
                    opened = None
                opened = (row.file, os.open(parts[row.file], os.O_RDONLY | os.O_CLOEXEC))
            line = without_part_fields(os.pread(opened[1], row.length, row.offset))
            if not (
                line.startswith(b'{"index": %d,' % row.row_index) and line.endswith(b"\n") and line.count(b"\n") == 1
            ):
                raise FailedError(f"{parts[row.file]} was changed while it was merged; merge again")
            yield line
    finally:
        if opened is not None:
            os.close(opened[1])


def _write(output: str, lines: Iterator[bytes]) -> None:
    try:
        if is_stream(output):
            with nullcontext(sys.stdout.buffer) if output == STANDARD_OUTPUT else open(output, "wb") as file:
                file.writelines(lines)
                file.flush()
            return
        target = Path(output).resolve()
        temporary = target.with_name(target.name + ".merging")
        replace_file(target, temporary, lines)
    except BrokenPipeError:
        raise  # the reader is gone: no error of the output
    except OSError as error:
        raise FailedError(f"cannot write the output file {output}: {error.strerror}") from None
