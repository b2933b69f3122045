"""The orchestrator's heartbeat: plan, publish, wait for a verdict, commit. One round after another.

It knows the scheduler, the engine ranks and clocks. It does not know requests' text (`llm_engine`), models, devices or
how bytes travel.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from trtrun.core import RoundPlan, TokenLogprobs
from trtrun.roles.engine_ranks import EngineRanks
from trtrun.scheduling.completion import RowResult
from trtrun.scheduling.scheduler import Scheduler
from trtrun.speculation.cycle import commit_round
from trtrun.speculation.pacing import Pacer
from trtrun.telemetry import RunStatistics
from trtrun.wire import RoundReport


@dataclass(frozen=True, slots=True)
class RowGain:
    """What a round gave one completion, and the log probabilities of its verdict where the row asked for them: at
    least one entry a token, with as many alternatives as any row of the round asked for."""

    result: RowResult
    logprobs: list[TokenLogprobs] | None


@dataclass(frozen=True, slots=True)
class _PublishedPlan:
    """A plan that is out, the places in its verdict that will carry log probabilities, and when it went out."""

    plan: RoundPlan
    logprob_places: list[int]
    published: float


class Orchestrator:
    """Runs the scheduler's plans on the engine ranks.

    Attributes:
        scheduler: rows, blocks and the waiting queue.
        totals: what rounds did since the last reset.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        ranks: EngineRanks,
        pacer: Pacer | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Put the scheduler's plans to work on the ranks; without `pacer` every round drafts all of draft_len."""
        self.scheduler = scheduler
        self.totals = RunStatistics()
        self._ranks = ranks
        self._pacer = pacer
        self._clock = clock
        self._plans_ahead = scheduler.limits.plans_ahead
        self._last_verdict = 0.0
        self._published: deque[_PublishedPlan] = deque()
        self._row_wants_logprobs: dict[int, bool] = {}

    @property
    def has_work(self) -> bool:
        """Whether a completion waits or runs, or a plan is still out."""
        return self.scheduler.has_work or bool(self._published)

    def step(self) -> list[RowGain]:
        """Keep the ranks supplied with plans, and take one verdict in.

        Raises:
            RankFailedError: a rank failed; the message names it.
        """
        with self._ranks.stepping():
            started = self._clock()
            self._publish_plans()
            planned = self._clock()
            self.totals.orchestrating += planned - started
            if not self._published:
                return []
            report = self._collect()
            received = self._clock()
            self.totals.waiting += received - planned
            gains = self._commit(self._published.popleft(), report, received)
            self.add_committing(self._clock() - received)
            if self._plans_ahead:  # the ranks go on while the text of this round is made
                started = self._clock()
                self._publish_plans()
                self.totals.orchestrating += self._clock() - started
            return gains

    @property
    def draft_is_lost(self) -> bool:
        """Whether the draft engine is gone for good: no row will be drafted any more."""
        return self.totals.draft_losses > 0

    def add_committing(self, seconds: float) -> None:
        """Count the time that something took between a verdict and the tokens and texts of its rows."""
        self.totals.committing += seconds
        self.totals.orchestrating += seconds

    def drain(self) -> None:
        """Take in the verdicts of plans that are still out, once no completion is left; nothing while one is."""
        while self._published and not self.scheduler.has_work:
            self.step()

    def reset(self) -> None:
        """Forget all completions and plans after an exception in the middle of a round, so that the next finds all
        whole.

        Raises:
            RankFailedError: a rank failed, too.
        """
        self._published.clear()
        self.scheduler.reset()
        self._ranks.reset()

    def close(self) -> None:
        """Let the engine ranks end."""
        self._ranks.close()

    def _publish_plans(self) -> None:
        while len(self._published) <= self._plans_ahead and (plan := self._schedule()) is not None:
            self._ranks.publish(plan)
            self._published.append(_PublishedPlan(plan, self._places_with_logprobs(plan), self._clock()))

    def _schedule(self) -> RoundPlan | None:
        num_decoding = self.scheduler.num_decoding
        if self._pacer is None or not num_decoding:
            return self.scheduler.schedule()
        return self.scheduler.schedule(self._pacer.choose(num_decoding))

    def _places_with_logprobs(self, plan: RoundPlan) -> list[int]:
        """Places in the plan's verdict whose rows asked for log probabilities.

        Worked out when the plan goes out: by the time its verdict is here, a row may belong to another request.
        """
        for admission in plan.admissions:
            self._row_wants_logprobs[admission.row] = admission.sampling.logprobs is not None
        return [place for place, row in enumerate(plan.sampled_rows) if self._row_wants_logprobs[row]]

    def _collect(self) -> RoundReport:
        """The next verdict; reports of the draft leader on the way only add their times."""
        while True:
            report = self._ranks.collect()
            if self._ranks.draft_is_lost:
                self.totals.draft_losses = 1
            times = report.times
            self.totals.add_phases(times.drafting, times.transferring, times.verifying, report.is_verdict)
            if report.is_verdict:
                return report

    def _commit(self, published: _PublishedPlan, report: RoundReport, received: float) -> list[RowGain]:
        seconds = received - max(self._last_verdict, published.published)
        self._last_verdict = received
        self.totals.num_rounds += 1
        logprobs = dict(zip(published.logprob_places, report.logprobs, strict=True))
        results = commit_round(self.scheduler, published.plan, report, self._pacer, seconds)
        self.totals.num_tokens += sum(len(result.new_token_ids) for result in results)
        return [RowGain(result, logprobs.get(result.index_in_verdict)) for result in results]
