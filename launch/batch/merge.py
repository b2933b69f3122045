"""`trtrun merge`: the outputs of all parts of a run become one output, in input order.

It knows output rows by their index and the hash of their input. It takes only what is whole: every row, from parts that
are finished. It does not know how rows were made, and reads no model.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from launch.batch.journal import WrittenRow, check_output, read_lines, replace_file, working_path
from launch.batch.options import STANDARD_OUTPUT, is_stream
from launch.exit_codes import FailedError
from trtrun.errors import ConfigError

if TYPE_CHECKING:
    from launch.batch.rows import PromptRow

_PART_NAME = re.compile(r"(?P<stem>.*)\.part-(?P<number>[0-9]+)-of-(?P<count>[0-9]+)(?P<suffix>\.[^.]*)?")
MOST_NAMED = 5
"""Runs of missing rows that a message names, before it counts the rest."""


class _Place(NamedTuple):
    part: Path
    row: WrittenRow


def part_path(output: str | os.PathLike[str], number: int, count: int) -> Path:
    """Where part `number` of `count`, from 1, of an output is kept: `out.part-2-of-8.jsonl` for `out.jsonl`."""
    path = Path(output)
    return path.with_name(f"{path.stem}.part-{number}-of-{count}{path.suffix}")


def merge_parts(output: str, parts: Sequence[Path], rows: Sequence[PromptRow] | None) -> tuple[int, int]:
    """Write the rows of all parts to `output`, in input order and, where it is a file, in one step.

    Args:
        output: the file to make or replace, or "-" for standard output.
        parts: output files of runs with --part, or of any runs whose rows complete one another.
        rows: the input, where the parts are to be compared with it.

    Returns:
        The number of rows, and how many of them were refused.

    Raises:
        ConfigError: a part is missing, unfinished or damaged; rows are missing, of another input, or there twice and
            different. Nothing is written then.
        FailedError: writing failed.
    """
    check_output(output)
    _check_parts(output, parts)
    places = _read_parts(parts)
    if rows is not None:
        _compare(places, rows)
    missing = sorted(set(row.index for row in rows) - set(places)) if rows is not None else _gaps(places)
    if missing:
        raise ConfigError(f"cannot merge: {_describe_rows(missing)} missing in all parts; {_WAYS_OUT}")
    _write(output, _lines(places))
    return len(places), sum(place.row.is_refused for place in places.values())


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


def _read_parts(parts: Sequence[Path]) -> dict[int, _Place]:
    """Where each row stands; rows that are there twice must be equal."""
    places: dict[int, _Place] = {}
    for part in dict.fromkeys(parts):
        end = 0
        for index, row in read_lines(part):
            place = _Place(part, row)
            end = row.offset + row.length
            earlier = places.setdefault(index, place)
            if earlier is not place and _content(earlier) != _content(place):
                where = f"twice in {part}" if earlier.part == part else f"in {earlier.part} and in {part}"
                raise ConfigError(f"cannot merge: row {index} stands {where}, and the two differ; give one of them")
        if end != part.stat().st_size:
            raise ConfigError(f"cannot merge: the last line of {part} is torn; run that part again with --resume")
    return places


def _content(place: _Place) -> object:
    """A row without its times, which are no run's like another's."""
    return _without_times(json.loads(_read_line(place)))


def _without_times(value: object) -> object:
    if isinstance(value, list):
        return [_without_times(item) for item in value]
    if isinstance(value, dict):
        return {name: _without_times(item) for name, item in value.items() if not name.endswith("_s")}
    return value


def _compare(places: dict[int, _Place], rows: Sequence[PromptRow]) -> None:
    hashes = {row.index: row.input_hash for row in rows}
    for index, place in sorted(places.items()):
        if hashes.get(index) != place.row.input_hash:
            reason = "is of another input row or sampling options" if index in hashes else "is not in the input"
            raise ConfigError(
                f"cannot merge: row {index} of {place.part} {reason}; give the prompts and sampling options of the runs"
            )


def _gaps(places: Iterable[int]) -> list[int]:
    found = set(places)
    return sorted(set(range(max(found, default=-1) + 1)) - found)


def _describe_rows(indexes: Sequence[int]) -> str:
    """`rows 3, 7 to 9 and 12 are`, for sorted indexes."""
    runs: list[list[int]] = []
    for index in indexes:
        if runs and index == runs[-1][-1] + 1:
            runs[-1][1:] = [index]
        else:
            runs.append([index])
    words = [" to ".join(str(index) for index in run) for run in runs[:MOST_NAMED]]
    if len(runs) > MOST_NAMED:
        words.append(f"others, {len(indexes)} in all,")
    listed = words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
    return f"row {listed} is" if len(indexes) == 1 else f"rows {listed} are"


def _read_line(place: _Place) -> bytes:
    with open(place.part, "rb") as file:
        return os.pread(file.fileno(), place.row.length, place.row.offset)


def _lines(places: dict[int, _Place]) -> Iterator[bytes]:
    """All rows in order, with one part open at a time: an array may have more parts than a process may have files."""
    opened: tuple[Path, int] | None = None
    try:
        for index in sorted(places):
            part, row = places[index]
            if opened is None or opened[0] != part:
                if opened is not None:
                    os.close(opened[1])
                opened = (part, os.open(part, os.O_RDONLY | os.O_CLOEXEC))
            line = os.pread(opened[1], row.length, row.offset)
            if not (line.startswith(b'{"index": %d,' % index) and line.endswith(b"\n") and line.count(b"\n") == 1):
                raise FailedError(f"{part} was changed while it was merged; merge again")
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
        try:
            replace_file(target, temporary, lines)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise
    except BrokenPipeError:
        raise  # the reader is gone: no error of the output
    except OSError as error:
        raise FailedError(f"cannot write the output file {output}: {error.strerror}") from None
