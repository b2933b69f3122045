"""The folder for the shared memory of a job's ranks: it goes with the job, and what a killed parent left goes later."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from launch.jobs.mpi.flavours import FLAVOURS
from launch.jobs.mpi.host_folders import own_shared_memory

VARIABLE = "OMPI_MCA_btl_sm_backing_directory"

HOLDER = """
import sys
from pathlib import Path
from launch.jobs.mpi.host_folders import own_shared_memory
with own_shared_memory(sys.argv[1], {}, Path(sys.argv[2])) as added:
    Path(added[sys.argv[1]], "sm_segment.host.0.1").write_text("x")
    print(added[sys.argv[1]], flush=True)
    sys.stdin.read()
"""


def test_the_folder_goes_with_all_that_is_in_it(tmp_path: Path) -> None:
    with own_shared_memory(VARIABLE, {}, tmp_path) as added:
        folder = Path(added[VARIABLE])
        assert folder.parent == tmp_path and folder.stat().st_mode & 0o777 == 0o700
        (folder / "sm_segment.host.0.1").write_text("of a rank that was killed")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("environment", [{VARIABLE: "/somewhere"}, {}], ids=["the user's own", "no variable"])
def test_nothing_is_made_where_the_user_or_the_library_has_it_otherwise(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    with own_shared_memory(VARIABLE if environment else "", environment, tmp_path) as added:
        assert added == {} and not list(tmp_path.iterdir())


def test_a_place_that_cannot_be_written_is_passed_over(tmp_path: Path) -> None:
    with own_shared_memory(VARIABLE, {}, tmp_path / "nowhere") as added:
        assert added == {}


def test_a_folder_stays_while_its_parent_lives_and_is_removed_by_the_next_one(tmp_path: Path) -> None:
    others = tmp_path / "sm_segment.of.others"
    others.write_text("x")
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, VARIABLE, str(tmp_path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as holder:  # fmt: skip
        assert holder.stdout is not None
        folder = Path(holder.stdout.readline().strip())
        with own_shared_memory(VARIABLE, {}, tmp_path):
            assert list(folder.iterdir())
        holder.kill()
    assert list(folder.iterdir())
    with own_shared_memory(VARIABLE, {}, tmp_path) as added:
        assert sorted(tmp_path.iterdir()) == sorted([others, Path(added[VARIABLE])])


def test_the_libraries_that_leave_files_have_a_variable() -> None:
    assert FLAVOURS["openmpi"].shared_memory == VARIABLE
    assert FLAVOURS["openmpi4"].shared_memory == "OMPI_MCA_btl_vader_backing_directory"
    assert not FLAVOURS["mpich"].shared_memory
