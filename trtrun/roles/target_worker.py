"""A target rank's part of each round, where the draft has devices of its own.

The target looks for the draft's packet and does not depend on it: what is not there in time is not verified, and the
rows take a plain step. No communicator that it waits in has a draft rank in it, but for draft_probs, which are fetched
once a packet says that they are there. It runs the functions of `speculation.cycle` that belong to it. It does not
know where plans come from (engine_ranks.py), how drafts are made, nor how the engine was made (startup.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from parallel.communicator import Communicator
from parallel.mailbox import Mailbox
from parallel.watchdog.activity import Activity, Phase
from trtrun.core import Draft, HostDraft, HostVerdict, RoundPlan
from trtrun.engine.runner import Engine
from trtrun.roles.launched_round import DoneRound, LaunchedRound
from trtrun.roles.phase_clock import HostPhases, PhaseClock
from trtrun.roles.verdict_report import VerdictCopy
from trtrun.speculation.cycle import begin_round, verify_round
from trtrun.tensors import device_integers
from trtrun.wire.packets import DRAFT_TAG, VERDICT_TAG, decode_draft, encode_verdict, round_of
from trtrun.wire.reports import ReportArrays, RoundTimes

SHORTEST_PATIENCE = 0.1
"""Seconds that a packet is waited for at least: first rounds on a GPU compile kernels."""

_ROUNDS_OF_PATIENCE = 4
_KEPT_TIMES = 16


class GroupVerdicts:
    """The way of a verdict to the other target ranks: over their own communicator alone. See DraftLink."""

    def __init__(self, group: Communicator) -> None:
        """Use the target's tensor-parallel group, whose first rank decides."""
        self._group = group

    def send_verdict(self, num_tokens: torch.Tensor, tokens: torch.Tensor) -> None:
        """On the target leader."""
        if self._group.size > 1:
            self._group.broadcast(torch.cat((num_tokens.unsqueeze(1), tokens), dim=1), 0)

    def receive_verdict(self, rows: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """On the others."""
        packet = torch.empty((rows, width + 1), dtype=torch.int64, device=self._group.device)
        self._group.broadcast(packet, 0)
        return packet[:, 0], packet[:, 1:]


@dataclass
class TargetWorker:
    """One target rank.

    Attributes:
        target: its engine.
        group: the target's tensor-parallel group.
        peers: all workers, for draft_probs; `draft_peer` is the draft leader's place there.
        mail: messages on the host.
        draft_ranks: world ranks of the draft engine.
        target_ranks: of the target engine, the leader first.
        rank: this one.
        use_logits: acceptance mode of sampled rows.
        device: of its engine.
        draft_is_lost: whether no packet will come any more.
        activity: where the process says what it is doing.
        phases: times the phases of rounds; only the leader takes its times.
        forced_acceptance: for benchmarks, see `speculation.verify`.
    """

    target: Engine
    group: Communicator
    peers: Communicator
    draft_peer: int
    mail: Mailbox
    draft_ranks: tuple[int, ...]
    target_ranks: tuple[int, ...]
    rank: int
    use_logits: bool
    device: torch.device
    draft_is_lost: Callable[[], bool]
    activity: Activity = field(default_factory=Activity)
    phases: PhaseClock = field(default_factory=HostPhases)
    forced_acceptance: float | None = None
    _seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT_TIMES))

    @property
    def leads(self) -> bool:
        """Whether it decides."""
        return self.rank == self.target_ranks[0]

    def launch_round(self, plan: RoundPlan) -> LaunchedRound:
        """Run one round to its end: draft ranks wait for the verdict as a message of the host."""
        return DoneRound(self.run_round(plan))

    @torch.inference_mode()
    def run_round(self, plan: RoundPlan) -> ReportArrays | None:
        """Run one round; returns the leader's report, None elsewhere."""
        self.phases.start(plan.round_index)
        self.activity.enter(plan.round_index, Phase.AWAITING_DRAFT)
        by_probability = begin_round(plan, None, self.target, use_logits=self.use_logits)
        arrived = self._await_draft(plan) if plan.draft_len else None
        draft, by_probability = self._take_draft(plan, arrived, by_probability)
        self.phases.end("transferring")
        self.activity.enter(plan.round_index, Phase.VERIFYING)
        verdict = verify_round(
            self.target,
            GroupVerdicts(self.group),
            plan,
            draft,
            by_probability,
            leads=self.leads,
            forced_acceptance=self.forced_acceptance,
        )
        if not self.leads:
            self.phases.end("verifying")
            return None
        report = VerdictCopy(plan, verdict).wait()
        self._tell_draft_ranks(plan, report)
        self.phases.end("verifying")
        self.activity.enter(plan.round_index, Phase.REPORTING)
        return self._with_times(report, arrived)

    def close(self) -> None:
        """Give back what must not outlive the communicators. No round follows."""
        self.target.close()

    def _await_draft(self, plan: RoundPlan) -> HostDraft | None:
        """The packet of this round: the leader's, which hands it to the others; None where it is not there in time."""
        if not self.leads:
            packet = self.mail.wait(self.target_ranks[0], DRAFT_TAG)
            return decode_draft(packet) if packet else None
        packet = self._look_for_packet(plan.round_index)
        for rank in self.target_ranks[1:]:
            self.mail.post(rank, DRAFT_TAG, packet or b"")
        return decode_draft(packet) if packet else None

    def _look_for_packet(self, round_index: int) -> bytes | None:
        while True:
            packet = self.mail.wait(self.draft_ranks[0], DRAFT_TAG, self._patience, self.draft_is_lost)
            if packet is None or round_of(packet) == round_index:
                return packet
            # One of a round that the target did not wait for any longer.

    @property
    def _patience(self) -> float | None:
        """Seconds to wait for a packet. With draft_probs the tokens of a seed depend on drafts, and so must not depend
        on times."""
        if self.use_logits:
            return None
        usual = sorted(self._seconds)[len(self._seconds) // 2] if self._seconds else 0.0
        return max(SHORTEST_PATIENCE, _ROUNDS_OF_PATIENCE * usual)

    def _take_draft(
        self, plan: RoundPlan, arrived: HostDraft | None, by_probability: list[int]
    ) -> tuple[Draft | None, list[int]]:
        """The draft on the device, and the rows that are accepted by probability: none without a packet."""
        if arrived is None:
            return None, []
        width = max(map(len, arrived.tokens), default=0)
        probs = None
        if by_probability and self.leads:
            shape = (len(by_probability), plan.draft_len, self.target.vocab_size)
            probs = self.peers.recv(torch.empty(shape, device=self.target.device), self.draft_peer)[:, :width]
        if not width:
            return None, []
        packed = device_integers(
            [[len(tokens), *tokens, *[0] * (width - len(tokens))] for tokens in arrived.tokens], self.target.device
        )
        return Draft(packed[:, 1:], packed[:, 0], probs), by_probability

    def _tell_draft_ranks(self, plan: RoundPlan, report: ReportArrays) -> None:
        assert report.num_tokens is not None
        if not plan.sampled_rows:
            return
        tokens = [row[:count] for row, count in zip(report.tokens.tolist(), report.num_tokens.tolist(), strict=True)]
        payload = encode_verdict(HostVerdict(plan.round_index, tokens))
        for rank in self.draft_ranks if not self.draft_is_lost() else ():
            self.mail.post(rank, VERDICT_TAG, payload)

    def _with_times(self, report: ReportArrays, arrived: HostDraft | None) -> ReportArrays:
        """The report with what the phases took and which rows' drafts were foreseen."""
        seconds = self.phases.take()
        verifying = seconds.get("verifying", 0.0)
        self._seconds.append(verifying)
        foreseen = np.zeros(len(report.draft_lens), dtype=np.int64)
        if arrived is not None:
            foreseen[: len(arrived.foreseen)] = arrived.foreseen
        times = RoundTimes(transferring=seconds.get("transferring", 0.0), verifying=verifying)
        return replace(report, times=times, foreseen=foreseen)
