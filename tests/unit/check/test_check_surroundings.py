"""What `trtrun check` says of MPI, its launcher, libfabric and containers; libraries are those that are here."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import mpi4py
import pytest

from launch.jobs.check.inventory import RankInventory
from launch.jobs.check.report import CheckReport, print_report
from launch.jobs.check.surroundings import (
    Surroundings,
    find_container,
    find_losses,
    find_starter,
    find_surroundings,
    warn_before_mpi,
)

mpi4py.rc.initialize = False  # the library tells of itself without being started

WHEEL = Surroundings(
    library="MPICH Version: 5.0.2", file="/w/libmpi.so.12", family="MPICH", started_by="srun --mpi=pmi2",
    network=("ucx", "ofi"), libfabric="/w/libfabric.so.1", providers=("tcp", "shm"),
)  # fmt: skip


def test_the_library_of_this_process_and_its_libfabric_are_asked() -> None:
    found = find_surroundings(True, {})
    assert found.library.startswith("Open MPI v5.") and Path(found.file).name == "libmpi.so.40"
    assert found.family == "Open MPI" and found.network == ()
    assert {"tcp", "shm"} <= set(found.providers) and Path(found.libfabric).is_file()
    assert Surroundings.from_dict(json.loads(json.dumps(asdict(found)))) == found
    assert find_surroundings(False, {}).library == ""


@pytest.mark.parametrize(
    ("environment", "starter"),
    [
        ({"PMIX_NAMESPACE": "prterun-n1-7@1", "PMIX_RANK": "0", "SLURM_STEP_ID": "0"}, "mpirun of Open MPI 5 (PRRTE)"),
        ({"PMIX_NAMESPACE": "2012741633", "OMPI_MCA_orte_hnp_uri": "x"}, "mpirun of Open MPI 4 (ORTE)"),
        ({"PMI_RANK": "0", "HYDI_CONTROL_FD": "7", "SLURM_STEP_ID": "0"}, "mpirun of MPICH (Hydra)"),
        ({"PMI_RANK": "0", "SLURM_STEP_ID": "0"}, "srun --mpi=pmi2"),
        ({"PMIX_RANK": "0", "SLURM_STEP_ID": "0", "SLURM_MPI_TYPE": "pmix_v4"}, "srun --mpi=pmix_v4"),
        ({"PALS_RANKID": "0", "SLURM_STEP_ID": "0"}, "srun --mpi=cray_shasta"),
        ({"PALS_RANKID": "0"}, "mpiexec of PALS"),
    ],
)
def test_who_started_a_rank_is_told_by_its_environment(environment: dict[str, str], starter: str) -> None:
    assert find_starter(environment) == starter


def test_what_is_lost_on_slingshot_depends_on_the_provider() -> None:
    def lost(found: Surroundings, has_slingshot: bool = True, **environment: str) -> list[str]:
        return list(find_losses(replace(found, started_by=""), environment, has_slingshot))

    assert lost(WHEEL, False) == []
    (line,) = lost(WHEEL)
    assert "libfabric (/w/libfabric.so.1) has no provider cxi" in line and "bind the host's libfabric over it" in line
    bound = replace(WHEEL, providers=("cxi", "tcp"))
    assert "MPIR_CVAR_CH4_NETMOD=ofi" in lost(bound)[0]
    chosen = replace(bound, network=("ofi",))
    assert "FI_MR_CACHE_MONITOR=userfaultfd" in lost(chosen)[0]
    assert lost(chosen, FI_MR_CACHE_MONITOR="disabled") == []


def test_what_is_lost_with_a_launcher_is_told() -> None:
    (line,) = find_losses(WHEEL, {}, False)
    assert line.startswith("lost with srun --mpi=pmi2: trtrun does not close MPI's ports")
    (line,) = find_losses(replace(WHEEL, started_by="mpirun of MPICH (Hydra)"), {}, False)
    assert "which rank was killed is not told" in line


def test_what_ends_cray_mpich_at_its_start_is_told_before() -> None:
    assert "set it to 0" in (warn_before_mpi({"MPICH_GPU_SUPPORT_ENABLED": "1"}) or "")
    assert warn_before_mpi({"MPICH_GPU_SUPPORT_ENABLED": "0"}) is None


@pytest.mark.parametrize(
    ("environment", "files", "told"),
    [
        ({"APPTAINER_CONTAINER": "/i/t.sif", "SINGULARITY_CONTAINER": "/i/t.sif"}, [], "Apptainer (/i/t.sif)"),
        ({"SINGULARITY_CONTAINER": "/i/t.sif"}, [], "Singularity (/i/t.sif)"),
        ({}, [".singularity.d/"], "Apptainer"),
        ({}, [".enroot.lock"], "enroot"),
        ({}, ["run/.containerenv"], "Podman (a/trtrun:1)"),
        ({}, [".dockerenv"], "Docker"),
        ({}, [], ""),
    ],
)
def test_containers_are_told_with_their_image(
    tmp_path: Path, environment: dict[str, str], files: list[str], told: str
) -> None:
    for name in files:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        if name.endswith("/"):
            path.mkdir()
        else:
            path.write_text('engine="podman-5"\nimage="a/trtrun:1"\n', encoding="utf-8")
    assert find_container(environment, tmp_path) == told


def test_what_ranks_have_alike_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    bound = replace(WHEEL, providers=("cxi",))
    told = [WHEEL, WHEEL, bound]
    ranks = [RankInventory(rank, "n", 1, True, {}, surroundings=item) for rank, item in enumerate(told)]
    print_report(CheckReport(tuple(ranks), ("target",) * 3, ("cpu:0",) * 3, (), 1.0))
    lines = capsys.readouterr().out.splitlines()
    mpi = "MPI: MPICH Version: 5.0.2 (/w/libmpi.so.12, MPICH's ABI, as Cray MPICH, Intel MPI and MVAPICH have it), "
    assert mpi + "started by srun --mpi=pmi2" in lines
    assert "rank 0, 1: libfabric: /w/libfabric.so.1, providers tcp, shm" in lines
    assert "rank 2: libfabric: /w/libfabric.so.1, providers cxi" in lines
