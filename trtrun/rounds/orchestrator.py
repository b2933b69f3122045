"""The orchestrator's heartbeat: plan, publish, wait for a verdict, commit. One round after another.

It knows the scheduler, the engine ranks, reports, what drafts pay, and clocks. It does not know requests' text
(`llm_engine`), models, devices, who computed what, or how bytes travel.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from parallel.watchdog.activity import Activity, Doing
from trtrun.core.nouns import FIRST_WARM_UP_ROUND, RoundPlan
from trtrun.rounds.commit import RowUpdate, ahead_round, commit_round
from trtrun.rounds.engine_ranks import EngineRanks
from trtrun.scheduling.scheduler import Scheduler
from trtrun.speculation.acceptance import AcceptanceWatch, DraftRecord
from trtrun.speculation.ahead.policy import AheadPolicy
from trtrun.speculation.match_pacing import MatchPacer
from trtrun.speculation.pacing import Pacer
from trtrun.speculation.round_costs import RoundCosts
from trtrun.timing.spans import ORCHESTRATOR, RankSpans, SpanLog
from trtrun.timing.telemetry import RunStatistics
from trtrun.wire.reports import RoundReport

_GUIDE_SECONDS = 0.01
"""How long a step waits for guides where nothing else can be done: what is asked meanwhile comes behind it."""

_ROUNDS_BETWEEN_KEEPING = 4096
"""After so many what was seen of drafts is written to disk, which takes about a millisecond."""


@dataclass(frozen=True, slots=True)
class _PublishedPlan:
    """A plan that is out, the places in its verdict that will carry log probabilities, how many of its rows are as if
    nothing were drafted for them, whether only some of the others draft, and when it went out."""

    plan: RoundPlan
    logprob_places: list[int]
    num_plain: int
    is_partial: bool
    published: float


class Orchestrator:
    """Runs the scheduler's plans on the engine ranks.

    Attributes:
        scheduler: rows, blocks and the waiting queue.
        totals: what rounds did since the last reset.
        commit_seconds: what this thread computed to take in the verdict of the last step.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        ranks: EngineRanks,
        pacer: Pacer | None = None,
        clock: Callable[[], float] = time.perf_counter,
        ahead: AheadPolicy | None = None,
        watch: AcceptanceWatch | None = None,
        keep: Callable[[RoundCosts | None, DraftRecord], None] | None = None,
    ) -> None:
        """Put the scheduler's plans to work on the ranks; without `pacer` every round drafts all of draft_len, without
        `ahead` nothing is drafted before the verdict that it follows, without `watch` nothing is said of drafts.
        `keep` is given what the pacer has seen, now and then and at the end, for other runs."""
        self.scheduler = scheduler
        self.totals = RunStatistics()
        self.commit_seconds = 0.0
        self._ranks = ranks
        self._pacer = pacer
        self._ahead = ahead
        self._watch = watch
        self._keep = keep
        self._clock = clock
        self._plans_ahead = scheduler.limits.plans_ahead
        self._last_verdict = 0.0
        self._committed = 0
        self._log: SpanLog | None = None
        self._published: deque[_PublishedPlan] = deque()
        self._rows_with_logprobs: set[int] = set()
        self._before: RoundPlan | None = None
        self._num_unkept = 0

    @property
    def has_work(self) -> bool:
        """Whether a completion waits or runs, or a plan is still out."""
        return self.scheduler.has_work or bool(self._published)

    def step(self) -> list[RowUpdate]:
        """Keep the ranks supplied with plans, and take one verdict in. Where all that is left waits for guides, nothing
        comes, after a moment.

        Raises:
            RankFailedError: a rank failed; the message names it.
        """
        self.commit_seconds = 0.0
        with self._ranks.stepping():
            started = self._clock()
            self._publish_plans(started)
            planned = self._clock()
            self.totals.orchestrating += planned - started
            if not self._published:
                if self.scheduler.has_guide_news:
                    self._let_in(_GUIDE_SECONDS)
                return []
            report = self._collect()
            received = self._clock()
            self.totals.waiting += received - planned
            self._trace("waiting", self._published[0].plan.round_index, planned, received)
            began = time.thread_time()
            gains = self._commit(self._published.popleft(), report, received)
            self.commit_seconds = time.thread_time() - began
            self.add_committing(self._clock() - received)
            if self._plans_ahead:  # the ranks go on while the text of this round is made
                started = self._clock()
                self._publish_plans(started)
                self.totals.orchestrating += self._clock() - started
            return gains

    @property
    def draft_is_lost(self) -> bool:
        """Whether the draft engine is gone for good: no row will be drafted any more."""
        return self._ranks.draft_is_lost

    @property
    def activity(self) -> Activity:
        """Where the thread that takes the steps says what it is doing."""
        return self._ranks.activity

    def look(self) -> Mapping[int, Doing]:
        """What each rank is doing, by world ranks; 0 is the thread that takes the steps. From any thread."""
        return self._ranks.look()

    def add_committing(self, seconds: float) -> None:
        """Count the time that something took, until now, between a verdict and the tokens and texts of its rows."""
        self.totals.committing += seconds
        self.totals.orchestrating += seconds
        if self._log is not None:
            ended = self._clock()
            self._trace("committing", self._committed, ended - seconds, ended)

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
        self._before = None
        self.scheduler.reset()
        self._ranks.reset()

    def begin_adapter(self, name: str, path: Path) -> None:
        """Have every target rank read an adapter; see EngineRanks."""
        self._ranks.begin_adapter(name, path)

    def take_adapter(self, seconds: float) -> list[str] | None:
        """What is wrong with it, once all ranks have answered; see EngineRanks."""
        return self._ranks.take_adapter(seconds)

    def end_adapter(self, slot: int) -> None:
        """Have it fill a slot that no row has, or forgotten where that is 0; see EngineRanks."""
        self._ranks.end_adapter(slot)

    def start_trace(self, most_rounds: int) -> None:
        """Log what this rank and every engine rank does in the next `most_rounds` rounds. No plan may be out.

        Raises:
            RankFailedError: a rank failed.
        """
        self._log = SpanLog(most_rounds)
        self._ranks.start_trace(most_rounds)

    def take_trace(self) -> list[RankSpans]:
        """End the logs and return them: this rank's as orchestrator, then those of the engine ranks in rank order, all
        by this process's clock. No plan may be out.

        Raises:
            RankFailedError: a rank failed.
        """
        log, self._log = self._log or SpanLog(0), None
        own = RankSpans(0, ORCHESTRATOR, log.spans, log.num_dropped_rounds)
        return [own, *self._ranks.take_trace()]

    def close(self) -> None:
        """Let the engine ranks end."""
        self._keep_what_was_seen()
        self._ranks.close()

    def _keep_what_was_seen(self) -> None:
        if self._pacer is not None and self._keep is not None and self._num_unkept:
            self._num_unkept = 0
            self._keep(self._pacer.seen_costs, self._pacer.seen)

    def _trace(self, name: str, round_index: int, start: float, end: float) -> None:
        if self._log is not None:
            self._log.add(name, round_index, start, end)

    def _order_guides(self) -> None:
        """Have guides built that completions wait for, and those let in whose are. What is built at once, as what is
        kept from before, makes room for others."""
        while self.scheduler.has_guide_news:
            orders = self.scheduler.take_guide_orders()
            if orders:
                self._ranks.order_guides(orders)
            if not self._let_in():
                return

    def _let_in(self, seconds: float = 0.0) -> bool:
        """Take in what guides are built, and wait for some where there are none; whether there were."""
        built = self._ranks.take_built_guides(seconds)
        for guide in built:
            self.scheduler.note_built(guide)
        return bool(built)

    def _publish_plans(self, started: float) -> None:
        self._order_guides()
        while len(self._published) <= self._plans_ahead:
            num_decoding, num_plain = self.scheduler.decoding_load() if self._pacer is not None else (0, 0)
            most_drafting, plan = self._schedule(num_decoding, num_plain)
            if plan is None:
                return
            if self._pacer is not None and num_decoding:
                num_drafting = int((plan.draft_lens > 0).sum())
                if isinstance(self._pacer, MatchPacer):
                    num_plain = num_decoding - num_drafting
                self._pacer.note_plan(num_decoding, num_plain, plan.draft_len, num_drafting)
            self._ranks.publish(plan)
            published = self._clock()
            places, is_partial = self._places_with_logprobs(plan), most_drafting is not None and plan.draft_len > 0
            self._published.append(_PublishedPlan(plan, places, num_plain, is_partial, published))
            self._trace("planning", plan.round_index, started, published)
            started = published

    def _schedule(self, num_decoding: int, num_plain: int) -> tuple[int | None, RoundPlan | None]:
        """Rows that may draft, None for all, and the plan."""
        pacer, draft_len, most_drafting, kinds = self._pacer, None, None, None
        if isinstance(pacer, MatchPacer):
            draft_len, kinds = pacer.choose_matches(self.scheduler.match_kinds())
        elif pacer is not None and num_decoding:
            draft_len = pacer.choose(num_decoding, num_plain)
            # A draft engine that drafts ahead is fed anyway.
            most_drafting = pacer.most_drafting(num_decoding, num_plain) if self._ahead is None else None
        if self.draft_is_lost:
            draft_len = 0  # the target alone: no packet is looked for
        pays = pacer is None or pacer.pays
        plan = self.scheduler.schedule(
            draft_len,
            most_drafting=most_drafting,
            takes_given=not self.draft_is_lost,
            drafts_pay=pays,
            drafted_kinds=kinds,
            # One that drafts ahead is fed anyway.
            is_unsure=pacer is not None and pacer.is_unsure and self._ahead is None,
        )
        if plan is None or self._ahead is None:
            return most_drafting, plan
        num_rows = len(plan.decode_rows)
        # A round without drafts has nothing to predict, but for the first tokens behind prompts.
        asked = (num_rows, plan.draft_len if num_rows else None)
        guesses = self._ahead.num_guesses(*asked)
        return None, replace(plan, num_guesses=guesses, redraft_threshold=self._ahead.redraft_threshold(*asked))

    def _places_with_logprobs(self, plan: RoundPlan) -> list[int]:
        """Places in the plan's verdict whose rows asked for log probabilities.

        Worked out when the plan goes out: by the time its verdict is here, a row may belong to another request.
        """
        for admission in plan.admissions:
            if admission.sampling.logprobs is not None:
                self._rows_with_logprobs.add(admission.row)
            else:
                self._rows_with_logprobs.discard(admission.row)
        if not self._rows_with_logprobs:
            return []
        return [place for place, row in enumerate(plan.sampled_rows) if row in self._rows_with_logprobs]

    def _collect(self) -> RoundReport:
        """The next verdict; reports of the draft leader on the way only add their times."""
        while True:
            report = self._ranks.collect()
            if self._ranks.draft_is_lost:
                self.totals.draft_losses = 1
            if report.round_index >= FIRST_WARM_UP_ROUND:
                continue  # the draft leader's of a round before the first request, whose verdict has been there
            times = report.times
            self.totals.add_phases(times.drafting, times.transferring, times.verifying, report.is_verdict)
            self.totals.add_warmup_misses(times.warmup_misses)
            if report.is_verdict:
                return report
            self._note_draft(report)

    def _note_draft(self, report: RoundReport) -> None:
        """The draft leader's report, which comes before or after that of the target leader."""
        self.totals.add_guesses(report.num_guesses, report.times.anticipating)
        if self._ahead is not None:
            self._ahead.record_chances(report.hit_chances)

    def _commit(self, published: _PublishedPlan, report: RoundReport, received: float) -> list[RowUpdate]:
        seconds = received - max(self._last_verdict, published.published)
        self._last_verdict = received
        self._committed = published.plan.round_index
        self.totals.num_rounds += 1
        self.totals.add_request_work("guides", report.times.guiding)
        self.totals.num_guide_waits += sum([count < 0 for count in report.num_tokens])
        self._num_unkept += 1
        if self._num_unkept >= _ROUNDS_BETWEEN_KEEPING:
            self._keep_what_was_seen()
        logprobs = dict(zip(published.logprob_places, report.logprobs, strict=True))
        if self._ahead is not None and published.plan.draft_len and not self._ranks.draft_is_lost:
            self._ahead.record_round(ahead_round(self._before, published.plan, report, seconds))
        self._before = published.plan
        results = commit_round(
            self.scheduler,
            published.plan,
            report,
            self._pacer,
            seconds,
            num_plain=published.num_plain,
            is_partial=published.is_partial,
            watch=self._watch,
        )
        self.totals.num_tokens += sum([len(result.new_token_ids) for result in results])
        return [
            RowUpdate(result, logprobs.get(result.index_in_verdict), report.logits.get(result.index_in_verdict))
            for result in results
        ]
