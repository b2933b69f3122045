"""What a host lacks for mpirun is told in a line that says what to do."""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from launch.jobs.mpi.host_folders import describe_lacks, has_loopback
from launch.jobs.mpi.mpirun import build_environment


def test_a_sound_host_lacks_nothing(tmp_path: Path) -> None:
    assert list(describe_lacks({"TMPDIR": str(tmp_path)})) == []


@pytest.mark.parametrize(("free", "inodes", "said"), [(16, 9, "has 0.1 MB left"), (1 << 20, 0, "has no inodes left")])
def test_a_full_temporary_folder_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, inodes: int, said: str
) -> None:
    room = SimpleNamespace(f_bavail=free, f_frsize=4096, f_files=9, f_favail=inodes)
    monkeypatch.setattr(os, "statvfs", lambda folder: room)
    (line,) = describe_lacks({"TMPDIR": str(tmp_path)})
    assert f"the temporary folder {tmp_path} {said}" in line and line.endswith("name another one with TMPDIR")


def test_a_temporary_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    (line,) = describe_lacks({"TMPDIR": str(tmp_path / "none")})
    assert line.startswith(f"the temporary folder {tmp_path / 'none'} cannot be used (No such file or directory)")


def test_a_missing_loopback_interface_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert has_loopback()

    def unreachable(probe: socket.socket, address: object) -> None:
        raise OSError("Network is unreachable")

    monkeypatch.setattr("launch.jobs.mpi.host_folders.socket.socket.connect", unreachable)
    (line,) = describe_lacks({"TMPDIR": str(tmp_path)})
    assert line.endswith("ip link set lo up")


def test_shared_memory_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launch.jobs.mpi.host_folders.SHARED_MEMORY", tmp_path / "shm")
    (line,) = describe_lacks({"TMPDIR": str(tmp_path)})
    assert line.startswith(f"{tmp_path / 'shm'} cannot be written, and ranks of one host speak through it")


def test_a_slurm_job_that_this_host_has_no_part_in_is_named(tmp_path: Path) -> None:
    job = {"TMPDIR": str(tmp_path), "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]"}
    (line,) = describe_lacks(job)
    assert "is that of Slurm job 7 on n[1-2]" in line and line.endswith("unset what begins with SLURM_")
    assert list(describe_lacks({**job, "SLURM_JOB_NODELIST": f"n1,{socket.gethostname()}"})) == []
    assert list(describe_lacks({**job, "SLURMD_NODENAME": "n1"})) == []  # Slurm's own name of this host


def test_mpirun_gets_a_home_where_the_environment_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Open MPI does not start without."""
    monkeypatch.delenv("HOME", raising=False)
    assert build_environment({"HOME": "/home/me"})["HOME"] == "/home/me"
    assert build_environment({}, {"HOME": "/scratch/me"})["HOME"] == "/scratch/me"
    assert os.path.isabs(build_environment({})["HOME"])
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as for a user id without a passwd entry
    assert build_environment({"HOME": ""})["HOME"] == tempfile.gettempdir()
