"""A rank 0 that works like the others, as in a training run, is judged beside them: over real sockets, by stacks of
real threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from heartbeats import LONG, SOON

from parallel.topology import Slot, Topology
from parallel.waiting import wait_until
from parallel.watchdog import heartbeat_server
from parallel.watchdog.activity import Activity, Phase
from parallel.watchdog.handshake import connect
from parallel.watchdog.heartbeat import HeartbeatClient, Names
from parallel.watchdog.heartbeat_server import HeartbeatServer

TWO = Topology(tuple(Slot(f"cpu:{rank}", rank, None, rank) for rank in (0, 1)))


class StandingRank:
    """A main thread that stands still in a step: waiting for another rank, or not."""

    def __init__(self, waits: bool) -> None:
        self.activities: list[Activity] = []
        self._waits, self._is_over, self._is_made = waits, threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._is_made.wait(SOON)

    def _run(self) -> None:
        self.activities.append(Activity())
        self.activities[0].enter(5, Phase.TRAINING)
        self._is_made.set()
        if self._waits:
            wait_until(self._is_over.is_set)
        else:
            self._is_over.wait()

    def end(self) -> None:
        self._is_over.set()
        self._thread.join()


@contextmanager
def standing(own: Activity, theirs: Activity) -> Iterator[HeartbeatServer]:
    """The heartbeat of two ranks, which are up."""
    server = HeartbeatServer(TWO, own, LONG, LONG, "late", still_seconds=0.5)
    connection = connect(["127.0.0.1"], server.listen(everywhere=False), server.token, {"rank": 1})
    client = HeartbeatClient(connection, theirs, LONG, Names(TWO.describe(1), TWO.describe(0), 1), True, LONG)
    server.finish_start()
    yield server
    client.close()
    server._closing.set()  # after a failure `close` leaves that to the end of the process
    assert server._is_over.wait(SOON)


@pytest.mark.parametrize("culprit", [0, 1])
def test_the_one_that_does_not_wait_is_named(monkeypatch: pytest.MonkeyPatch, culprit: int) -> None:
    monkeypatch.setattr(heartbeat_server, "TAKE_SECONDS", LONG)  # else a slow test ends this process
    ranks = [StandingRank(waits=rank != culprit) for rank in (0, 1)]
    with standing(*(rank.activities[0] for rank in ranks)) as server:
        deadline = time.monotonic() + SOON
        while (failure := server.take_failure()) is None and time.monotonic() < deadline:
            time.sleep(0.01)
    for rank in ranks:
        rank.end()
    assert failure is not None
    expected = f"{TWO.describe(culprit)} failed: stands still in step 5 (training) for longer than 0.5 s"
    assert failure.line == expected
    assert failure.stacks.startswith(f"--- main thread of {TWO.describe(culprit)}")
