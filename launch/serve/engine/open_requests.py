"""Requests that outlive engines: what came of each is kept, so that the next engine goes on where the last one stood;
and what their readers have not taken yet.

It knows requests and deltas. It does not know engines, or who reads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from launch.serve.door.refusals import Refusal
from launch.serve.engine.messages import Generate
from trtrun.core.outputs import CompletionDelta, merge_deltas
from trtrun.core.request_statistics import RequestStatistics
from trtrun.core.sampling_params import SamplingParams


@dataclass(frozen=True)
class EngineRequest:
    """One prompt to complete.

    Attributes:
        prompt_token_ids: checked against the model and the engine's limits.
        sampling: with a seed, so that another engine goes on with the same tokens.
    """

    prompt_token_ids: Sequence[int]
    sampling: SamplingParams


class Inbox:
    """What one reader has not taken yet of its requests, which it numbers. Never full: a reader that is slow gets fewer
    and larger deltas, with no more tokens than it asked for."""

    def __init__(self) -> None:
        self._deltas: dict[tuple[int, int], list[CompletionDelta]] = {}
        self._error: Refusal | None = None
        self._has_news = asyncio.Event()

    def put(self, number: int, delta: CompletionDelta) -> None:
        """Keep what came of request `number`."""
        self._deltas.setdefault((number, delta.index), []).append(delta)
        self._has_news.set()

    def end(self, error: Refusal) -> None:
        """Nothing will come any more, of any request."""
        self._error = self._error or error
        self._has_news.set()

    async def take(self) -> list[tuple[int, CompletionDelta]]:
        """Wait for news and return them with the numbers of their requests, one delta a completion.

        Raises:
            Refusal: the end came instead, once all before it is taken.
        """
        while not self._deltas:
            if self._error is not None:
                raise self._error
            await self._has_news.wait()
            self._has_news.clear()
        taken, self._deltas = self._deltas, {}
        self._has_news.clear()
        if self._error is not None:
            self._has_news.set()
        return [(number, merge_deltas(deltas)) for (number, _), deltas in taken.items()]


@dataclass(eq=False)
class OpenRequest:
    """A request that goes on, with all that a new engine needs to go on with it.

    Attributes:
        generated: output tokens of each completion that goes on.
        group: of the requests that came with it.
        before: counters of each completion from engines that are gone.
        told: counters of each completion that its reader has been told, `before` among them.
        lost: engines that it has lost since its last token, by their numbers.
        lost_alone: those that it has lost while no other request was in work, ever.
        is_given_back: whether it has lost an engine, ever.
    """

    request_id: str
    number: int
    request: EngineRequest
    inbox: Inbox
    generated: dict[int, list[int]]
    group: str
    before: dict[int, RequestStatistics] = field(default_factory=dict)
    told: dict[int, RequestStatistics] = field(default_factory=dict)
    lost: list[int] = field(default_factory=list)
    lost_alone: set[int] = field(default_factory=set)
    is_given_back: bool = False

    def message(self) -> Generate:
        """What an engine is sent, a first or a later one."""
        has_begun = len(self.generated) < self.request.sampling.n or any(self.generated.values())
        generated = {index: tuple(tokens) for index, tokens in self.generated.items()} if has_begun else None
        request = self.request
        return Generate.of(self.request_id, request.prompt_token_ids, request.sampling, generated, self.group)

    def take(self, delta: CompletionDelta) -> None:
        """Keep an engine's delta, and tell the reader."""
        before = self.before.get(delta.index)
        if before is not None:
            delta = msgspec.structs.replace(delta, statistics=_add(before, delta.statistics))
        self.told[delta.index] = delta.statistics
        self.generated[delta.index] += delta.token_ids
        self.lost.clear()
        if delta.finish_reason is not None:
            del self.generated[delta.index]
        self.inbox.put(self.number, delta)

    def lose_engine(self, engine: int, was_alone: bool) -> None:
        """The engine of this number is gone: the next one counts from zero."""
        self.before = dict(self.told)
        self.lost.append(engine)
        self.is_given_back = True
        if was_alone:
            self.lost_alone.add(engine)


def _add(before: RequestStatistics, now: RequestStatistics) -> RequestStatistics:
    """Counters of a completion over several engines."""
    length = max(len(before.acceptance_histogram), len(now.acceptance_histogram))
    histogram = [0] * length
    for counts in (before.acceptance_histogram, now.acceptance_histogram):
        for place, number in enumerate(counts):
            histogram[place] += number
    return RequestStatistics(
        arrival=before.arrival,
        num_rounds=before.num_rounds + now.num_rounds,
        num_drafts=before.num_drafts + now.num_drafts,
        num_draft_tokens=before.num_draft_tokens + now.num_draft_tokens,
        num_accepted_draft_tokens=before.num_accepted_draft_tokens + now.num_accepted_draft_tokens,
        num_cached_prompt_tokens=before.num_cached_prompt_tokens,
        num_preemptions=before.num_preemptions + now.num_preemptions,
        admitted=before.admitted,
        acceptance_histogram=histogram,
    )
