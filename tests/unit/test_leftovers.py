"""What a killed mpirun leaves behind goes, and nothing else does."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from launch.leftovers import remove_leftovers


@pytest.fixture
def gone() -> int:
    """The id of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait(timeout=60)
    return process.pid


def make_folder(base: Path, process: int, host: str, program: str = "prted") -> Path:
    """What Open MPI's daemon keeps while it runs."""
    folder = base / f"{program}.{process}"
    folder.mkdir()
    (folder / f"pmix.{host}.tool").write_text("")
    (folder / f"pmix.{host}.tool.{process}").write_text("")
    return folder


@pytest.mark.parametrize("program", ["prted", "ompi", "prterun"])
@pytest.mark.parametrize("variable", ["TMPDIR", "PRTE_MCA_prte_tmpdir_base"])
def test_folders_of_processes_that_are_gone_are_removed(tmp_path: Path, gone: int, program: str, variable: str) -> None:
    folder = make_folder(tmp_path, gone, socket.gethostname(), program)
    remove_leftovers({variable: str(tmp_path)})
    assert not folder.exists()


def test_a_folder_whose_process_lives_stays(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, os.getpid(), socket.gethostname())
    remove_leftovers({"TMPDIR": str(tmp_path)})
    assert folder.is_dir()


def test_a_folder_of_another_host_stays(tmp_path: Path, gone: int) -> None:
    folder = make_folder(tmp_path, gone, "another-host")
    remove_leftovers({"TMPDIR": str(tmp_path)})
    assert folder.is_dir()


def test_folders_that_only_look_like_it_stay(tmp_path: Path, gone: int) -> None:
    folder = tmp_path / f"prted.{gone}"
    folder.mkdir()
    (folder / "mine").write_text("")
    link = tmp_path / f"ompi.{gone}"
    link.symlink_to(make_folder(tmp_path, gone, socket.gethostname(), "data.v"), target_is_directory=True)
    remove_leftovers({"TMPDIR": str(tmp_path)})
    assert folder.is_dir() and link.is_dir()


def test_a_base_that_is_not_there_is_no_matter() -> None:
    remove_leftovers({"TMPDIR": "/no/such/folder"})
