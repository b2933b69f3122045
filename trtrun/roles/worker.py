"""An engine rank's part of each round: draft and target share this one loop.

A process holds a draft rank, a target rank or, where both list its device, both. It runs the functions of
`speculation.cycle` that belong to its roles and reports what its leaders saw. It does not know where plans come from
(engine_ranks.py) nor how the engines were made (startup.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from parallel.link import Link
from parallel.watchdog.activity import Activity, Phase
from trtrun.core import RoundPlan
from trtrun.engine.runner import Engine
from trtrun.roles.launched_round import DecidedRound, DoneRound, LaunchedRound
from trtrun.roles.phase_clock import HostPhases, PhaseClock
from trtrun.roles.verdict_report import VerdictCopy
from trtrun.speculation.cycle import begin_round, draft_round, learn_verdict, transfer, verify_round
from trtrun.speculation.drafter import Drafter
from trtrun.wire.reports import ReportArrays, RoundTimes


@dataclass
class Worker:
    """One process's engine ranks.

    Attributes:
        link: between draft and target ranks.
        drafter: set where the process drafts.
        target: set where it holds a target rank.
        drafts_in_place: whether the drafter runs on the target ranks, so that drafts need not travel.
        leads_draft: whether it is the first of the ranks that draft.
        leads_target: whether its target rank is the target leader.
        use_logits: acceptance mode of sampled rows.
        device: of its engines.
        activity: where the process says what it is doing.
        phases: times the phases of rounds; only leaders take its times.
        forced_acceptance: for benchmarks, see `speculation.verify`.
    """

    link: Link
    drafter: Drafter | None
    target: Engine | None
    drafts_in_place: bool
    leads_draft: bool
    leads_target: bool
    use_logits: bool
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    activity: Activity = field(default_factory=Activity)
    phases: PhaseClock = field(default_factory=HostPhases)
    forced_acceptance: float | None = None

    @torch.inference_mode()
    def launch_round(self, plan: RoundPlan) -> LaunchedRound:
        """Run one round, but for what a GPU has still to do when this returns. Nothing here waits for a GPU."""
        self.phases.start(plan.round_index)
        self.activity.enter(plan.round_index, Phase.DRAFTING)
        by_probability = begin_round(plan, self.drafter, self.target, use_logits=self.use_logits)
        draft = draft_round(self.drafter, plan, by_probability) if self.drafter is not None else None
        self.phases.end("drafting")
        self.activity.enter(plan.round_index, Phase.TRANSFERRING)
        received = transfer(
            self.link,
            plan,
            draft if self.leads_draft or self.drafts_in_place else None,
            in_place=self.drafts_in_place,
            receives=self.target is not None,
            num_probability_rows=len(by_probability),
            vocab=self.target.vocab_size if self.target is not None else 0,
        )
        self.phases.end("transferring")
        self.activity.enter(plan.round_index, Phase.VERIFYING if self.target is not None else Phase.AWAITING_VERDICT)
        verdict = None
        if self.target is not None:
            verdict = verify_round(
                self.target,
                self.link,
                plan,
                received,
                by_probability,
                leads=self.leads_target,
                forced_acceptance=self.forced_acceptance,
            )
        if self.drafter is not None:
            learn_verdict(self.drafter, self.link, plan, verdict)
        self.phases.end("verifying" if self.target is not None else "waiting")
        self.activity.enter(plan.round_index, Phase.REPORTING)
        if self.leads_target:
            return DecidedRound(VerdictCopy(plan, verdict), self._take_times)
        return DoneRound(ReportArrays(plan.round_index, self._take_times()) if self.leads_draft else None)

    def _take_times(self) -> RoundTimes:
        """What the phases took that this process leads: on a GPU those of rounds that are known to be over."""
        seconds = self.phases.take()
        return RoundTimes(
            drafting=seconds.get("drafting", 0.0) if self.leads_draft else 0.0,
            transferring=seconds.get("transferring", 0.0) if self.leads_target else 0.0,
            verifying=seconds.get("verifying", 0.0) if self.leads_target else 0.0,
        )

    def reset(self) -> None:
        """Forget a round that did not come to its end. For a job of one process: other ranks would not know of it."""
        self.link.forget()

    def close(self) -> None:
        """Give back what must not outlive the communicators. No round follows."""
        if self.target is not None:
            self.target.close()
        if self.drafter is not None:
            self.drafter.close()
