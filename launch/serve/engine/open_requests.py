"""Requests that outlive engines: what came of each is kept, so that the next engine goes on where the last one stood;
what their readers have not taken yet; and which of them may be what ends engines.

Most engines are lost for reasons of their own, and requests go on with the next one. A request that loses engine after
engine without a token in between is suspected:

- alone in work, it is given up behind the second engine in a row;
- beside others, the engine behind the second gets the suspects one at a time, each once the one before has a token or
  has ended, so that a third loss shows which one it was.

Requests that came together, the prompts of one client's request, are one: they are alone together, and given up
together.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

import msgspec

from launch.serve.admission.refusals import Refusal
from launch.serve.engine.messages import Generate
from trtrun.core.outputs import CompletionDelta, Logits, merge_deltas
from trtrun.core.request_statistics import RequestStatistics
from trtrun.core.sampling_params import SamplingParams


@dataclass(frozen=True)
class EngineRequest:
    """A prompt to complete.

    Attributes:
        prompt_token_ids: checked against the model and the engine's limits.
        sampling: with a seed, so that another engine goes on with the same tokens.
        owner: who asks, by which rows are shared first.
        generated: output tokens of each completion that goes on; None where all begin.
    """

    prompt_token_ids: Sequence[int]
    sampling: SamplingParams
    owner: str | None = None
    generated: Mapping[int, Sequence[int]] | None = None

    def going_on(self) -> Mapping[int, Sequence[int]]:
        """The completions that go on, with their tokens so far."""
        return dict.fromkeys(range(self.sampling.n), ()) if self.generated is None else self.generated


class Inbox:
    """What one reader has not taken yet of its requests, which it numbers. Never full: a reader that is slow gets fewer
    and larger deltas, with no more tokens than it asked for."""

    def __init__(self, end_completion: Callable[[], None] = lambda: None) -> None:
        """Begin with nothing; `end_completion` is called for each completion whose end has come, read or not."""
        self._end_completion = end_completion
        self._deltas: dict[tuple[int, int], list[CompletionDelta]] = {}
        self._error: Refusal | None = None
        self._has_news = asyncio.Event()

    def put(self, number: int, delta: CompletionDelta) -> None:
        """Keep what came of request `number`."""
        self._deltas.setdefault((number, delta.index), []).append(delta)
        self._has_news.set()
        if delta.finish_reason is not None:
            self._end_completion()

    def end(self, error: Refusal) -> None:
        """End all requests: nothing more will come."""
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
        reported: counters of each completion that its reader has been told, `before` among them.
        lost: engines that it has lost since its last token, by their numbers.
        lost_alone: those that it has lost while no other request was in work, ever.
        is_given_back: whether it has lost an engine, ever.
        num_context_reported: positions of its prompt whose logits its reader has been told.
        num_context: the same of this engine, which begins anew where none of its tokens came before.
    """

    request_id: str
    number: int
    request: EngineRequest
    inbox: Inbox
    generated: dict[int, list[int]]
    group: str
    before: dict[int, RequestStatistics] = field(default_factory=dict)
    reported: dict[int, RequestStatistics] = field(default_factory=dict)
    lost: list[int] = field(default_factory=list)
    lost_alone: set[int] = field(default_factory=set)
    is_given_back: bool = False
    num_context_reported: int = 0
    num_context: int = 0

    def message(self) -> Generate:
        """What an engine is sent, a first or a later one."""
        has_begun = len(self.generated) < self.request.sampling.n or any(self.generated.values())
        generated = {index: tuple(tokens) for index, tokens in self.generated.items()} if has_begun else None
        request = self.request
        return Generate.of(
            self.request_id, request.prompt_token_ids, request.sampling, generated, self.group, request.owner
        )

    def take(self, delta: CompletionDelta) -> None:
        """Keep an engine's delta, and tell the reader."""
        before = self.before.get(delta.index)
        if before is not None:
            delta = msgspec.structs.replace(delta, statistics=_add(before, delta.statistics))
        self.reported[delta.index] = delta.statistics
        self.generated[delta.index] += delta.token_ids
        if delta.context_logits is not None:
            delta = msgspec.structs.replace(delta, context_logits=self._new_context(delta.context_logits))
        if has_progress(delta):
            self.lost.clear()
        if delta.finish_reason is not None:
            del self.generated[delta.index]
        self.inbox.put(self.number, delta)

    def _new_context(self, logits: Logits) -> Logits | None:
        """What the reader has not been told of a prompt's logits."""
        begin = self.num_context
        self.num_context += logits.num_positions
        known = self.num_context_reported - begin
        self.num_context_reported = max(self.num_context_reported, self.num_context)
        return logits if known <= 0 else logits.behind(known)

    def lose_engine(self, engine: int, was_alone: bool) -> None:
        """The engine of this number is gone."""
        self.leave_engine()
        self.lost.append(engine)
        if was_alone:
            self.lost_alone.add(engine)

    def leave_engine(self) -> None:
        """Another engine goes on with the request, which counts from zero."""
        self.before = dict(self.reported)
        self.num_context = 0
        self.is_given_back = True


def has_progress(delta: CompletionDelta) -> bool:
    """Whether a completion has a token, or has ended: logits of prompts alone do not count."""
    return bool(delta.token_ids) or delta.finish_reason is not None


_COUNTERS = (
    "num_rounds",
    "num_drafts",
    "num_draft_tokens",
    "num_accepted_draft_tokens",
    "num_suffix_draft_tokens",
    "num_accepted_suffix_draft_tokens",
    "num_preemptions",
)
"""Statistics of a completion that go on with its next engine; cached tokens and times are those of the first."""


def _add(before: RequestStatistics, now: RequestStatistics) -> RequestStatistics:
    """Counters of a completion over several engines."""
    sums = {name: getattr(before, name) + getattr(now, name) for name in _COUNTERS}
    kept = zip_longest(before.acceptance_histogram, now.acceptance_histogram, fillvalue=0)
    return msgspec.structs.replace(before, acceptance_histogram=[sum(counts) for counts in kept], **sums)


LOSSES_ALONE = 2
"""Engines in a row that a request may lose without a token in between, and without another one in work."""

MOST_LOSSES = 3
"""The most engines that a request may lose beside other requests. No more than the restarts that a server has by
default: the others go on."""

_END = "it is not tried again"


@dataclass(frozen=True)
class FaultyRequest:
    """A request that is given up, with those that came with it.

    Attributes:
        group: of them.
        engines: numbers of those that it has ended.
        is_certain: whether nothing else was in work; else it is once another request gets on.
        reason: what its reader is told.
    """

    group: str
    engines: frozenset[int]
    is_certain: bool
    reason: str


class FaultAttribution:
    """Finds requests that end engines, of one engine after the other.

    Attributes:
        engine: number of the one that is there, or was there last.
    """

    def __init__(self) -> None:
        self.engine = 0
        self._waiting: deque[str] = deque()
        self._tried: str | None = None

    def begin(self, requests: Mapping[str, OpenRequest]) -> list[OpenRequest]:
        """An engine is there: which requests it gets now. `next_behind` tells of the others."""
        self.engine += 1
        suspects = [opened for opened in requests.values() if len(opened.lost) >= MOST_LOSSES - 1]
        self._waiting = deque(opened.request_id for opened in suspects[1:])
        self._tried = suspects[0].request_id if suspects else None
        return self._had(requests)

    def next_behind(self, request_id: str, requests: Mapping[str, OpenRequest]) -> OpenRequest | None:
        """A request has a token, or has ended: which one the engine gets for that."""
        if request_id != self._tried:
            return None
        self._tried = None
        while self._waiting:
            opened = requests.get(self._waiting.popleft())
            if opened is not None:
                self._tried = opened.request_id
                return opened
        return None

    def lose(self, requests: Mapping[str, OpenRequest]) -> list[FaultyRequest]:
        """The engine is gone: who of those that go on is given up."""
        had = self._had(requests)
        self._waiting.clear()
        self._tried = None
        was_alone = len({opened.group for opened in requests.values()}) == 1
        for opened in had:
            opened.lose_engine(self.engine, was_alone)
        found = [faulty for opened in had if (faulty := _judge(opened)) is not None]
        return list({faulty.group: faulty for faulty in found}.values())

    def find_faulty_request(
        self, engines: Collection[int | None], requests: Mapping[str, OpenRequest]
    ) -> FaultyRequest | None:
        """The request that was alone in work when each of several engines was lost, whatever it got in between.

        Args:
            engines: their numbers, None for those that were never there.
            requests: that go on.
        """
        ended = frozenset(engine for engine in engines if engine is not None)
        if len(ended) < LOSSES_ALONE or None in engines:
            return None
        for opened in requests.values():
            if ended <= opened.lost_alone:
                reason = f"the engine ended {len(ended)} times while it had this request alone: {_END}"
                return FaultyRequest(opened.group, ended, True, reason)
        return None

    def _had(self, requests: Mapping[str, OpenRequest]) -> list[OpenRequest]:
        """Requests that the engine has got so far."""
        waiting = set(self._waiting)
        return [opened for opened in requests.values() if opened.request_id not in waiting]


def _judge(opened: OpenRequest) -> FaultyRequest | None:
    """Whether a request is given up for the engines that it has lost."""
    alone = frozenset(opened.lost) & opened.lost_alone
    count = len(opened.lost)
    if len(alone) >= LOSSES_ALONE:
        had = "had this request alone" if len(alone) == count else "had this request"
        return FaultyRequest(
            opened.group, alone, True, f"the engine ended {count} times in a row while it {had}: {_END}"
        )
    if count >= MOST_LOSSES:
        reason = f"the engine ended {count} times in a row while it had this request: {_END}"
        return FaultyRequest(opened.group, frozenset(opened.lost), False, reason)
    return None
