"""What tests of the server's parts say and hear in place of an engine."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from trtrun.core.nouns import TokenLogprobs
from trtrun.core.outputs import CompletionDelta
from trtrun.core.request_statistics import RequestStatistics
from trtrun.core.sampling_params import SamplingParams
from trtrun.scheduling.limits import SchedulerLimits

LIMITS = SchedulerLimits(4, 64, 256, 256, 4, 16, 32)
SAMPLING = SamplingParams(temperature=0.8, seed=3, max_tokens=9, n=2, logit_bias={5: 1.5}, stop=("x",), logprobs=2)


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 60))


def reader_of(data: bytes) -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    reader.feed_eof()
    return reader


def delta_of(
    tokens: tuple[int, ...],
    finish_reason: str | None = None,
    index: int = 0,
    rounds: int = 1,
    request_id: str = "request 0",
) -> CompletionDelta:
    statistics = RequestStatistics(
        num_rounds=rounds,
        num_drafts=rounds,
        num_draft_tokens=4,
        num_accepted_draft_tokens=1,
        acceptance_histogram=[0, rounds],
        num_suffix_draft_tokens=3,
        num_accepted_suffix_draft_tokens=1,
    )
    logprobs = tuple(TokenLogprobs(token, -0.25, ((token, -0.25), (1, -2.5))) for token in tokens)
    return CompletionDelta(request_id, index, tokens, "é" * len(tokens), statistics, logprobs, finish_reason)
