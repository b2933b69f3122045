"""Whether a job stays on this host, as far as can be known: where it may not, its ranks keep their ports."""

from __future__ import annotations

import socket

import pytest

import launch.jobs.mpi.job
from launch.jobs.mpi.flavours import FLAVOURS
from launch.jobs.mpi.hosts import may_be_elsewhere
from launch.jobs.mpi.job import Job
from trtrun.configuration.config import make_config
from trtrun.configuration.process_sections import LaunchSection


def test_two_names_of_one_host_are_two_hosts_to_ranks() -> None:
    """Nodes of a Slurm on one machine: Open MPI compares names, and takes no shared memory between them."""

    def words(*hosts: str) -> list[str]:
        target = {"model": "asset:target", "devices": {host: ["cpu:0"] for host in hosts}}
        draft = {"model": "asset:draft", "devices": {hosts[0]: ["cpu:1"]}}
        return Job(make_config({"target": target, "draft": draft}), ["run"]).command()

    assert "^tcp,ofi" in words("localhost")
    assert "^tcp,ofi" not in words("localhost", socket.gethostname())


@pytest.mark.parametrize(
    ("arguments", "variables"),
    [
        (["--hostfile", "f"], {}),
        (["-hostfile", "f"], {}),
        (["--host=a,b"], {}),
        (["-H", "a,b"], {}),
        (["--machinefile", "f"], {}),
        (["--prtemca", "prte_default_hostfile", "f"], {}),
        ([], {"PRTE_MCA_prte_default_hostfile": "f"}),
        ([], {"OMPI_MCA_orte_default_hostfile": "f"}),
        ([], {"PBS_NODEFILE": "f"}),
    ],
)
def test_hosts_that_mpirun_is_told_beside_the_configuration_may_be_others(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], variables: dict[str, str]
) -> None:
    """Their ranks need ports, and their daemons those of mpirun, whether the variables are the user's or the YAML's."""
    told: list[bool] = []
    monkeypatch.setattr(launch.jobs.mpi.job, "supervise", lambda *words: told.append(words[-1]) or 0)
    monkeypatch.setattr(launch.jobs.mpi.job, "remove_stale_folders", lambda environment: None)

    def job(**section: object) -> Job:
        target = {"model": "asset:target", "devices": ["cpu:0"]}
        draft = {"model": "asset:draft", "devices": ["cpu:1"]}
        return Job(make_config({"target": target, "draft": draft, "launch": section}), ["run"])

    def shares_memory(found: Job) -> bool:
        found._supervise()
        is_part = "^tcp,ofi" in found.command()
        assert told.pop() == is_part
        return is_part

    assert shares_memory(job(mpi="openmpi"))
    assert not shares_memory(job(mpirun_arguments=arguments, environment=variables))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert not shares_memory(job(mpirun_arguments=arguments))


@pytest.mark.parametrize(
    ("arguments", "variables"),
    [(["-f", "f"], {}), (["-hosts", "a,b"], {}), (["-machinefile", "f"], {}), ([], {"HYDRA_HOST_FILE": "f"})],
)
def test_so_may_those_that_mpich_is_told(arguments: list[str], variables: dict[str, str]) -> None:
    flavour = FLAVOURS["mpich"]
    assert may_be_elsewhere(flavour, LaunchSection(mpirun_arguments=arguments), variables)
    assert not may_be_elsewhere(flavour, LaunchSection(mpirun_arguments=["-launcher", "fork"]), {"HOST": "a"})
