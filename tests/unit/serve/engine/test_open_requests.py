"""A request over several engines: what its reader is told of its prompt's logits, and what counts as getting on."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import numpy as np
from engine_messages import delta_of, run

from launch.serve.engine.open_requests import EngineRequest, Inbox, OpenRequest
from trtrun.core.outputs import CompletionDelta, Logits
from trtrun.core.sampling_params import SamplingParams


def opened(inbox: Inbox) -> OpenRequest:
    request = EngineRequest((1, 2, 3, 4, 5), SamplingParams(seed=1, return_context_logits=True))
    return OpenRequest("r", 0, request, inbox, {0: []}, "g")


def context(first: int, count: int, tokens: tuple[int, ...] = ()) -> CompletionDelta:
    """Logits of `count` positions from `first` on, each three times its number, and tokens."""
    values = np.repeat(np.arange(first, first + count, dtype=np.float32), 3).tobytes()
    return msgspec.structs.replace(delta_of(tokens), context_logits=Logits(3, (values,)))


def positions(deltas: list[tuple[int, CompletionDelta]]) -> list[float]:
    """The first logit of each position that a reader has been told."""
    arrays = [delta.context_logits.array() for _, delta in deltas if delta.context_logits is not None]
    return [value for array in arrays for value in array[:, 0].tolist()]


def test_a_prompts_logits_are_told_once_whatever_engines_compute_them() -> None:
    async def check() -> None:
        inbox = Inbox()
        request = opened(inbox)
        told: list[tuple[int, CompletionDelta]] = []
        for delta in (context(0, 2), context(2, 1)):
            request.take(delta)
        told += await inbox.take()
        request.lose_engine(1, was_alone=True)
        assert request.message().generated is None, "it begins anew"
        for delta in (context(0, 1), context(1, 3), context(4, 1, (7,))):  # cut otherwise
            request.take(delta)
        told += await inbox.take()
        assert positions(told) == [0, 1, 2, 3, 4]
        assert [token for _, delta in told for token in delta.token_ids] == [7]

    run(check())


def test_logits_of_a_prompt_do_not_clear_a_request_that_ends_engines() -> None:
    async def check() -> None:
        request = opened(Inbox())
        request.lose_engine(1, was_alone=False)
        request.take(context(0, 2))
        assert request.lost == [1]
        request.take(context(2, 3, (7,)))
        assert request.lost == []

    run(check())


def test_a_slow_reader_has_all_parts_in_one_delta() -> None:
    async def check() -> None:
        inbox = Inbox()
        request = opened(inbox)
        for delta in (context(0, 2), context(2, 2), context(4, 1, (7,))):
            request.take(delta)
        found: list[Any] = await asyncio.wait_for(inbox.take(), 5)
        assert len(found) == 1 and positions(found) == [0, 1, 2, 3, 4]

    run(check())
