"""From a rank's engines to its worker: which loop it runs, with which drafter, link and messages.

It knows who sits where and the drafting methods. It does not know weights, KV stores or rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from parallel.groups import Groups
from parallel.link import Link
from parallel.topology import Role, Topology
from parallel.watchdog.activity import Activity
from trtrun.config import RuntimeConfig
from trtrun.drafting_methods import METHODS
from trtrun.engine.runner import Engine
from trtrun.roles.draft_worker import DraftWorker
from trtrun.roles.engine_ranks import AnyWorker
from trtrun.roles.memory_requirements import guess_space, guess_steps
from trtrun.roles.phase_clock import HostPhases, PhaseClock, phase_clock
from trtrun.roles.policies import sure_draft_lens
from trtrun.roles.target_worker import TargetWorker
from trtrun.roles.worker import Worker
from trtrun.speculation.ahead.drafter import AheadDrafter
from trtrun.speculation.drafters import DRAFTERS, Drafter, Workplace


@dataclass(frozen=True)
class RankWorkplace:
    """One rank with its engines.

    Attributes:
        config: of the job.
        topology: of the job.
        rank: this one.
        groups: its communicators.
        device: of its engines.
        engines: by role.
        num_blocks: blocks of every KV store, but for those of guesses.
        target_vocab_size: padding included.
        activity: where the process says what it is doing.
        draft_is_lost: whether the draft engine is gone for good.
    """

    config: RuntimeConfig
    topology: Topology
    rank: int
    groups: Groups
    device: torch.device
    engines: Mapping[str, Engine]
    num_blocks: int
    target_vocab_size: int
    activity: Activity
    draft_is_lost: Callable[[], bool]

    @property
    def drafts_apart(self) -> bool:
        """Whether this rank drafts on a device that no target rank has."""
        return self.config.drafts_apart and "draft" in self.engines

    def make_worker(self) -> AnyWorker:
        """The rank's part of each round."""
        if not self.config.drafts_apart:
            return self._make_shared_worker()
        return self._make_draft_worker() if "draft" in self.engines else self._make_target_worker()

    def make_drafter(self) -> Drafter | None:
        """The method's drafter, where this rank is one of those that draft beside target ranks."""
        if self.drafts_apart or self._drafting_role not in self.topology.roles(self.rank):
            return None
        section = self.config.speculation
        engines = (self.engines.get("draft"), self.engines.get("target"))
        return DRAFTERS.get(section.method)(Workplace(section, *engines, self.target_vocab_size))

    def make_ahead_drafter(self) -> AheadDrafter[Any]:
        """The drafter of a rank that drafts on a device of its own."""
        space = guess_space(self.config, self.num_blocks)
        use_logits = self.config.speculation.use_logits
        engine = self.engines["draft"]
        return AheadDrafter(engine, self.target_vocab_size, self.config.draft_len, use_logits, space)

    @property
    def _drafting_role(self) -> Role | None:
        return METHODS[self.config.speculation.method].placement

    def _phases(self, leads: bool) -> PhaseClock:
        """Only leaders tell their times."""
        return phase_clock(self.device) if leads else HostPhases()

    def _make_target_worker(self) -> TargetWorker:
        topology, groups = self.topology, self.groups
        assert groups.mail is not None and groups.workers is not None and groups.target is not None
        assert topology.draft_leader is not None
        return TargetWorker(
            target=self.engines["target"],
            group=groups.target,
            peers=groups.workers,
            draft_peer=topology.worker_ranks.index(topology.draft_leader),
            mail=groups.mail,
            draft_ranks=topology.draft_ranks,
            target_ranks=topology.target_ranks,
            rank=self.rank,
            use_logits=self.config.speculation.use_logits,
            device=self.device,
            draft_is_lost=self.draft_is_lost,
            activity=self.activity,
            phases=self._phases(self.rank == topology.target_leader),
            forced_acceptance=self.config.speculation.forced_acceptance,
        )

    def _make_draft_worker(self) -> DraftWorker:
        topology, groups = self.topology, self.groups
        assert groups.mail is not None and groups.workers is not None
        drafter = self.make_ahead_drafter()
        drafter.warm_up(guess_steps(self.config), sure_draft_lens(self.config))
        return DraftWorker(
            drafter=drafter,
            peers=groups.workers,
            target_peer=topology.worker_ranks.index(topology.target_leader),
            mail=groups.mail,
            draft_ranks=topology.draft_ranks,
            target_leader=topology.target_leader,
            rank=self.rank,
            use_logits=self.config.speculation.use_logits,
            device=self.device,
            activity=self.activity,
            phases=self._phases(self.rank == topology.draft_leader),
        )

    def _make_shared_worker(self) -> Worker:
        """The worker of a rank whose engines' ranks share devices, or of a job without a draft engine."""
        topology = self.topology
        drafts_in_place = self._drafting_role is Role.TARGET
        drafting_leader = topology.target_leader if drafts_in_place else topology.draft_leader
        leads_draft, leads_target = self.rank == drafting_leader, self.rank == topology.target_leader
        return Worker(
            link=Link(topology, self.rank, self.groups.workers),
            drafter=self.make_drafter(),
            target=self.engines.get("target"),
            drafts_in_place=drafts_in_place,
            leads_draft=leads_draft,
            leads_target=leads_target,
            use_logits=self.config.speculation.use_logits,
            device=self.device,
            activity=self.activity,
            phases=self._phases(leads_draft or leads_target),
            forced_acceptance=self.config.speculation.forced_acceptance,
        )
