"""How the ranks of a job agree at start: what each can hold, what all will hold, and whether anybody failed.

Messages are JSON texts on the control plane, before the first plan. The orchestrator tells the models' configurations,
which no other rank has to read. Each worker sends `progress` while it loads,
then `loaded` with the KV blocks that it could hold. The orchestrator answers with the smallest number; workers
allocate, warm up and send `ready`. A worker that cannot start for a reason that the user can mend sends `failed`
instead of one of the two. It knows the order of messages and not what engines do.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from parallel import abort
from parallel.control import ControlPlane
from parallel.errors import ParallelError
from parallel.topology import Topology
from trtrun.core.outputs import RankReport
from trtrun.errors import StartError, TrtrunError
from trtrun.rounds.failures import RankFailures
from trtrun.rounds.round import Worker
from trtrun.start.job_spec import JobSpec
from trtrun.start.startup import Progress, RankStartup

_PROGRESS_INTERVAL = 0.1
"""Seconds between two progress messages of one rank."""


def start_worker(control: ControlPlane, startup: Callable[[bytes], RankStartup]) -> Worker | None:
    """A worker rank's side; returns None when some rank failed and the job is to end."""
    last_sent = 0.0

    def progress(done: int, total: int) -> None:
        nonlocal last_sent
        now = time.monotonic()
        if now - last_sent >= _PROGRESS_INTERVAL or done >= total:
            last_sent = now
            _send(control, {"kind": "progress", "done": done, "total": total})

    try:
        told = control.receive()
        if told is None:
            return None
        rank = startup(told)
        blocks = rank.load(progress)
        _send(control, {"kind": "loaded", "blocks": blocks})
        answer = control.receive(timeout=None)
        if answer is None:
            return None
        worker, report = rank.finish(int(json.loads(bytes(answer))["blocks"]))
    except (TrtrunError, ParallelError) as error:
        # The user's mistake, not a defect: the orchestrator says it once, for all ranks.
        _send(control, {"kind": "failed", "message": str(error)})
        while not control.is_shut_down:
            control.receive(timeout=None)  # the other ranks' answer, which may be on its way
        return None
    _send(control, {"kind": "ready", "report": asdict(report)})
    return worker


def start_orchestrator(
    control: ControlPlane, spec: JobSpec, failures: RankFailures, progress: Progress | None
) -> tuple[int, tuple[RankReport, ...]]:
    """The orchestrator's side.

    Args:
        control: the control plane.
        spec: of the job.
        failures: of the ranks.
        progress: called with the bytes of weights that are in place and that will be, over all ranks, or None.

    Returns:
        KV blocks of every store, and all workers' reports in rank order.

    Raises:
        StartError: with the message of the first rank that could not start; the others are let go.
        RankFailedError: a rank failed in another way, or the start takes too long.
    """
    control.publish(spec.tell_models())
    messages = _Messages(control, spec.topology, failures, progress)
    loaded = messages.await_all("loaded")
    blocks = min(int(message["blocks"]) for message in loaded.values())
    control.publish(json.dumps({"blocks": blocks}).encode())
    ready = messages.await_all("ready")
    return blocks, tuple(RankReport(**ready[rank]["report"]) for rank in sorted(ready))


@dataclass
class _Messages:
    """What the workers send while they start."""

    control: ControlPlane
    topology: Topology
    failures: RankFailures
    progress: Progress | None
    _read: dict[int, tuple[int, int]] = field(default_factory=dict)

    def await_all(self, kind: str) -> dict[int, dict[str, Any]]:
        """Messages of one kind from every worker rank, by rank."""
        messages: dict[int, dict[str, Any]] = {}
        workers = len(self.topology.worker_ranks)
        while len(messages) < workers:
            received = self.failures.collect(self.control)
            message = json.loads(received.payload)
            if message["kind"] == "failed":
                if kind != "loaded":
                    abort.abort_at_exit()  # the others wait for this rank, in the middle of their warm-up
                self.control.shut_down()
                raise StartError(message["message"])
            if message["kind"] == "progress":
                self._show(received.rank, message["done"], message["total"])
            elif message["kind"] == kind:
                messages[received.rank] = message
        return messages

    def _show(self, rank: int, done: int, total: int) -> None:
        self._read[rank] = (done, total)
        if self.progress is not None and len(self._read) == len(self.topology.worker_ranks):
            self.progress(sum(done for done, _ in self._read.values()), sum(total for _, total in self._read.values()))


def _send(control: ControlPlane, message: dict[str, Any]) -> None:
    control.report(json.dumps(message).encode())
