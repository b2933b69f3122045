"""The engine ranks of a job of one process, which the orchestrator's thread runs in place.

It knows `EngineRanks`' interface, and the worker. It does not know what a plan means.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch
from typing_extensions import override

from parallel.watchdog.activity import NO_ROUND, Activity, Doing, Phase
from trtrun.core.guide import GuideStart
from trtrun.core.nouns import RoundPlan
from trtrun.errors import RankFailedError
from trtrun.rounds.engine_ranks import EngineRanks
from trtrun.rounds.launched_round import LaunchedRound
from trtrun.rounds.prepared_work import AdapterReading
from trtrun.rounds.round import Worker
from trtrun.scheduling.guide_registry import GuideOrders
from trtrun.timing.spans import ENGINES, RankSpans
from trtrun.timing.tracing import PhaseTracer
from trtrun.wire.reports import RoundReport


class SoloRanks(EngineRanks):
    """One process with every role: a plan runs when its report is asked for, or on a GPU that of the plan before.

    Args:
        worker: of this process.
        launches_ahead: whether all plans that are there are launched before a report is waited for. It pays where a
            launch returns before its work is done.
    """

    def __init__(self, worker: Worker, *, launches_ahead: bool = False) -> None:
        self._worker = worker
        self._launches_ahead = launches_ahead
        self._tracer = PhaseTracer(worker)
        self._plans: deque[RoundPlan] = deque()
        self._launched: deque[LaunchedRound] = deque()
        self._guides_due: list[GuideStart] = []
        self._published = NO_ROUND
        self._reading: AdapterReading | None = None

    @property
    @override
    def draft_is_lost(self) -> bool:
        """False: a process alone loses nothing."""
        return False

    @property
    @override
    def activity(self) -> Activity:
        return self._worker.activity

    @override
    def look(self) -> Mapping[int, Doing]:
        return {0: self._worker.activity.look()}

    @override
    def publish(self, plan: RoundPlan) -> None:
        self._plans.append(plan)
        self._published = plan.round_index

    @override
    def collect(self) -> RoundReport:
        with self._on_device():
            while self._plans and (self._launches_ahead or not self._launched):
                self._launched.append(self._worker.launch_round(self._plans.popleft()))
            report = self._launched.popleft().finish()
        if report is None:
            raise RankFailedError("the single process of this job does not lead the target engine")
        return report.unpack()

    @override
    def order_guides(self, orders: GuideOrders) -> None:
        guides = self._worker.guides
        if guides is not None:
            for guide in orders.over:
                guides.forget(guide)
            for guide in orders.begun:
                guides.build(guide)
        self._guides_due = [*(guide for guide in self._guides_due if guide not in orders.over), *orders.begun]

    @override
    def take_built_guides(self, seconds: float = 0.0) -> list[GuideStart]:
        guides, due = self._worker.guides, self._guides_due
        if guides is not None and seconds and due:
            guides.wait_for_any(due, seconds)
        built = [guide for guide in due if guides is None or guides.is_built(guide)]
        self._guides_due = [guide for guide in due if guide not in built]
        return built

    def _on_device(self) -> AbstractContextManager[object]:
        """Kernels run on the current GPU of the thread that launches them, and any thread may call."""
        device = self._worker.device
        return torch.cuda.device(device) if device.type == "cuda" else nullcontext()

    @contextmanager
    @override
    def stepping(self) -> Iterator[None]:
        """Mark the time of rounds, which those who look from outside see."""
        self._worker.activity.enter(self._published, Phase.SCHEDULING)
        try:
            yield
        finally:
            self._worker.activity.rest()

    @override
    def reset(self) -> None:
        self._plans.clear()
        if self._launched and self._worker.device.type == "cuda":
            torch.cuda.synchronize(self._worker.device)  # or kernels write to what is somebody else's (VerdictCopy)
        self._launched.clear()
        self._worker.reset()

    def begin_adapter(self, name: str, path: Path) -> None:
        """Have an adapter read beside the rounds."""
        self._reading = AdapterReading(self._worker, name, path)

    def take_adapter(self, seconds: float = 0.0) -> list[str] | None:
        """What kept it from being read, nothing where it is; None while it is read."""
        assert self._reading is not None
        return list(filter(None, [self._reading.problem])) if self._reading.wait(seconds) else None

    def end_adapter(self, slot: int) -> None:
        """Put what was read into a slot; 0 gives it up."""
        reading, self._reading = self._reading, None
        if slot and reading is not None:
            with self._on_device():
                reading.install(slot)

    @override
    def start_trace(self, most_rounds: int) -> None:
        self._tracer.start(most_rounds)

    @override
    def take_trace(self) -> list[RankSpans]:
        """Take the trace; there is one clock."""
        log = self._tracer.take()
        return [RankSpans(0, ENGINES, log.spans, log.num_dropped_rounds)]

    @override
    def close(self) -> None:
        self._plans.clear()
        if self._worker.guides is not None:
            self._worker.guides.close()
