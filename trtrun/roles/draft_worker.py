"""A draft rank's part of each round, where the draft has devices of its own.

It proposes, drafts ahead while the target verifies, and learns the verdict, which comes as a message. Where the verdict
is there before it has proposed, the target has gone on without it: it then only catches up. It runs the functions of
`speculation.cycle` that belong to it, and does not know where plans come from (engine_ranks.py) nor what the target
computes.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from parallel.communicator import Communicator
from parallel.errors import LinkError
from parallel.mailbox import Mailbox
from parallel.watchdog.activity import Activity, Phase
from trtrun.core import HostDraft, HostVerdict, RoundPlan
from trtrun.roles.launched_round import DoneRound, LaunchedRound
from trtrun.roles.phase_clock import HostPhases, PhaseClock
from trtrun.speculation.ahead.drafter import AheadDrafter
from trtrun.speculation.cycle import anticipate_round, learn_host_verdict, probability_rows, propose_round
from trtrun.wire.packets import DRAFT_TAG, LATE_TAG, VERDICT_TAG, decode_verdict, encode_draft
from trtrun.wire.reports import ReportArrays, RoundTimes

_ROUNDS_BETWEEN_CHANCES = 8
"""How often the leader tells how likely guesses are: chances move with some fifty verdicts."""


@dataclass
class DraftWorker:
    """One draft rank.

    Attributes:
        drafter: its engine and what it knows of rows.
        peers: all workers, for draft_probs; `target_peer` is the target leader's place there.
        mail: messages on the host.
        draft_ranks: world ranks of the draft engine, the leader first.
        target_leader: world rank.
        rank: this one.
        use_logits: whether draft_probs travel for sampled rows.
        device: of its engine.
        activity: where the process says what it is doing.
        phases: times the phases of rounds; only the leader takes its times.
    """

    drafter: AheadDrafter[Any]
    peers: Communicator
    target_peer: int
    mail: Mailbox
    draft_ranks: tuple[int, ...]
    target_leader: int
    rank: int
    use_logits: bool
    device: torch.device
    activity: Activity = field(default_factory=Activity)
    phases: PhaseClock = field(default_factory=HostPhases)

    @property
    def leads(self) -> bool:
        """Whether it speaks for the draft engine."""
        return self.rank == self.draft_ranks[0]

    def launch_round(self, plan: RoundPlan) -> LaunchedRound:
        """Run one round to its end: the next draft follows from the verdict, which comes as a message of the host."""
        return DoneRound(self.run_round(plan))

    @torch.inference_mode()
    def run_round(self, plan: RoundPlan) -> ReportArrays | None:
        """Run one round; returns the leader's report, None elsewhere."""
        self.phases.start(plan.round_index)
        self.activity.enter(plan.round_index, Phase.DRAFTING)
        self.drafter.begin_round(plan)
        early = self.mail.take(self.target_leader, VERDICT_TAG) if plan.sampled_rows else None
        is_late = self._agree_on_late(early is not None)
        draft = self._propose(plan) if plan.draft_len and not is_late else None
        self.phases.end("drafting")
        self.activity.enter(plan.round_index, Phase.ANTICIPATING)
        num_guesses = anticipate_round(self.drafter, plan, guesses=not is_late)
        self.phases.end("anticipating")
        self.activity.enter(plan.round_index, Phase.AWAITING_VERDICT)
        if plan.sampled_rows:
            verdict = self._await_verdict(plan, early)
            learn_host_verdict(self.drafter, plan, verdict)
        self.activity.enter(plan.round_index, Phase.REPORTING)
        if not self.leads:
            return None
        seconds = self.phases.take()
        times = RoundTimes(drafting=seconds.get("drafting", 0.0), anticipating=seconds.get("anticipating", 0.0))
        report = ReportArrays(plan.round_index, times, num_guesses=num_guesses, num_redrafted=_count_redrafted(draft))
        if num_guesses and plan.round_index % _ROUNDS_BETWEEN_CHANCES == 0:
            report = replace(report, hit_chances=np.asarray(self.drafter.hit_chances(), dtype=np.float32))
        return report

    def reset(self) -> None:
        """Nothing to forget that a later plan does not drop."""

    def close(self) -> None:
        """Give back what must not outlive the communicators. No round follows."""
        self.drafter.close()

    def _agree_on_late(self, is_late: bool) -> bool:
        """Whether the target has gone on without this round's draft: the leader's answer, on all draft ranks."""
        if len(self.draft_ranks) == 1:
            return is_late
        if not self.leads:
            return self.mail.wait(self.draft_ranks[0], LATE_TAG) == b"late"
        for rank in self.draft_ranks[1:]:
            self.mail.post(rank, LATE_TAG, b"late" if is_late else b"")
        return is_late

    def _propose(self, plan: RoundPlan) -> HostDraft:
        """Draft, and send it from the leader: first the packet, then draft_probs where it says that they follow."""
        draft = propose_round(self.drafter, plan)
        if self.leads:
            self.mail.post(self.target_leader, DRAFT_TAG, encode_draft(draft))
            if self.use_logits:
                rows = probability_rows(plan, self.drafter.engine.rows.sampling)
                probs = self.drafter.draft_probs(plan, rows)
                if probs is not None:
                    self.peers.send(probs, self.target_peer)
        return draft

    def _await_verdict(self, plan: RoundPlan, early: bytes | None) -> HostVerdict:
        payload = early or self.mail.wait(self.target_leader, VERDICT_TAG)
        assert payload is not None
        verdict = decode_verdict(payload)
        if verdict.round_index != plan.round_index:
            raise LinkError(f"a verdict of round {verdict.round_index} came in round {plan.round_index}")
        return verdict


def _count_redrafted(draft: HostDraft | None) -> int:
    """Rows that were drafted for while the target waited."""
    if draft is None:
        return 0
    return sum(bool(tokens) and not foreseen for tokens, foreseen in zip(draft.tokens, draft.foreseen, strict=True))
