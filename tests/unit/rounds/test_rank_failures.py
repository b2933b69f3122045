"""The way of a failure: from the rank that fails over the heartbeat to an exception on rank 0, and to the job's end."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from parallel import abort
from parallel.control import ControlPlane, Report
from parallel.topology import Topology
from parallel.watchdog.activity import Activity
from parallel.watchdog.handshake import connect
from parallel.watchdog.heartbeat import HeartbeatClient, Names
from parallel.watchdog.heartbeat_server import HeartbeatServer
from trtrun.errors import RankFailedError
from trtrun.rounds.failures import RankFailures

ROOT = Path(__file__).resolve().parents[3]
TOPOLOGY = Topology.from_devices(["cpu:0"], ["cpu:1", "cpu:2"])
LONG = 600.0
SOON = 30.0
CAUSE = "ZeroDivisionError: division by zero"
LINE = f"target rank 2 (cpu:1) failed: {CAUSE}"


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What would end this process and its world at exit."""
    ends: list[int] = []
    monkeypatch.setattr(abort, "abort_at_exit", lambda: ends.append(abort.STATUS))
    return ends


@pytest.fixture
def server() -> Iterator[HeartbeatServer]:
    """Rank 0's end, its job running and its main thread in the hands of the user's program."""
    activity = Activity()
    activity.rest()
    server = HeartbeatServer(TOPOLOGY, activity, LONG, LONG, "late")
    server.finish_start()
    yield server
    server._closing.set()  # a server that has found a failure serves on until its process ends
    server._workers.wake()
    assert server._is_over.wait(SOON)


def join(server: HeartbeatServer, rank: int) -> HeartbeatClient:
    messages = connect(["127.0.0.1"], server.listen(everywhere=False), server.token, {"rank": rank})
    return HeartbeatClient(messages, Activity(), LONG, Names(TOPOLOGY.describe(rank), "rank 0"), False, LONG)


def await_failure(server: HeartbeatServer) -> None:
    deadline = time.monotonic() + SOON
    while not server.has_failed():
        assert time.monotonic() < deadline
        time.sleep(0.005)


class Silent(ControlPlane):
    """A control plane on which no report comes; it knows whether it was shut down."""

    def __init__(self) -> None:
        self.is_shut_down = False

    def collect(self, timeout: float | None = None, until: Callable[[], bool] | None = None) -> Report | None:
        deadline = time.monotonic() + SOON
        assert until is not None
        while not until():
            assert time.monotonic() < deadline
            time.sleep(0.001)
        return None

    def shut_down(self, until: Callable[[], bool] | None = None) -> None:
        self.is_shut_down = True


def test_a_worker_that_fails_reaches_whoever_waits_for_reports(server: HeartbeatServer, ends: list[int]) -> None:
    client = join(server, 2)
    waits = threading.Thread(target=client.fail, args=(CAUSE,), daemon=True)
    waits.start()
    failures = RankFailures(server)
    with pytest.raises(RankFailedError) as caught:
        failures.collect(Silent())
    assert str(caught.value) == LINE
    assert ends == [abort.STATUS]
    assert waits.is_alive()  # until rank 0 ends the job, or lets it go
    with pytest.raises(RankFailedError) as again:
        failures.check()
    assert again.value is caught.value


def test_closing_after_a_failure_waits_for_nobody(server: HeartbeatServer, ends: list[int]) -> None:
    threading.Thread(target=join(server, 2).fail, args=(CAUSE,), daemon=True).start()
    await_failure(server)
    failures, control = RankFailures(server), Silent()
    with pytest.raises(RankFailedError):
        failures.check()
    failures.close(control)
    assert not control.is_shut_down


def test_a_failure_that_nobody_has_seen_is_told_at_the_end(
    server: HeartbeatServer, ends: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(abort, "say", said.append)
    threading.Thread(target=join(server, 2).fail, args=(CAUSE,), daemon=True).start()
    await_failure(server)
    RankFailures(server).close(Silent())
    assert (said, ends) == ([f"trtrun: {LINE}\n"], [abort.STATUS])


def test_where_all_is_well_closing_lets_the_workers_go(server: HeartbeatServer, ends: list[int]) -> None:
    client, control = join(server, 1), Silent()
    RankFailures(server).close(control)
    assert control.is_shut_down and not ends
    client._thread.join(SOON)
    assert not client._thread.is_alive()


def test_stacks_are_notes_of_the_exception(ends: list[int]) -> None:
    class Found:
        loss = None

        def take_failure(self) -> Any:
            from parallel.watchdog.heartbeat_server import Failure

            return Failure(LINE, "--- main thread of rank 2\n  here\n")

    with pytest.raises(RankFailedError) as caught:
        RankFailures(Found()).check()  # type: ignore[arg-type]
    assert caught.value.__notes__ == ["--- main thread of rank 2\n  here"]


PROGRAM = """
import atexit, sys
from types import SimpleNamespace
from parallel import abort

class World:
    def Abort(self, status):
        print("abort", status, flush=True)

sys.modules["mpi4py.MPI"] = SimpleNamespace(
    Is_initialized=lambda: True, Is_finalized=lambda: False, COMM_WORLD=World()
)
atexit.register(print, "registered before", flush=True)
abort.stand_by()
atexit.register(print, "registered behind", flush=True)
if sys.argv[1] != "well":
    abort.abort_at_exit(int(sys.argv[1]))
print("the end of the program")
"""


@pytest.mark.parametrize(
    ("how", "status", "said"),
    [
        ("well", 0, ["registered behind", "registered before"]),
        ("1", 1, ["registered behind", "abort 1"]),
        ("2", 2, ["registered behind", "abort 2"]),
    ],
)
def test_the_end_of_a_failed_program_ends_all_ranks_with_its_status(how: str, status: int, said: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, how], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (status, "")
    assert done.stdout.splitlines() == ["the end of the program", *said]
