"""How the ranks of a job agree at start: what each can hold, what all will hold, and whether anybody failed.

Messages are small JSON texts on the control plane, before the first plan. Each worker sends `progress` while it loads,
then `loaded` with the KV blocks that it could hold, or `failed`. The orchestrator answers `allocate` with the smallest
number; workers allocate, warm up and send `ready`. It knows the order of messages and not what engines do.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from parallel.control import ControlPlane
from parallel.errors import ParallelError
from parallel.topology import Topology
from trtrun.errors import RankFailedError, TrtrunError
from trtrun.outputs import RankReport
from trtrun.roles.startup import Progress, RankStartup
from trtrun.roles.worker import Worker

_PROGRESS_INTERVAL = 0.1
"""Seconds between two progress messages of one rank."""


def start_worker(control: ControlPlane, startup: Callable[[], RankStartup]) -> Worker | None:
    """A worker rank's side; returns None when some rank failed and the job is to end."""
    last_sent = 0.0

    def progress(done: int, total: int) -> None:
        nonlocal last_sent
        now = time.monotonic()
        if now - last_sent >= _PROGRESS_INTERVAL or done >= total:
            last_sent = now
            _send(control, {"kind": "progress", "done": done, "total": total})

    try:
        rank = startup()
        blocks = rank.load(progress)
    except (TrtrunError, ParallelError) as error:
        # The user's mistake, not a defect: the orchestrator says it once, for all ranks.
        _send(control, {"kind": "failed", "message": str(error)})
        return None if control.receive(timeout=None) is None else _unexpected()
    _send(control, {"kind": "loaded", "blocks": blocks})
    answer = control.receive(timeout=None)
    if answer is None:
        return None
    worker, report = rank.finish(int(json.loads(bytes(answer))["blocks"]))
    _send(control, {"kind": "ready", "report": asdict(report)})
    return worker


def start_orchestrator(
    control: ControlPlane, topology: Topology, progress: Progress | None
) -> tuple[int, tuple[RankReport, ...]]:
    """The orchestrator's side.

    Args:
        control: the control plane.
        topology: of the job.
        progress: called with the bytes of weights that are in place and that will be, over all ranks, or None.

    Returns:
        KV blocks of every store, and all workers' reports in rank order.

    Raises:
        RankFailedError: with the message of the first rank that could not start; the others are let go.
    """
    read: dict[int, tuple[int, int]] = {}
    loaded = _await_all(control, topology, "loaded", read, progress)
    blocks = min(int(message["blocks"]) for message in loaded.values())
    control.publish(json.dumps({"blocks": blocks}).encode())
    ready = _await_all(control, topology, "ready", read, progress)
    return blocks, tuple(RankReport(**ready[rank]["report"]) for rank in sorted(ready))


def _await_all(
    control: ControlPlane,
    topology: Topology,
    kind: str,
    read: dict[int, tuple[int, int]],
    progress: Progress | None,
) -> dict[int, dict[str, Any]]:
    """Messages of one kind from every worker rank, by rank."""
    messages: dict[int, dict[str, Any]] = {}
    while len(messages) < len(topology.worker_ranks):
        received = control.collect(timeout=None)
        if received is None:
            continue
        rank = received.rank
        message = json.loads(received.payload)
        if message["kind"] == "failed":
            control.shut_down()
            raise RankFailedError(message["message"])
        if message["kind"] == "progress":
            read[rank] = (message["done"], message["total"])
            if progress is not None and len(read) == len(topology.worker_ranks):
                progress(sum(done for done, _ in read.values()), sum(total for _, total in read.values()))
        elif message["kind"] == kind:
            messages[rank] = message
    return messages


def _send(control: ControlPlane, message: dict[str, Any]) -> None:
    control.report(json.dumps(message).encode())


def _unexpected() -> Worker:
    raise RankFailedError("the orchestrator went on although this rank could not start")
