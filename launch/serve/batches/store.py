"""Files and batches on a directory of one server's own: what is written there outlives the server, however it ends.

    lock                            held by the server that has the directory
    files/ID.json, files/ID         of each file what is known, and its content
    batches/ID.json                 of each batch what is known
    batches/ID.output, ID.error     of one that is not over its lines so far, in the order in which they were done

A JSON file is replaced as a whole. Lines are single writes, of which a kill may tear the last one. Only files and
batches that are known are looked up: an id never becomes a path unless the server has made it.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import msgspec

from launch.serve.admission.refusals import Kind, Refusal
from launch.serve.batches.records import BatchRecord, FileRecord, output_id
from launch.serve.batches.rows import ERRORS, OUTPUT
from trtrun.errors import ConfigError, shorten_path
from trtrun.files import replace_file

KEY = "server.batch_directory"
_UPLOADED = ".part"
_SUFFIX = ".json"
_MODE = 0o700
_THREADS = 4

T = TypeVar("T")
RecordT = TypeVar("RecordT", FileRecord, BatchRecord)

logger = logging.getLogger(__name__)


def prepare_directory(directory: Path) -> Path:
    """Make the directory where there is none.

    Returns:
        Its path from the root.

    Raises:
        ConfigError: it cannot be used, or is open to others.
    """
    try:
        directory = Path(os.path.realpath(directory))
        directory.mkdir(mode=_MODE, parents=True, exist_ok=True)
        mode = directory.stat().st_mode
        for name in ("files", "batches"):
            (directory / name).mkdir(mode=_MODE, exist_ok=True)
            tried = directory / name / f"{os.getpid()}{_UPLOADED}"
            tried.touch()
            tried.unlink()
    except FileExistsError as error:
        raise ConfigError(f"{KEY}: {shorten_path(Path(error.filename))} is there, and is no directory") from None
    except OSError as error:
        line = f"cannot use {shorten_path(directory)}: {error.strerror}; it must be a directory to write to"
        raise ConfigError(f"{KEY}: {line}") from None
    if mode & 0o077:
        raise ConfigError(f"{KEY}: {shorten_path(directory)} is open to other users: chmod 700 it")
    return directory


class BatchStore:
    """What is kept, as the event loop knows it. Changes are written by other threads, one after the other.

    Attributes:
        files, batches: by their ids, the oldest first.
    """

    def __init__(
        self, directory: Path, output_seconds: int | None = None, now: Callable[[], float] = time.time
    ) -> None:
        """Know nothing yet.

        Args:
            directory: that is prepared.
            output_seconds: for how long the output is kept of batches that do not say it, and what is known of a batch
                that is over; None for ever.
            now: seconds since the epoch.
        """
        self.now = now
        self._output_seconds = output_seconds
        self.files: dict[str, FileRecord] = {}
        self.batches: dict[str, BatchRecord] = {}
        self._directory = directory
        self._lock: int | None = None
        self._writing = asyncio.Lock()
        self._threads = ThreadPoolExecutor(_THREADS, "batches")

    async def aside(self, work: Callable[..., T], *arguments: object) -> T:
        """Do what may take long, in a thread: those are few, and no other request waits for one."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)

    def take(self) -> bool:
        """Take the directory, unless another server has it, and read what is there; whether it is taken.

        Raises:
            OSError: it cannot be read.
        """
        lock = os.open(self._directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return False
        except OSError:
            logger.warning("%s: the file system has no locks: no other server may have this directory", KEY)
        self._lock = lock
        try:
            self._read()
        except OSError:
            self.let_go()
            raise
        return True

    def let_go(self) -> None:
        """Let another server have it; calling it again does nothing."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _read(self) -> None:
        for torn in [*self._files_dir.glob(f"*{_UPLOADED}"), *self._directory.glob("*/*.new")]:
            torn.unlink(missing_ok=True)
        files = _read_records(self._files_dir, FileRecord)
        self.files = {file.id: file for file in files if self.content_path(file.id).is_file()}
        self.batches = {batch.id: batch for batch in _read_records(self._directory / "batches", BatchRecord)}

    @property
    def _files_dir(self) -> Path:
        return self._directory / "files"

    def content_path(self, file_id: str) -> Path:
        """Where a known file's content is."""
        return self._files_dir / file_id

    def upload_path(self, file_id: str) -> Path:
        """Where a content is while it comes."""
        return self._files_dir / f"{file_id}{_UPLOADED}"

    def _record_path(self, batch_id: str) -> Path:
        return self._directory / "batches" / f"{batch_id}{_SUFFIX}"

    def lines_path(self, batch_id: str, kind: str) -> Path:
        """Where the lines of a batch are that is not over."""
        return self._directory / "batches" / f"{batch_id}.{kind}"

    def find_file(self, file_id: str, owner: str, field: str = "id") -> FileRecord:
        """A file of an owner; `field` is where a client names it.

        Raises:
            Refusal: there is none.
        """
        file = self.files.get(file_id)
        if file is None or file.owner != owner or self._has_expired(file):
            raise Refusal(Kind.UNKNOWN_MODEL, "there is no such file, or it is another key's, or has expired", field)
        return file

    def files_of(self, owner: str) -> list[FileRecord]:
        """All files of an owner, the oldest first."""
        return [file for file in self.files.values() if file.owner == owner and not self._has_expired(file)]

    def find_batch(self, batch_id: str, owner: str) -> BatchRecord:
        """A batch of an owner.

        Raises:
            Refusal: there is none.
        """
        batch = self.batches.get(batch_id)
        if batch is None or batch.owner != owner:
            raise Refusal(Kind.UNKNOWN_MODEL, "there is no such batch, or it is another key's", "id")
        return batch

    def _has_expired(self, file: FileRecord) -> bool:
        return file.expires_at is not None and file.expires_at <= self.now()

    def user_of(self, file_id: str) -> BatchRecord | None:
        """The batch that is not over and reads a file; None where none does."""
        return next((one for one in self.batches.values() if one.input_file_id == file_id and not one.is_over), None)

    async def add_file(self, file: FileRecord, content: Path) -> None:
        """Keep a file, whose content is moved from where it is.

        Raises:
            OSError: it cannot be written.
        """
        file.kept_since = self.now()
        record = msgspec.json.encode(file)

        def write() -> None:
            # First what is known: a file without content is none, and content alone would stay for ever.
            _replace(self._files_dir / f"{file.id}{_SUFFIX}", record)
            os.replace(content, self.content_path(file.id))

        async with self._writing:
            await self.aside(write)
        self.files[file.id] = file

    async def remove_file(self, file_id: str) -> None:
        """Forget a file and its content."""
        self.files.pop(file_id, None)
        async with self._writing:
            for path in (self.content_path(file_id), self._files_dir / f"{file_id}{_SUFFIX}"):
                await self.aside(path.unlink, True)

    async def remove_expired(self) -> None:
        """Forget the files whose time is over, but for those that batches still read; and batches whose time is over
        and whose output is gone."""
        for file in [file for file in self.files.values() if self._has_expired(file)]:
            if self.user_of(file.id) is None:
                await self.remove_file(file.id)
        if self._output_seconds is not None:
            last = self.now() - self._output_seconds
            for batch in [one for one in self.batches.values() if one.is_over and one.changed_at <= last]:
                if not {batch.output_file_id, batch.error_file_id} & self.files.keys():
                    await self._remove_batch(batch)

    async def _remove_batch(self, batch: BatchRecord) -> None:
        del self.batches[batch.id]
        lines = [self.lines_path(batch.id, kind) for kind in (OUTPUT, ERRORS)]  # of one that has failed, on a full disk
        async with self._writing:
            for path in (*lines, self._record_path(batch.id)):
                await self.aside(path.unlink, True)

    async def save_end(self, batch: BatchRecord, status: str) -> None:
        """Keep a batch with its last status; clients are told that once it is on the disk.

        Raises:
            OSError: it cannot be written.
        """
        ended = msgspec.structs.replace(batch, times=dict(batch.times))
        ended.move_to(status, self.now())
        await self.save(ended)

    async def save(self, batch: BatchRecord) -> None:
        """Keep a batch as it is now.

        Raises:
            OSError: it cannot be written.
        """
        batch.kept_since = batch.kept_since or self.now()
        record = msgspec.json.encode(batch)
        async with self._writing:
            await self.aside(_replace, self._record_path(batch.id), record)
        self.batches[batch.id] = batch

    async def keep_lines(self, batch: BatchRecord) -> None:
        """Make files of a batch's lines, which the batch then names; doing it again, where that was interrupted, makes
        the same ones.

        Raises:
            OSError: they cannot be written.
        """
        for kind, field in ((OUTPUT, "output_file_id"), (ERRORS, "error_file_id")):
            lines, file_id = self.lines_path(batch.id, kind), output_id(batch.id, kind)
            if await self.aside(_sync, lines):
                created = int(self.now())
                seconds = self._output_seconds if batch.output_seconds is None else batch.output_seconds
                expires_at = None if seconds is None else created + seconds
                size, name = lines.stat().st_size, f"{batch.id}_{kind}.jsonl"
                await self.add_file(
                    FileRecord(file_id, name, "batch_output", size, created, batch.owner, expires_at), lines
                )
            setattr(batch, field, file_id if file_id in self.files else None)

    async def take_back_lines(self, batch: BatchRecord) -> None:
        """Undo `keep_lines` of a batch that is not over: a kill came before the batch named its files.

        Raises:
            OSError: they cannot be moved.
        """
        for kind in (OUTPUT, ERRORS):
            file = self.files.get(output_id(batch.id, kind))
            if file is not None:
                async with self._writing:
                    await self.aside(os.replace, self.content_path(file.id), self.lines_path(batch.id, kind))
                await self.remove_file(file.id)


def _read_records(folder: Path, kind: type[RecordT]) -> list[RecordT]:
    """All records of a folder, the oldest first; one that cannot be read is passed over, with a line in the log."""
    found: list[RecordT] = []
    for path in folder.glob(f"*{_SUFFIX}"):
        try:
            record = msgspec.json.decode(path.read_bytes(), type=kind)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            logger.warning("%s: %s is passed over: %s", KEY, path, error)
            continue
        found += [record] if path.stem == record.id else []
    return sorted(found, key=lambda record: (record.created_at, record.kept_since))


def _replace(path: Path, content: bytes) -> None:
    replace_file(path, path.with_name(f"{path.name}.new"), [content], 0o600)


def _sync(path: Path) -> bool:
    """Have the disk keep a file; whether there is anything in it. An empty one is removed."""
    try:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            is_there = os.fstat(file.fileno()).st_size > 0
    except FileNotFoundError:
        return False
    if not is_there:
        path.unlink()
    return is_there
