"""What goes wrong in the middle of a job on two hosts: it ends, one line says why, and nothing stays on either host."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest
from network import wait_for
from two_hosts import AWAY, RunningJob, Site, own_lines

pytestmark = pytest.mark.timeout(400)

Start = Callable[..., RunningJob]
MPIRUN = ("mpirun", "prterun", "orterun", "mpiexec.hydra")
HEARTBEAT_SECONDS = 5


def ranks_on(site: Site, host: str) -> list[str]:
    return [line for line in site.remote_processes().get(host, []) if "-m mpi4py -m launch.cli" in line]


def test_a_killed_rank_of_another_host_is_named(two_hosts: Site, start_job: Start) -> None:
    job = start_job(AWAY, is_forked=True)
    os.kill(job.ranks[2][1], signal.SIGKILL)
    status, errors, _ = job.end()
    assert status == 128 + signal.SIGKILL
    # An mpirun that goes on without ranks does not tell of other hosts by what signal.
    assert errors.splitlines() == ["trtrun: target rank 2 (south cpu:0) was killed by a signal"]
    two_hosts.expect_nothing_left()


def test_a_signal_to_the_command_ends_ranks_everywhere(two_hosts: Site, start_job: Start) -> None:
    job = start_job(AWAY)
    os.kill(job.parent, signal.SIGTERM)
    status, errors, _ = job.end()
    assert status == 128 + signal.SIGTERM
    assert errors.splitlines() == ["trtrun: ended by SIGTERM; all ranks are stopped"]
    two_hosts.expect_nothing_left()


def test_a_killed_command_takes_ranks_everywhere_along(two_hosts: Site, start_job: Start) -> None:
    """Though nothing is written any more, which would tell mpirun that nobody reads it."""
    job = start_job(AWAY)
    os.kill(job.ranks[0][1], signal.SIGSTOP)
    os.kill(job.parent, signal.SIGKILL)
    two_hosts.expect_nothing_left(seconds=30)
    assert job.end()[0] == -signal.SIGKILL


def test_a_killed_mpirun_takes_ranks_everywhere_along(two_hosts: Site, start_job: Start) -> None:
    job = start_job(AWAY)
    os.kill(job.find(two_hosts.network["north"], *MPIRUN), signal.SIGKILL)
    status, errors, _ = job.end()
    assert status == 128 + signal.SIGKILL
    assert errors.splitlines() == ["trtrun: mpirun was killed by signal 9; all ranks are stopped"]
    two_hosts.expect_nothing_left()


def test_a_host_that_is_cut_off_is_named(two_hosts: Site, start_job: Start) -> None:
    launch = {"ssh_arguments": two_hosts.network.ssh_arguments, "heartbeat_seconds": HEARTBEAT_SECONDS}
    job = start_job(AWAY, is_forked=True, launch=launch)
    south = two_hosts.network["south"]
    south.cut_off()
    try:
        status, errors, seconds = job.end()
        # The ranks that are cut off end by themselves: nobody can tell them to.
        wait_for(lambda: not ranks_on(two_hosts, "south"), 60, lambda: str(ranks_on(two_hosts, "south")))
    finally:
        south.connect()
    assert status == 1, (seconds, errors)
    (line,) = own_lines(errors)
    assert "south" in line
    assert f"silent for {HEARTBEAT_SECONDS} s" in line, (seconds, errors)
    assert seconds >= HEARTBEAT_SECONDS - 1
    two_hosts.expect_nothing_left(seconds=180)
