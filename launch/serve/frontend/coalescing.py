"""Coalesces requests that come together: their prompts are encoded together, and they begin together.

Encoding a text takes as long as all else that is done for a request before the engine hears of it. So texts that come
in one turn of the event loop go to another thread as one batch, for which the tokenizer takes several threads and not
the interpreter: meanwhile the requests behind them are parsed. A text that comes alone is encoded in the loop.

A round that has begun with the first request alone makes all others wait for its end, and its text is written while
they should be parsed. Clients often send several requests at once: a batch, or workers that wait for each other. So
when nothing is in work, the first of them waits until the others are parsed, too. While requests are in work nobody
waits here: the rounds go on anyway.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial

from launch.serve.admission.control import AdmissionControl
from trtrun.api.prompts import Prompt, PromptReader

MOST_LETTERS = 1 << 16
"""Characters of a batch: the tokens of a few requests do not wait for those of very many."""

MOST_THREADS = 8
"""Threads of the tokenizer: each keeps the words that it has met, and may keep a core from a rank."""

_THREADS_SETTING = "RAYON_NUM_THREADS"

_Encoded = list[tuple[int, ...]] | Exception
"""The tokens of a request's prompts, or why there are none."""


@dataclass(frozen=True)
class _Waiting:
    """The prompts of a request that waits for their tokens."""

    prompts: Sequence[Prompt]
    tokens: asyncio.Future[list[tuple[int, ...]]]

    @property
    def num_letters(self) -> int:
        """Characters of all prompts; token ids count as one each."""
        return sum(map(len, self.prompts))

    def tell(self, tokens: _Encoded) -> None:
        """End the wait."""
        if self.tokens.done():
            return  # it was given up
        if isinstance(tokens, Exception):
            self.tokens.set_exception(tokens)
        else:
            self.tokens.set_result(tokens)


class PromptTokens:
    """Makes tokens of short prompts. It belongs to one event loop."""

    def __init__(self, reader: PromptReader) -> None:
        self._reader = reader
        self._waiting: list[_Waiting] = []

    async def encode(self, prompts: Sequence[Prompt]) -> list[tuple[int, ...]]:
        """The tokens of each prompt of a request.

        Raises:
            InvalidRequestError: as of `PromptReader.encode`, for the first prompt that is wrong.
        """
        if not any(isinstance(prompt, str) for prompt in prompts):
            return self._encode(prompts)
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._begin)  # behind all that comes in this turn
        waiting = _Waiting(prompts, loop.create_future())
        self._waiting.append(waiting)
        return await waiting.tokens

    def _begin(self) -> None:
        """Encode what has come in this turn."""
        waiting, self._waiting = self._waiting, []
        if len(waiting) == 1:
            waiting[0].tell(self._try_encode(waiting[0].prompts))
            return
        for batch in _cut(waiting):
            # At once, and not in a task: that would have its turn behind the requests that are read next.
            prompts = [item.prompts for item in batch]
            working = asyncio.get_running_loop().run_in_executor(None, self._encode_batch, prompts)
            working.add_done_callback(partial(_tell, batch))

    def _encode_batch(self, batch: Sequence[Sequence[Prompt]]) -> list[_Encoded]:
        """Encode the prompts of each request, in any thread."""
        texts = [prompt for prompts in batch for prompt in prompts if isinstance(prompt, str)]
        try:
            encoded = iter(self._reader.encode_texts(texts))
            return [
                [next(encoded) if isinstance(prompt, str) else self._reader.encode(prompt) for prompt in prompts]
                for prompts in batch
            ]
        except Exception:  # of one of them: the others have their tokens
            return [self._try_encode(prompts) for prompts in batch]

    def _try_encode(self, prompts: Sequence[Prompt]) -> _Encoded:
        try:
            return self._encode(prompts)
        except Exception as error:  # of any kind: somebody waits for it
            return error

    def _encode(self, prompts: Sequence[Prompt]) -> list[tuple[int, ...]]:
        return [self._reader.encode(prompt) for prompt in prompts]


def bound_threads() -> None:
    """Keep the tokenizer from taking a thread for every core, unless the user has said how many. Before its first
    batch."""
    os.environ.setdefault(_THREADS_SETTING, str(min(MOST_THREADS, len(os.sched_getaffinity(0)))))


def _tell(batch: Sequence[_Waiting], done: asyncio.Future[list[_Encoded]]) -> None:
    """Tell each request its tokens, in the event loop again."""
    for waiting, tokens in zip(batch, done.result(), strict=True):
        waiting.tell(tokens)


def _cut(waiting: Sequence[_Waiting]) -> Iterator[list[_Waiting]]:
    """Cut into batches, in order."""
    batch: list[_Waiting] = []
    num_letters = 0
    for item in waiting:
        if batch and num_letters + item.num_letters > MOST_LETTERS:
            yield batch
            batch, num_letters = [], 0
        batch.append(item)
        num_letters += item.num_letters
    yield batch


MOST_SECONDS = 0.02
"""How long a request may wait here: in this time some tens are parsed."""

_TURNS = 2
"""Turns of the event loop after which what its sockets had is read: one looks at them, the next one reads the
requests."""


class RequestCoalescer:
    """Lets requests that are parsed wait for those that came with them."""

    def __init__(self, admission: AdmissionControl, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin; no request waits.

        Args:
            admission: says how many requests are in work; it has let in all that wait here.
            clock: seconds; for tests.
        """
        self._admission = admission
        self._clock = clock
        self._num_arrived = 0
        self._num_expected_admitted = 0
        self._num_expected_others = 0
        self._num_waiting = 0
        self._none_is_expected = asyncio.Event()
        self._opened: asyncio.Event | None = None
        self._opening: asyncio.Task[None] | None = None

    @contextmanager
    def expect_admitted(self) -> Iterator[None]:
        """Expect a request that admission has let in, while something short is done for it: it then waits here, too."""
        self._num_expected_admitted += 1
        self._none_is_expected.clear()
        try:
            yield
        finally:
            self._num_expected_admitted -= 1
            self._note_arrival()

    @contextmanager
    def expect_other(self) -> Iterator[None]:
        """Expect a request that admission has not seen yet, while something short is done for it."""
        self._num_expected_others += 1
        self._none_is_expected.clear()
        try:
            yield
        finally:
            self._num_expected_others -= 1
            self._note_arrival()

    def _note_arrival(self) -> None:
        if not self._num_expected:
            self._none_is_expected.set()

    async def wait(self) -> None:
        """Wait until no request is expected any more, or some have begun. All that have waited go on in one turn of
        the event loop, and what is sent to the engine in one turn begins there together.
        """
        self._num_arrived += 1
        self._num_waiting += 1
        try:
            if self._none_is_in_work():
                await self._gathered().wait()
        finally:
            self._num_waiting -= 1

    def _gathered(self) -> asyncio.Event:
        """Return an event that is set once those that wait now may begin: one task watches for all of them."""
        if self._opened is None:
            self._opened = asyncio.Event()
            self._opening = asyncio.create_task(self._gather(self._opened, self._clock() + MOST_SECONDS))
        return self._opened

    async def _gather(self, opened: asyncio.Event, deadline: float) -> None:
        num_arrived = 0
        while (self._num_arrived > num_arrived or self._num_expected) and self._none_is_in_work():
            left = deadline - self._clock()
            if left <= 0:
                break
            if self._num_expected:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._none_is_expected.wait(), left)
            num_arrived = self._num_arrived
            for _ in range(_TURNS):
                await asyncio.sleep(0)
        self._opened = None
        opened.set()

    @property
    def _num_expected(self) -> int:
        """Requests that will wait here soon."""
        return self._num_expected_admitted + self._num_expected_others

    def _none_is_in_work(self) -> bool:
        """Whether all requests that are let in wait here, or will at once."""
        return self._admission.num_requests == self._num_waiting + self._num_expected_admitted
