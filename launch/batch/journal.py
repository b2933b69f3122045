"""Where output rows of a file go: nothing finished is lost to a kill at any byte.

A file is written in completion order to a working file beside it, and replaced in input order at the end. It knows
rows with an index and a hash of their input. It does not know prompts' meaning (rows.py) or who completes them; outputs
that are no files are ordered.py's.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from launch.batch.input import InputRows
from launch.batch.options import STANDARD_OUTPUT
from launch.batch.rows import encode_row, is_refused
from launch.batch.written import IndexSet, RowTable, WrittenRow, find_difference, read_written
from trtrun.errors import ConfigError
from trtrun.files import replace_file, write_all


def check_output(path: str, prompts_file: Path | None = None) -> None:
    """Raise ConfigError when rows cannot be written to `path`; the file is not touched.

    Args:
        path: of the output.
        prompts_file: of the input, which no output may replace.
    """
    if path == STANDARD_OUTPUT:
        return
    try:
        file = Path(path)
        folder = file.resolve().parent
        if file.is_dir():
            raise ConfigError(f"cannot write the output file {path}: it is a directory")
        if not folder.is_dir():
            raise ConfigError(f"cannot write the output file {path}: the directory {folder} does not exist")
        for written in (file, working_path(path), _temporary_path(path)):
            if prompts_file is not None and _is_same_file(written, prompts_file):
                what = "it is" if written == file else f"{written} beside it is"
                raise ConfigError(f"cannot write the output file {path}: {what} the input; name another output")
    except OSError as error:
        raise ConfigError(f"cannot write the output file {path}: {error.strerror}") from None


def _is_same_file(one: Path, other: Path) -> bool:
    """Whether two names, of which the first may be of nothing yet, are of one file."""
    return one.exists() and other.exists() and one.samefile(other)


def working_path(output: str) -> Path:
    """The file beside an output file that holds the rows of an unfinished run, in order of completion."""
    file = Path(output).resolve()  # the file that a link names is replaced, not the link
    return file.with_name(file.name + ".partial")


def _temporary_path(output: str) -> Path:
    """The file beside an output file that is about to take another's place."""
    working = working_path(output)
    return working.with_name(working.name + ".new")


def finished_rows(output: str, rows: InputRows, resume: bool) -> RowTable:
    """Rows that an earlier run finished: of the working file, or where there is none of the output file.

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
        return RowTable()
    written, _ = read_written(final)
    _check_same_input(final, written, rows)
    return written


def _read_unfinished(working: Path, rows: InputRows, resume: bool) -> tuple[RowTable, int]:
    """What `read_written` finds in a working file, once its rows are known to be the input's and wanted."""
    written, end = read_written(working)
    if len(written) and not resume:
        raise ConfigError(
            f"{working} holds {len(written)} finished rows of a run that did not end: go on with --resume, "
            "or remove the file to start over"
        )
    _check_same_input(working, written, rows)
    return written, end


def _check_same_input(path: Path, written: RowTable, rows: InputRows) -> None:
    different = find_difference(written, rows)
    if different is not None:
        row, reason = different
        raise ConfigError(
            f"cannot resume {path}: its row {row.row_index} {reason}; "
            "give the same input, or remove the file to start over"
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
        done: the rows that are finished, among them those of an earlier run.
        num_done_before: how many an earlier run finished.

    Raises:
        ConfigError: see `finished_rows`; or the file cannot be written, or another run is writing it.
    """

    def __init__(self, output: str, rows: InputRows, resume: bool) -> None:
        self._final, self._working = Path(output).resolve(), working_path(output)
        self._temporary = _temporary_path(output)
        written = finished_rows(output, rows, resume)
        try:
            if len(written) and not self._working.exists():
                with open(self._final, "rb") as earlier:
                    self._replace(self._working, earlier.fileno(), written)
            self._file = os.open(self._working, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise cannot_write(output, error) from None
        try:
            self._lock()
            # Read again: only from here on nobody else writes.
            self._written, self._end = _read_unfinished(self._working, rows, resume)
            os.ftruncate(self._file, self._end)
            self.done = IndexSet(rows.indexes)
            for row in self._written.in_order():
                self.done.add(row.row_index)
        except BaseException:
            os.close(self._file)
            raise
        self.num_done_before = len(self.done)
        self._num_rows = len(rows)

    def write(self, index: int, row: Mapping[str, object]) -> None:
        """Take the row of prompt `index`; when this returns, the end of this process cannot lose it any more.

        Raises:
            ConfigError: the file cannot be written any more, such as on a full disk.
        """
        line = encode_row(row)
        try:
            write_all(self._file, line)
        except OSError as error:
            raise cannot_write(str(self._working), error) from None
        digest = int(str(row["input_hash"]), 16)
        self._written.append(WrittenRow(index, self._end, len(line), digest, is_refused(row)))
        self.done.add(index)
        self._end += len(line)

    def finish(self) -> None:
        """Put the output file in place, in input order, and remove the working file.

        Raises:
            ConfigError: the output file cannot be written; the rows stay in the working file.
        """
        if len(self.done) != self._num_rows:
            raise RuntimeError(f"{len(self.done)} of {self._num_rows} rows are finished")
        try:
            self._replace(self._final, self._file, self._written)
            self._working.unlink(missing_ok=True)
        except OSError as error:
            raise cannot_write(str(self._final), error) from None

    def close(self) -> None:
        """Close the working file, and remove it if it holds nothing."""
        if self._end == 0:
            with suppress(OSError):
                self._working.unlink(missing_ok=True)
        os.close(self._file)

    def _replace(self, path: Path, source: int, written: RowTable) -> None:
        """Make `path` of these lines of the file `source`, by index."""
        replace_file(path, self._temporary, _read_in_order(source, written))

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


def _read_in_order(source: int, written: RowTable) -> Iterator[bytes]:
    for row in written.distinct_in_order():
        yield os.pread(source, row.length, row.offset)


def cannot_write(path: str, error: OSError) -> ConfigError:
    """The refusal of an output that the system does not let us write."""
    return ConfigError(f"cannot write the output file {path}: {error.strerror}")
