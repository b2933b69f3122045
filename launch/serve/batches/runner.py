"""Runs batches: has their rows checked and answered, and makes files of the answers.

What is done is a line on disk at once, so a server that is started again goes on behind it. It does not know HTTP, or
how a request is answered.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

from launch.serve.admission.control import BEHIND_OTHERS, OWNER
from launch.serve.admission.refusals import Kind, Refusal
from launch.serve.batches.jobs import BatchJob, RowAnswerer
from launch.serve.batches.records import BatchRecord, LineError
from launch.serve.batches.rows import RowError, check_rows
from launch.serve.batches.store import KEY, BatchStore

MOST_AT_ONCE = 8
"""Batches whose rows are answered at once; the next one is of the key that has the fewest."""

_LOOK_SECONDS = 60.0
"""How often files are looked for whose time is over, and the time of batches."""

_TAKE_SECONDS, _CLOSE_SECONDS = 1.0, 5.0
_ENDS = {"cancelling": "cancelled", "in_progress": "expired", "finalizing": "completed"}
"""What becomes of a batch whose rows are not answered any more, by its status then."""

_NOT_RUN = {
    "expired": ("batch_expired", "This request could not be executed before the completion window expired."),
    "cancelled": ("batch_cancelled", "The batch was cancelled before this request was executed."),
}
"""Code and message of rows that were not."""

logger = logging.getLogger(__name__)


class BatchRunner:
    """Runs the batches of a store. It belongs to one event loop.

    Attributes:
        store: that it runs.
        is_there: whether the store is this server's.
        failure: why the store cannot be read, where it cannot; it is tried again.
    """

    def __init__(self, store: BatchStore, answerer: RowAnswerer) -> None:
        """Run nothing yet.

        Args:
            store: not yet taken.
            answerer: of rows.
        """
        self.store = store
        self.is_there = False
        self.failure: str | None = None
        self._answerer = answerer
        self._jobs: dict[str, asyncio.Task[None]] = {}
        self._answering: set[str] = set()
        self._stopped: dict[str, asyncio.Event] = {}
        self._news = asyncio.Event()
        self._running: asyncio.Task[None] | None = None

    @property
    def num_running(self) -> int:
        """Rows that are being answered."""
        return self._answerer.turns.num_running

    @property
    def num_waiting(self) -> int:
        """Rows that are not, of batches that are checked and not over."""
        open_ones = [one for one in self.store.batches.values() if one.status == "in_progress"]
        left = sum(one.total - one.completed - one.failed for one in open_ones)
        return max(0, left - self.num_running)

    def start(self) -> None:
        """Begin, or wait until another server lets go of the directory."""
        self._running = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Leave all batches as they are, and the directory to another server; calling it again does nothing."""
        self.is_there = False
        tasks = [task for task in (self._running, *self._jobs.values()) if task is not None]
        for task in tasks:
            task.cancel()
        if tasks:  # a disk that hangs does not keep the server from its end
            await asyncio.wait(tasks, timeout=_CLOSE_SECONDS)
        self.store.let_go()

    async def add(self, batch: BatchRecord) -> None:
        """Take in a new batch.

        Raises:
            OSError: the directory cannot be written.
        """
        await self.store.save(batch)
        self._news.set()

    async def cancel(self, batch: BatchRecord) -> None:
        """End a batch early.

        Raises:
            Refusal: it is over, or nearly.
            OSError: the directory cannot be written.
        """
        if batch.status == "cancelling":
            return
        if batch.status not in ("validating", "in_progress"):
            raise Refusal(Kind.INVALID, f"the batch is {batch.status}: it cannot be cancelled any more")
        batch.move_to("cancelling", self.store.now())
        if batch.id in self._stopped:
            self._stopped[batch.id].set()
        self._news.set()
        await self.store.save(batch)

    async def _run(self) -> None:
        """Run all batches, until this task is cancelled."""
        while not await self._take():
            await asyncio.sleep(_TAKE_SECONDS)
        self.is_there = True
        while True:
            self._news.clear()
            self._begin_jobs()
            with suppress(OSError):
                await self.store.remove_expired()
            waiting = asyncio.create_task(self._news.wait())
            try:
                await asyncio.wait(
                    (waiting, *self._jobs.values()), timeout=_LOOK_SECONDS, return_when=asyncio.FIRST_COMPLETED
                )
            finally:
                waiting.cancel()
            self._jobs = {name: job for name, job in self._jobs.items() if not job.done()}

    async def _take(self) -> bool:
        """Whether the store is this server's now; what keeps it from being read is told, and logged once."""
        try:
            is_taken, failure = await self.store.aside(self.store.take), None
        except OSError as error:
            is_taken, failure = False, str(error)
        if failure not in (None, self.failure):
            logger.error("%s: %s", KEY, failure)
        self.failure = failure
        return is_taken

    def _begin_jobs(self) -> None:
        """Begin what takes no rows of the engine at once, and of the others as many as may run."""
        now = self.store.now()
        waiting = [one for one in self.store.batches.values() if not one.is_over and one.id not in self._jobs]
        for batch in [one for one in waiting if one.status != "in_progress" or one.expires_at <= now]:
            waiting.remove(batch)
            self._jobs[batch.id] = asyncio.create_task(self._play(batch))
        while waiting and len(self._answering) < MOST_AT_ONCE:
            owners = [self.store.batches[name].owner for name in self._answering]
            batch = min(waiting, key=lambda one: owners.count(one.owner))  # of several the oldest
            waiting.remove(batch)
            self._answering.add(batch.id)
            self._jobs[batch.id] = asyncio.create_task(self._play(batch))

    async def _play(self, batch: BatchRecord) -> None:
        """The next part of a batch: the check of its rows, or all from there to its end."""
        OWNER.set(f"{BEHIND_OTHERS} {batch.owner}")
        try:
            if batch.status == "validating":
                await self._check(batch)
            else:
                await self._finish(batch)
        except (OSError, RowError) as error:
            logger.error("batch %s: %s", batch.id, error)
            await self._fail(batch, self._describe(batch, error))
        except Exception:
            logger.exception("batch %s", batch.id)
            await self._fail(batch, LineError("server_error", "the server failed; its log says how"))
        finally:
            self._answering.discard(batch.id)
            self._stopped.pop(batch.id, None)

    async def _check(self, batch: BatchRecord) -> None:
        path = self.store.content_path(batch.input_file_id)
        num_rows, errors = await self.store.aside(check_rows, path, batch.endpoint, self._answerer.most_bytes)
        if batch.status == "validating":  # it may have been cancelled meanwhile
            batch.total, batch.errors = 0 if errors else num_rows, errors
            batch.move_to("failed" if errors else "in_progress", self.store.now())
            await self.store.save(batch)

    async def _finish(self, batch: BatchRecord) -> None:
        job = BatchJob(batch, self.store, self._answerer)
        try:
            await job.open()
            if batch.status == "in_progress":
                await self._answer_rows(batch, job)
            status = _ENDS[batch.status]
            if status in _NOT_RUN and batch.total:
                await job.refuse_rest(*_NOT_RUN[status])
        finally:
            await job.close()
        if batch.status == "in_progress":
            batch.move_to("finalizing", self.store.now())  # it cannot be cancelled any more
        await self.store.keep_lines(batch)
        await self.store.save_end(batch, status)

    async def _answer_rows(self, batch: BatchRecord, job: BatchJob) -> None:
        """Answer the rows that are not done, until all are, the batch is cancelled, or its time is over."""
        stopped = self._stopped[batch.id] = asyncio.Event()
        answering, asked = asyncio.create_task(job.answer_rows()), asyncio.create_task(stopped.wait())
        try:
            while not (answering.done() or asked.done()) and (left := batch.expires_at - self.store.now()) > 0:
                await asyncio.wait(
                    (answering, asked), timeout=min(left, _LOOK_SECONDS), return_when=asyncio.FIRST_COMPLETED
                )
        finally:
            answering.cancel(), asked.cancel()
            await asyncio.wait((answering, asked))
        if answering.cancelled():
            return
        answering.result()
        if batch.status == "in_progress":
            batch.move_to("finalizing", self.store.now())
            await self.store.save(batch)

    async def _fail(self, batch: BatchRecord, error: LineError) -> None:
        """End a batch that cannot go on, with the rows that are done."""
        batch.errors = [error]
        batch.move_to("failed", self.store.now())
        try:
            await self.store.keep_lines(batch)
            await self.store.save(batch)
        except OSError as failure:  # a server that is started again tries once more
            logger.error("batch %s: %s", batch.id, failure)

    def _describe(self, batch: BatchRecord, error: OSError | RowError) -> LineError:
        if isinstance(error, RowError):
            return LineError("input_file_changed", f"{batch.input_file_id} is not as it was: {error}")
        if error.filename == str(self.store.content_path(batch.input_file_id)):
            return LineError("input_file_missing", f"cannot read {batch.input_file_id}: {error.strerror}")
        return LineError("storage_error", f"cannot write to the server's batch directory: {error.strerror}")
