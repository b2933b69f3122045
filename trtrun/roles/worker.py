"""An engine rank's part of each round: draft and target share this one loop.

A process holds a draft rank, a target rank or, where both list its device, both. It runs the functions of
`speculation.cycle` that belong to its roles and reports what its leaders saw. It does not know where plans come from
(engine_ranks.py) nor how the engines were made (startup.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from parallel.link import Link
from parallel.watchdog.activity import Activity, Phase
from trtrun.core import RoundPlan, Verdict
from trtrun.engine.runner import Engine
from trtrun.roles.phase_clock import HostPhases, PhaseClock
from trtrun.speculation.cycle import begin_round, draft_round, learn_verdict, transfer, verify_round
from trtrun.speculation.drafter import Drafter
from trtrun.wire import ReportArrays, RoundTimes


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

    @torch.inference_mode()
    def run_round(self, plan: RoundPlan) -> ReportArrays | None:
        """Run one round; returns the report of a leader, None elsewhere."""
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
            verdict = verify_round(self.target, self.link, plan, received, by_probability, leads=self.leads_target)
        if self.drafter is not None:
            learn_verdict(self.drafter, self.link, plan, verdict)
        self.phases.end("verifying" if self.target is not None else "waiting")
        self.activity.enter(plan.round_index, Phase.REPORTING)
        if self.leads_target:
            return _read_verdict(plan, verdict, self._take_times)
        return ReportArrays(plan.round_index, self._take_times()) if self.leads_draft else None

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


def _read_verdict(plan: RoundPlan, verdict: Verdict | None, take_times: Callable[[], RoundTimes]) -> ReportArrays:
    """The one copy from the device to the host in a round: counts, lengths, tokens and the bits of their logits travel
    in one tensor. A row with a logit that is not finite gains no token: looking for that here costs the device nothing.

    The times are taken after it, when the device has done all of the round.
    """
    if verdict is None:
        tokens = np.empty((0, 1), dtype=np.int64)
        return ReportArrays(plan.round_index, take_times(), tokens[:, 0], tokens[:, 0], tokens)
    assert verdict.draft_lens is not None and verdict.chosen_logits is not None  # the leader's own
    bits = verdict.chosen_logits.view(torch.int32).to(torch.int64)
    columns = (verdict.num_tokens.unsqueeze(1), verdict.draft_lens.unsqueeze(1), verdict.tokens, bits)
    packed = torch.cat(columns, dim=1).cpu().numpy()
    width = verdict.tokens.shape[1]
    num_tokens, tokens = packed[:, 0], packed[:, 2 : 2 + width]
    chosen = np.isfinite(packed[:, 2 + width :].astype(np.int32).view(np.float32))
    if not chosen.all():
        num_tokens = np.where((chosen | (tokens < 0)).all(axis=1), num_tokens, 0)
    report = (plan.round_index, take_times(), num_tokens, np.maximum(packed[:, 1], 0), tokens)
    if verdict.logprobs is None:
        return ReportArrays(*report)
    return ReportArrays(*report, verdict.logprobs.token_ids.cpu().numpy(), verdict.logprobs.values.cpu().numpy())
