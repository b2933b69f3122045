"""Where output rows go: to a stream in input order, or to a file that loses no finished row to a kill at any byte.

A file is written in completion order to a working file beside it, and replaced in input order at the end. It knows
rows with an index and a hash of their input. It does not know prompts' meaning (rows.py) or who completes them.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

from launch.batch.options import STANDARD_OUTPUT, is_stream
from trtrun.errors import ConfigError

if TYPE_CHECKING:
    from launch.batch.rows import PromptRow


def check_output(path: str) -> None:
    """Raise ConfigError when rows cannot be written to `path`; the file is not touched."""
    if path == STANDARD_OUTPUT:
        return
    file = Path(path)
    folder = file.resolve().parent
    if file.is_dir():
        raise ConfigError(f"cannot write the output file {path}: it is a directory")
    if not folder.is_dir():
        raise ConfigError(f"cannot write the output file {path}: the directory {folder} does not exist")


class RowStream:
    """Writes rows to a stream in input order, each as soon as all before it are there.

    Args:
        path: a pipe or a device, or "-" for standard output.
        rows: all input rows.

    Attributes:
        pending: the rows to run: all.
    """

    def __init__(self, path: str, rows: Sequence[PromptRow]) -> None:
        self.pending = list(rows)
        self._path = path
        self._order = deque(row.index for row in rows)
        self._waiting: dict[int, Mapping[str, object]] = {}
        try:
            self._file: IO[str] = sys.stdout if path == STANDARD_OUTPUT else open(path, "w", encoding="utf-8")  # noqa: SIM115
        except OSError as error:
            raise _cannot_write(path, error) from None

    def write(self, index: int, row: Mapping[str, object]) -> None:
        """Take the row of prompt `index`.

        Raises:
            ConfigError: the stream cannot be written any more.
        """
        self._waiting[index] = row
        try:
            while self._order and self._order[0] in self._waiting:
                self._file.write(json.dumps(self._waiting.pop(self._order.popleft()), ensure_ascii=False) + "\n")
            self._file.flush()
        except OSError as error:
            raise _cannot_write(self._path, error) from None

    def finish(self) -> None:
        """Nothing is left to do after the last row."""

    def close(self) -> None:
        """Close the stream; a row whose predecessors never came is lost with the job that lost them."""
        if self._file is not sys.stdout:
            with suppress(OSError):
                self._file.close()


@dataclass(frozen=True)
class WrittenRow:
    """Where an output row stands in a file.

    Attributes:
        offset, length: in bytes, with its line end.
        input_hash: of its input row.
        is_refused: whether it has an error instead of a completion.
    """

    offset: int
    length: int
    input_hash: str
    is_refused: bool = False


def working_path(output: str) -> Path:
    """The file beside an output file that holds the rows of an unfinished run, in order of completion."""
    file = Path(output).resolve()  # the file that a link names is replaced, not the link
    return file.with_name(file.name + ".partial")


def finished_rows(output: str, rows: Sequence[PromptRow], resume: bool) -> dict[int, WrittenRow]:
    """Rows that an earlier run finished, by index: of the working file, or where there is none of the output file.

    A working file knows all that its run took from the output file, so the two are never mixed.

    Args:
        output: the output file; nothing is changed.
        rows: of the input.
        resume: whether they may be used. If not, an earlier output file is simply to be replaced in the end.

    Raises:
        ConfigError: the file is damaged; the rows are another input's; or an unfinished run is there and `resume` is
            False: going on would lose its rows.
    """
    working, final = working_path(output), Path(output).resolve()
    if working.exists():
        return _read_unfinished(working, rows, resume)[0]
    if not resume or not final.exists():
        return {}
    written, _ = read_written(final)
    _check_same_input(final, written, rows)
    return written


def _read_unfinished(working: Path, rows: Sequence[PromptRow], resume: bool) -> tuple[dict[int, WrittenRow], int]:
    """What `read_written` finds in a working file, once its rows are known to be the input's and wanted."""
    written, end = read_written(working)
    if written and not resume:
        raise ConfigError(
            f"{working} holds {len(written)} finished rows of a run that did not end: go on with --resume, "
            "or remove the file to start over"
        )
    _check_same_input(working, written, rows)
    return written, end


def read_written(path: Path) -> tuple[dict[int, WrittenRow], int]:
    """Finished rows of a file by index, and the number of bytes before its torn last line (all, if none is torn).

    Rows with an error count as not finished.

    Raises:
        ConfigError: see `read_lines`.
    """
    written: dict[int, WrittenRow] = {}
    end = 0
    for index, row in read_lines(path):
        if not row.is_refused:
            written[index] = row
        end = row.offset + row.length
    return written, end


def read_lines(path: Path) -> Iterator[tuple[int, WrittenRow]]:
    """Index and place of each whole row of a file, up to its torn last line.

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
                try:
                    index, digest, error = (json.loads(line)[name] for name in ("index", "input_hash", "error"))
                    is_row = line.endswith(b"\n") and type(index) is int and index >= 0 and isinstance(digest, str)
                except (ValueError, TypeError, LookupError, RecursionError):
                    is_row = False
                if not is_row:
                    raise ConfigError(
                        f"{path}: line {number} is not a whole output row with its input_hash; "
                        "remove that line to run its prompt again"
                    )
                yield index, WrittenRow(offset, len(line), digest, error is not None)
                offset += len(line)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None


_ROW_START = b'{"index": '


def _check_same_input(path: Path, written: Mapping[int, WrittenRow], rows: Sequence[PromptRow]) -> None:
    hashes = {row.index: row.input_hash for row in rows}
    for index in sorted(written):
        if written[index].input_hash != hashes.get(index):
            reason = "is of another input row or sampling options" if index in hashes else "is not in the input"
            raise ConfigError(
                f"cannot resume {path}: its row {index} {reason}; give the same input, or remove the file to start over"
            )


class RowJournal:
    """Keeps finished rows in the working file as they come, and makes the output file of them in the end.

    Each row is one write to the operating system: it outlives this process, however that ends. It is not synced to
    the disk one by one; a host that loses power can lose the last rows, and --resume runs those again. An output file
    that was there before is untouched until the last step replaces it as a whole.

    Args:
        output: the output file.
        rows: all input rows.
        resume: go on from what an earlier run finished.

    Attributes:
        pending: the rows to run.

    Raises:
        ConfigError: see `finished_rows`; or the file cannot be written, or another run is writing it.
    """

    def __init__(self, output: str, rows: Sequence[PromptRow], resume: bool) -> None:
        self._final, self._working = Path(output).resolve(), working_path(output)
        self._hashes = {row.index: row.input_hash for row in rows}
        written = finished_rows(output, rows, resume)
        try:
            if written and not self._working.exists():
                with open(self._final, "rb") as earlier:
                    self._replace(self._working, earlier.fileno(), [written[index] for index in sorted(written)])
            self._file = os.open(self._working, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise _cannot_write(output, error) from None
        try:
            self._lock()
            # Read again: only from here on nobody else writes.
            self._written, self._end = _read_unfinished(self._working, rows, resume)
            os.ftruncate(self._file, self._end)
        except BaseException:
            os.close(self._file)
            raise
        self.pending = [row for row in rows if row.index not in self._written]

    def write(self, index: int, row: Mapping[str, object]) -> None:
        """Take the row of prompt `index`; when this returns, the end of this process cannot lose it any more.

        Raises:
            ConfigError: the file cannot be written any more, such as on a full disk.
        """
        line = (json.dumps(row, ensure_ascii=False) + "\n").encode()
        done = 0
        try:
            while done < len(line):  # one write, unless the system takes less than all
                done += os.write(self._file, line[done:])
        except OSError as error:
            raise _cannot_write(str(self._working), error) from None
        self._written[index] = WrittenRow(self._end, len(line), self._hashes[index])
        self._end += len(line)

    def finish(self) -> None:
        """Put the output file in place, in input order, and remove the working file.

        Raises:
            ConfigError: the output file cannot be written; the rows stay in the working file.
        """
        try:
            self._replace(self._final, self._file, [self._written[index] for index in sorted(self._hashes)])
            self._working.unlink(missing_ok=True)
        except OSError as error:
            raise _cannot_write(str(self._final), error) from None

    def close(self) -> None:
        """Close the working file, and remove it if it holds nothing."""
        if self._end == 0:
            with suppress(OSError):
                self._working.unlink(missing_ok=True)
        os.close(self._file)

    def _replace(self, path: Path, source: int, places: Sequence[WrittenRow]) -> None:
        """Make `path` of these lines of the file `source`."""
        temporary = self._working.with_name(self._working.name + ".new")
        replace_file(path, temporary, (os.pread(source, place.length, place.offset) for place in places))

    def _lock(self) -> None:
        """Two runs on one output would each miss the other's rows. The lock ends with its process."""
        is_free = True
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_free = os.fstat(self._file).st_nlink > 0  # else its owner ended between our opening and locking
        except BlockingIOError:
            is_free = False
        except OSError:  # a file system without locks
            pass
        if not is_free:
            raise ConfigError(f"another run is writing {self._working}: wait for its end")


def replace_file(path: Path, temporary: Path, lines: Iterable[bytes]) -> None:
    """Make `path` of these lines in one step: at any moment it is the old file or the new one, as a whole.

    Raises:
        OSError: it cannot be written; the old file is as it was.
    """
    with open(temporary, "wb") as file:
        file.writelines(lines)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _cannot_write(path: str, error: OSError) -> ConfigError:
    return ConfigError(f"cannot write the output file {path}: {error.strerror}")


def open_writer(output: str, rows: Sequence[PromptRow], resume: bool) -> RowStream | RowJournal:
    """What keeps the rows of a run, by the kind of the output."""
    return RowStream(output, rows) if is_stream(output) else RowJournal(output, rows, resume)
