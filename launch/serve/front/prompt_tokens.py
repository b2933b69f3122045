"""Prompts of requests that come together become tokens together, beside the event loop.

A text takes as long to become tokens as all else that is done for a request before the engine hears of it. So texts
that come in one turn of the event loop go to another thread as one batch, for which the tokenizer takes several threads
and not the interpreter: meanwhile the requests behind them are read. One that comes alone is not worth the way. It
knows texts and turns of the event loop. It does not know requests.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from trtrun.api.prompts import Prompt, PromptReader

MOST_LETTERS = 1 << 16
"""Characters of a batch: the tokens of a few requests do not wait for those of very many."""

MOST_THREADS = 8
"""Of the tokenizer: each keeps the words that it has met, and may keep a core from a rank."""

_THREADS_SETTING = "RAYON_NUM_THREADS"

_Encoded = list[tuple[int, ...]] | Exception
"""What becomes of the prompts of a request: tokens, or why there are none."""


@dataclass(frozen=True)
class _Waiting:
    """Prompts whose tokens somebody waits for."""

    prompts: Sequence[Prompt]
    tokens: asyncio.Future[list[tuple[int, ...]]]

    @property
    def num_letters(self) -> int:
        """Of all prompts; token ids count as one each."""
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
        """At the end of a turn."""
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
        """What becomes of the prompts of each request. In any thread."""
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
    """In the event loop again."""
    for waiting, tokens in zip(batch, done.result(), strict=True):
        waiting.tell(tokens)


def _cut(waiting: Sequence[_Waiting]) -> Iterator[list[_Waiting]]:
    """In batches, in their order."""
    batch: list[_Waiting] = []
    num_letters = 0
    for item in waiting:
        if batch and num_letters + item.num_letters > MOST_LETTERS:
            yield batch
            batch, num_letters = [], 0
        batch.append(item)
        num_letters += item.num_letters
    yield batch
