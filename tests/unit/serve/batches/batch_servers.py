"""The endpoints of files and batches in this process, over rows that are answered by a function."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
from fronts import NoEngine, WatchedTokenizer, make_frontend

from launch.serve.api.openai.api import error_body
from launch.serve.application.http_server import make_application
from launch.serve.batches.api import BatchApi
from launch.serve.batches.jobs import RowAnswerer, RowTurns
from launch.serve.batches.runner import BatchRunner
from launch.serve.batches.store import BatchStore, prepare_directory
from launch.serve.http.bodies import Bodies
from launch.serve.http.requests import Keys

MOST_BYTES = 20_000
ENDED = ("completed", "failed", "expired", "cancelled")


class Rows:
    """Answers rows with their own bodies, once it is let, and keeps which ones.

    Attributes:
        asked: prompts, in order.
        most_at_once: rows that were in work together.
    """

    def __init__(self) -> None:
        self.asked: list[str] = []
        self._allowed = asyncio.Semaphore(0)
        self.most_at_once = 0
        self._num_in_work = 0

    def let(self, count: int = 1000) -> None:
        """Let so many rows have their answers."""
        for _ in range(count):
            self._allowed.release()

    async def answer(self, path: str, body: bytes) -> bytes:
        self.asked.append(json.loads(body)["prompt"])
        self._num_in_work += 1
        self.most_at_once = max(self.most_at_once, self._num_in_work)
        try:
            await self._allowed.acquire()
        finally:
            self._num_in_work -= 1
        return body


def row(custom_id: str, **others: Any) -> str:
    return json.dumps(
        {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": {"prompt": custom_id}} | others
    )


class Front:
    """One server on a directory.

    Attributes:
        runner, admission, rows: its parts.
    """

    def __init__(
        self, directory: Path | None, rows: Rows, keys: Sequence[str] = (), now: Callable[[], float] | None = None
    ) -> None:
        frontend = make_frontend(WatchedTokenizer(), NoEngine())
        self.admission, self.rows = frontend.admission, rows
        self.runner: BatchRunner | None = None
        if directory is not None:
            store = BatchStore(prepare_directory(directory), 90_000, **({} if now is None else {"now": now}))
            answerer = RowAnswerer(RowTurns(frontend.admission), rows.answer, error_body, 2000)
            self.runner = BatchRunner(store, answerer)
        api = BatchApi(self.runner, Keys(keys), Bodies(100_000, 200_000), "m", MOST_BYTES)
        self.application = make_application(frontend, api.routes())

    def client(self, key: str = "none") -> openai.AsyncOpenAI:
        asked = httpx.AsyncClient(transport=httpx.ASGITransport(self.application))
        return openai.AsyncOpenAI(base_url="http://x/v1", api_key=key, http_client=asked, max_retries=0)


@asynccontextmanager
async def running(directory: Path | None, rows: Rows, **others: Any) -> AsyncIterator[Front]:
    """A server that runs batches, and leaves them at the end."""
    front = Front(directory, rows, **others)
    if front.runner is not None:
        front.runner.start()
        await until(lambda: front.runner is not None and front.runner.is_there)
    try:
        yield front
    finally:
        if front.runner is not None:
            await front.runner.close()


async def until(is_so: Callable[[], object]) -> None:
    """Wait for what others do in this event loop, or in threads."""
    async with asyncio.timeout(60):
        while not is_so():
            await asyncio.sleep(0.005)


async def upload(client: openai.AsyncOpenAI, *rows: str) -> str:
    return (await client.files.create(file=("rows.jsonl", "\n".join(rows).encode()), purpose="batch")).id


async def begin(client: openai.AsyncOpenAI, *rows: str, **others: Any) -> str:
    file_id = await upload(client, *rows)
    batch = await client.batches.create(
        input_file_id=file_id, endpoint="/v1/completions", completion_window="24h", **others
    )
    return batch.id


async def end_of(client: openai.AsyncOpenAI, batch_id: str) -> Any:
    """The batch, once it is over."""
    async with asyncio.timeout(60):
        while (batch := await client.batches.retrieve(batch_id)).status not in ENDED:
            await asyncio.sleep(0.005)
    return batch


async def lines_of(client: openai.AsyncOpenAI, file_id: str | None) -> list[Any]:
    if file_id is None:
        return []
    return [json.loads(line) for line in (await client.files.content(file_id)).text.splitlines()]
