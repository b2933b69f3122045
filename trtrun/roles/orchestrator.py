"""The orchestrator: requests in, text out, one round after another.

`step` is the heartbeat: plan, publish, wait for a verdict, commit, tell. It knows the scheduler, the fleet and the
tokenizer. It does not know models, devices or how bytes travel.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from trtrun.core import FinishReason, Request, RequestStatistics, RoundPlan, TokenLogprobs
from trtrun.roles.fleet import Fleet
from trtrun.scheduling.scheduler import RowResult, RunningRequest, Scheduler
from trtrun.speculation.cycle import commit_round
from trtrun.speculation.pacing import Pacer
from trtrun.telemetry import RunStatistics
from trtrun.text import IncrementalDetokenizer, Tokenizer
from trtrun.wire import RoundReport


@dataclass
class Stream:
    """The text side of one request.

    Attributes:
        request: what was asked.
        text: all that may be shown: complete characters, no stop string and nothing that may become one.
        token_ids: tokens so far.
        logprobs: one entry a token where asked for.
        finish_reason: set at the end.
        statistics: the scheduler's, filled in as it goes.
    """

    request: Request
    detokenizer: IncrementalDetokenizer | None
    statistics: RequestStatistics
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    _pending: str = ""
    _stopped_by_text: bool = False

    @property
    def reason(self) -> str | None:
        """Why it ended, as text; None while it goes on."""
        return None if self.finish_reason is None else str(self.finish_reason)

    def accept(self, token: int) -> FinishReason | None:
        """Take in one token; returns why the request ends here, or None."""
        sampling = self.request.sampling
        self.token_ids.append(token)
        if self.detokenizer is not None:
            self._pending += self.detokenizer.append(token)
        may_stop = len(self.token_ids) >= sampling.min_tokens
        if may_stop and sampling.stop and self._cut_at_stop():
            return FinishReason.STOP
        if token in self.request.stop_ids and len(self.token_ids) > sampling.min_tokens:
            return FinishReason.STOP
        held = self._held_back() if sampling.stop else 0
        shown = len(self._pending) - held
        self.text += self._pending[:shown]
        self._pending = self._pending[shown:]
        return None

    def close(self, reason: FinishReason) -> None:
        """Release what was held back."""
        self.finish_reason = reason
        if self.detokenizer is not None and not self._stopped_by_text:
            self._pending += self.detokenizer.flush()
        self.text += self._pending
        self._pending = ""

    def _cut_at_stop(self) -> bool:
        found = [place for stop in self.request.sampling.stop if (place := self._pending.find(stop)) >= 0]
        if found:
            self._pending = self._pending[: min(found)]
            self._stopped_by_text = True
        return bool(found)

    def _held_back(self) -> int:
        """Characters at the end that may be the beginning of a stop string."""
        longest = 0
        for stop in self.request.sampling.stop:
            for length in range(min(len(stop) - 1, len(self._pending)), longest, -1):
                if self._pending.endswith(stop[:length]):
                    longest = length
                    break
        return longest


@dataclass(frozen=True)
class _Outstanding:
    """A plan that is out, the places in its verdict that will carry log probabilities, and when it went out."""

    plan: RoundPlan
    logprob_places: list[int]
    published: float


class Orchestrator:
    """Runs requests to their end, a round at a time.

    Attributes:
        statistics: totals since the last reset.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        fleet: Fleet,
        tokenizer: Tokenizer | None,
        plans_ahead: int,
        pacer: Pacer | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Put the scheduler's plans to work on the fleet; without `pacer` every round drafts all of draft_len."""
        self.scheduler = scheduler
        self.statistics = RunStatistics()
        self._fleet = fleet
        self._tokenizer = tokenizer
        self._plans_ahead = plans_ahead
        self._pacer = pacer
        self._clock = clock
        self._last_verdict = 0.0
        self._outstanding: deque[_Outstanding] = deque()
        self._streams: dict[int, Stream] = {}
        self._row_wants_logprobs: dict[int, bool] = {}

    def add(self, request: Request) -> Stream:
        """Queue a request.

        Raises:
            InvalidRequestError: it can never run; nothing else is affected.
        """
        running = self.scheduler.add(request)
        running.statistics.arrival = self._clock()
        tokenizer, prompt = self._tokenizer, request.prompt_token_ids
        detokenizer = IncrementalDetokenizer(tokenizer, prompt) if tokenizer is not None else None
        stream = Stream(request, detokenizer, running.statistics)
        self._streams[request.request_id] = stream
        return stream

    def cancel(self, request_id: int) -> bool:
        """End a request now; False when it is not known (any more)."""
        if not self.scheduler.cancel(request_id):
            return False
        # What rounds still out produce for it is ignored at their commit.
        self._close(request_id, FinishReason.CANCELLED)
        return True

    def has_begun(self, request_id: int) -> bool:
        """Whether a request has got a row yet; False too when it is not known (any more)."""
        return self.scheduler.has_begun(request_id)

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs, or a plan is still out."""
        return self.scheduler.has_work or bool(self._outstanding)

    def step(self) -> list[Stream]:
        """One heartbeat: keep the fleet supplied with plans, take one verdict in.

        Returns:
            The streams that gained tokens.
        """
        with self._fleet.stepping():
            return self._step()

    def _step(self) -> list[Stream]:
        started = self._clock()
        while len(self._outstanding) <= self._plans_ahead and (plan := self._schedule()) is not None:
            self._fleet.publish(plan)
            self._outstanding.append(_Outstanding(plan, self._places_with_logprobs(plan), self._clock()))
        planned = self._clock()
        self.statistics.orchestrating += planned - started
        if not self._outstanding:
            return []
        report = self._collect()
        received = self._clock()
        self.statistics.waiting += received - planned
        outstanding = self._outstanding.popleft()
        seconds = received - max(self._last_verdict, outstanding.published)
        self._last_verdict = received
        changed = self._commit(outstanding, report, seconds)
        committed = self._clock()
        self.statistics.committing += committed - received
        self.statistics.orchestrating += committed - received
        return changed

    def drain(self) -> None:
        """Take in the verdicts of plans that are still out, once no request is left; nothing while one is."""
        while self._outstanding and not self.scheduler.has_work:
            self.step()

    def close(self) -> None:
        """Let the engine ranks end."""
        self._fleet.close()

    def _schedule(self) -> RoundPlan | None:
        num_decoding = self.scheduler.num_decoding
        if self._pacer is None or not num_decoding:
            return self.scheduler.schedule()
        return self.scheduler.schedule(self._pacer.choose(num_decoding))

    def _collect(self) -> RoundReport:
        """The next verdict; reports of the draft leader on the way only add their times."""
        while True:
            report = self._fleet.collect()
            self.statistics.drafting += report.times.drafting
            self.statistics.transferring += report.times.transferring
            self.statistics.verifying += report.times.verifying
            if report.is_verdict:
                return report

    def _commit(self, outstanding: _Outstanding, report: RoundReport, seconds: float) -> list[Stream]:
        self.statistics.num_rounds += 1
        logprobs = dict(zip(outstanding.logprob_places, report.logprobs, strict=True))
        changed = []
        plan = outstanding.plan
        for result in commit_round(self.scheduler, plan, report, self._accept_token, self._pacer, seconds):
            stream = self._streams[result.running.request.request_id]
            self._record(stream, result, logprobs.get(result.index_in_verdict))
            changed.append(stream)
        return changed

    def _accept_token(self, running: RunningRequest, token: int) -> FinishReason | None:
        return self._streams[running.request.request_id].accept(token)

    def _record(self, stream: Stream, result: RowResult, logprobs: list[TokenLogprobs] | None) -> None:
        gained = len(result.new_token_ids)
        self.statistics.num_tokens += gained
        wanted = stream.request.sampling.logprobs
        if logprobs is not None and wanted is not None:
            stream.logprobs += [
                TokenLogprobs(entry.token_id, entry.logprob, entry.alternatives[:wanted]) for entry in logprobs[:gained]
            ]
        if result.running.finish_reason is not None:
            self._close(stream.request.request_id, result.running.finish_reason)

    def _places_with_logprobs(self, plan: RoundPlan) -> list[int]:
        """Places in the plan's verdict whose rows asked for log probabilities.

        Worked out when the plan goes out: by the time its verdict is here, a row may belong to another request.
        """
        for admission in plan.admissions:
            self._row_wants_logprobs[admission.row] = admission.sampling.logprobs is not None
        return [place for place, row in enumerate(plan.sampled_rows) if self._row_wants_logprobs[row]]

    def _close(self, request_id: int, reason: FinishReason) -> None:
        stream = self._streams.pop(request_id)
        stream.close(reason)
        self.statistics.add_request(stream.statistics)
