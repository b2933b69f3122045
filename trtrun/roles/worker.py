"""An engine rank's part of each round: draft and target share this one loop.

A process holds a draft rank, a target rank or, where both list its device, both. It runs the functions of
`speculation.cycle` that belong to its roles and reports what its leaders saw. It does not know where plans come from
(fleet.py) nor how the engines were made (startup.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from parallel.watchdog.activity import Activity, Phase
from trtrun.core import Draft, RoundPlan, Verdict
from trtrun.roles.phase_clock import HostPhases, PhaseClock
from trtrun.speculation.cycle import draft_round, probability_rows, transfer, verify_round
from trtrun.speculation.protocols import Drafter, DraftLink, TargetEngine
from trtrun.wire import RoundTimes, encode_report


@dataclass
class Worker:
    """One process's engine ranks.

    Attributes:
        link: between draft and target ranks.
        drafter: set where the process holds a draft rank.
        target: set where it holds a target rank.
        leads_draft: whether its draft rank is the draft leader.
        leads_target: whether its target rank is the target leader.
        use_logits: acceptance mode of sampled rows.
        activity: where the process says what it is doing.
        phases: times the phases of rounds; only leaders take its times.
    """

    link: DraftLink
    drafter: Drafter | None
    target: TargetEngine | None
    leads_draft: bool
    leads_target: bool
    use_logits: bool
    activity: Activity = field(default_factory=Activity)
    phases: PhaseClock = field(default_factory=HostPhases)

    @torch.inference_mode()
    def run_round(self, plan: RoundPlan) -> bytes | None:
        """Run one round; returns the report of a leader, None elsewhere."""
        self.phases.start()
        self.activity.enter(plan.round_index, Phase.DRAFTING)
        if self.target is not None:
            self.target.begin_round(plan)
        draft = draft_round(self.drafter, plan) if self.drafter is not None else None
        self.phases.end("drafting")
        self.activity.enter(plan.round_index, Phase.TRANSFERRING)
        received = self._transfer(plan, draft)
        self.phases.end("transferring")
        self.activity.enter(plan.round_index, Phase.VERIFYING if self.target is not None else Phase.AWAITING_VERDICT)
        verdict = self._decide(plan, received)
        self.phases.end("verifying")
        self.activity.enter(plan.round_index, Phase.REPORTING)
        if self.leads_target:
            return _encode_verdict(plan, verdict, self._take_times)
        return encode_report(plan.round_index, self._take_times()) if self.leads_draft else None

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

    def _transfer(self, plan: RoundPlan, draft: Draft | None) -> Draft | None:
        target = self.target
        count = len(probability_rows(plan, target.rows.sampling, self.use_logits)) if target is not None else 0
        return transfer(
            self.link,
            plan,
            draft if self.leads_draft else None,
            receives=target is not None,
            num_probability_rows=count,
            vocab=target.vocab_size if target is not None else 0,
        )

    def _decide(self, plan: RoundPlan, draft: Draft | None) -> Verdict | None:
        """Verify, or learn the verdict; either way the rows of this process's engines advance."""
        verdict: Verdict | None = None
        if self.target is not None:
            verdict = verify_round(
                self.target, self.link, plan, draft, leads=self.leads_target, use_logits=self.use_logits
            )
        elif plan.sampled_rows:
            verdict = Verdict(*self.link.receive_verdict(len(plan.sampled_rows), plan.draft_len + 1))
        if self.drafter is not None and verdict is not None:
            self.drafter.advance(plan, verdict.num_tokens, verdict.tokens)
        return verdict


def _encode_verdict(plan: RoundPlan, verdict: Verdict | None, take_times: Callable[[], RoundTimes]) -> bytes:
    """The one copy from the device to the host in a round: counts and tokens travel in one tensor.

    The times are taken after it, when the device has done all of the round.
    """
    if verdict is None:
        empty = torch.empty((0, 1), dtype=torch.int64).numpy()
        return encode_report(plan.round_index, take_times(), empty[:, 0], empty)
    packed = torch.cat((verdict.num_tokens.unsqueeze(1), verdict.tokens), dim=1).cpu().numpy()
    if verdict.logprobs is None:
        return encode_report(plan.round_index, take_times(), packed[:, 0], packed[:, 1:])
    return encode_report(
        plan.round_index,
        take_times(),
        packed[:, 0],
        packed[:, 1:],
        verdict.logprobs.token_ids.cpu().numpy(),
        verdict.logprobs.values.cpu().numpy(),
    )
