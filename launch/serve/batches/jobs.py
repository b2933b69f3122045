"""One batch that is run: its rows that are not done are answered in their turn, each becomes a line on disk, and those
that never ran are told at the end.

It does not know which batches there are, or when one is over.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from launch.serve.admission.control import AdmissionControl
from launch.serve.admission.refusals import RESTART_RETRY_SECONDS, Kind, Refusal
from launch.serve.batches.line_file import LineFile
from launch.serve.batches.records import BatchRecord
from launch.serve.batches.rows import (
    ERRORS,
    OUTPUT,
    BatchRow,
    answered_row,
    read_rows,
    refused_row,
    row_not_run,
)
from launch.serve.batches.store import BatchStore

_ROWS_READ, _BYTES_READ = 64, 1 << 20
"""Of the input, that are read ahead."""

_LOOK_SECONDS = 0.1
"""How often it is looked whether others have left."""

logger = logging.getLogger(__name__)


class RowTurns:
    """Lets rows begin behind all other requests, and yet in the end; batches in turn. It belongs to one event loop.

    Rows take the places of the running batch that others leave free, as many as there are, and one at least. What has
    begun goes on; where others want rows it gets no more than any other client (`trtrun.scheduling.queue`).

    Attributes:
        num_running: rows that have begun.
    """

    def __init__(self, admission: AdmissionControl) -> None:
        self.num_running = 0
        self._admission = admission
        self._turn = asyncio.Lock()  # first come, first served: each batch asks for one row at a time
        self._changed = asyncio.Event()

    async def begin(self) -> None:
        """Wait for a place; `end` gives it back."""
        async with self._turn:
            while not self._has_room():
                self._changed.clear()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), _LOOK_SECONDS)
            self.num_running += 1

    def end(self) -> None:
        """A row is over."""
        self.num_running -= 1
        self._changed.set()

    def _has_room(self) -> bool:
        admission = self._admission
        if not admission.is_open or admission.is_hanging or admission.is_closing:
            return False
        own = max(self.num_running, admission.behind.num_completions)
        others = admission.num_completions - admission.behind.num_completions
        return not own or own + others < admission.max_running


@dataclass(frozen=True)
class RowAnswerer:
    """Answers rows of all batches.

    Attributes:
        turns: when a row may begin.
        ask: answers the body of a request to an endpoint, and raises a Refusal where it does not.
        describe: what a client is told of a refusal.
        most_bytes: of a row.
    """

    turns: RowTurns
    ask: Callable[[str, bytes], Awaitable[bytes]]
    describe: Callable[[Refusal], Mapping[str, Any]]
    most_bytes: int

    async def answer(self, row: BatchRow) -> tuple[str, bytes]:
        """The kind of a row's file, and its line. While the engine is not there, or has no place, it waits."""
        while True:
            try:
                return OUTPUT, answered_row(row.custom_id, await self.ask(row.url, row.body))
            except Refusal as refusal:
                if refusal.kind is Kind.TIMEOUT:
                    return ERRORS, row_not_run(row.custom_id, "request_timeout", str(refusal))
                if refusal.kind not in (Kind.BUSY, Kind.UNAVAILABLE):
                    return ERRORS, refused_row(row.custom_id, refusal, self.describe(refusal))
                await asyncio.sleep(RESTART_RETRY_SECONDS if refusal.retry_after is None else refusal.retry_after)
            except Exception:
                logger.exception("a row of a batch")
                failed = Refusal(Kind.FAILED, "the server failed; its log says how")
                return ERRORS, refused_row(row.custom_id, failed, self.describe(failed))


class BatchJob:
    """A batch while it is run. It belongs to one event loop."""

    def __init__(self, batch: BatchRecord, store: BatchStore, answerer: RowAnswerer) -> None:
        """Run nothing yet.

        Args:
            batch: whose counts are kept.
            store: that has its input, and where its lines go.
            answerer: of its rows.
        """
        self._batch = batch
        self._store = store
        self._answerer = answerer
        self._done: set[str] = set()
        self._files: dict[str, LineFile] = {}
        self._writing = asyncio.Lock()

    async def open(self) -> None:
        """Find the rows that are done.

        Raises:
            OSError: the directory cannot be read or written.
        """
        batch = self._batch
        await self._store.take_back_lines(batch)
        for kind in (OUTPUT, ERRORS):
            file = self._files[kind] = LineFile(self._store.lines_path(batch.id, kind))
            ids = await self._store.aside(file.read_ids)
            self._done.update(ids)
            batch.completed, batch.failed = (len(ids), 0) if kind == OUTPUT else (batch.completed, len(ids))

    async def close(self) -> None:
        """Write no more, once what is being written is there."""
        async with self._writing:
            while self._files:
                self._files.popitem()[1].close()

    async def answer_rows(self) -> None:
        """Answer the rows that are not done.

        Raises:
            OSError: the input cannot be read, or a line not be written.
            RowError: the input is another one than was checked.
        """
        rows, begun = self._rows(), set[asyncio.Task[None]]()
        try:
            while some := await self._store.aside(_read_some, rows):
                for row in some:
                    if row.custom_id in self._done:
                        continue
                    await self._answerer.turns.begin()
                    task = asyncio.create_task(self._answer(row))
                    task.add_done_callback(lambda _: self._answerer.turns.end())
                    begun.add(task)
                    for over in [task for task in begun if task.done()]:
                        begun.discard(over)
                        over.result()
            await asyncio.gather(*begun)
        finally:
            for task in begun:
                task.cancel()
            await asyncio.gather(*begun, return_exceptions=True)

    async def refuse_rest(self, code: str, message: str) -> None:
        """Write of each row that is not done why it has no answer.

        Raises:
            OSError, RowError: as of `answer_rows`.
        """
        rows = self._rows()
        while some := await self._store.aside(_read_some, rows):
            ids = [row.custom_id for row in some if row.custom_id not in self._done]
            lines = b"".join(row_not_run(custom_id, code, message) for custom_id in ids)
            await self._write(ERRORS, lines, ids)

    def _rows(self) -> Iterator[BatchRow]:
        return read_rows(self._store.content_path(self._batch.input_file_id), self._answerer.most_bytes)

    async def _answer(self, row: BatchRow) -> None:
        kind, line = await self._answerer.answer(row)
        writing = asyncio.create_task(self._write(kind, line, [row.custom_id]))
        writing.add_done_callback(_take_exception)
        await asyncio.shield(writing)  # a line is whole even where the batch ends meanwhile

    async def _write(self, kind: str, lines: bytes, ids: list[str]) -> None:
        async with self._writing:
            if not lines or not self._files:  # closed: the row is answered again another time
                return
            await self._store.aside(self._files[kind].write, lines)
            self._done.update(ids)
            if kind == OUTPUT:
                self._batch.completed += len(ids)
            else:
                self._batch.failed += len(ids)


def _take_exception(task: asyncio.Task[None]) -> None:
    """Look at what a write has raised: where its row was given up nobody else does."""
    if not task.cancelled():
        task.exception()


def _read_some(rows: Iterator[BatchRow]) -> list[BatchRow]:
    """The next few rows, in any thread."""
    found: list[BatchRow] = []
    num_bytes = 0
    for row in rows:
        found.append(row)
        num_bytes += len(row.body)
        if len(found) == _ROWS_READ or num_bytes > _BYTES_READ:
            break
    return found
