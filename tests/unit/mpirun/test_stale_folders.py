"""What a killed mpirun leaves behind goes, and nothing else does."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from launch.jobs.mpi.host_folders import remove_folder_of, remove_stale_folders


@pytest.fixture
def gone() -> int:
    """The id of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait(timeout=60)
    return process.pid


def make_folder(base: Path, process: int, host: str, program: str = "prted", port: int | None = None) -> Path:
    """What Open MPI's daemon keeps while it runs."""
    folder = base / f"{program}.{process}"
    folder.mkdir()
    text = f"prterun-{host}-{process}@0.0;tcp4://127.0.0.1:{port or free_port()}\nv5.0.11\n{process}\n"
    (folder / f"pmix.{host}.tool").write_text(text)
    (folder / f"pmix.{host}.tool.{process}").write_text(text)
    return folder


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@pytest.mark.parametrize("program", ["prted", "ompi", "prterun"])
@pytest.mark.parametrize("variable", ["TMPDIR", "PRTE_MCA_prte_tmpdir_base"])
def test_folders_of_processes_that_are_gone_are_removed(tmp_path: Path, gone: int, program: str, variable: str) -> None:
    folder = make_folder(tmp_path, gone, socket.gethostname(), program)
    remove_stale_folders({variable: str(tmp_path)})
    assert not folder.exists()


def test_a_folder_whose_process_lives_stays(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, os.getpid(), socket.gethostname())
    remove_stale_folders({"TMPDIR": str(tmp_path)})
    assert folder.is_dir()


def test_a_folder_whose_process_listens_unseen_stays(tmp_path: Path, gone: int) -> None:
    """As that of an mpirun outside a container that has process ids of its own."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        folder = make_folder(tmp_path, gone, socket.gethostname(), port=listener.getsockname()[1])
        remove_stale_folders({"TMPDIR": str(tmp_path)})
        assert folder.is_dir()
    remove_stale_folders({"TMPDIR": str(tmp_path)})
    assert not folder.exists()


def test_a_file_that_was_never_written_whole_keeps_nothing(tmp_path: Path, gone: int) -> None:
    folder = make_folder(tmp_path, gone, socket.gethostname())
    (folder / f"pmix.{socket.gethostname()}.tool").write_text("")
    remove_stale_folders({"TMPDIR": str(tmp_path)})
    assert not folder.exists()


def test_a_folder_of_another_host_stays(tmp_path: Path, gone: int) -> None:
    folder = make_folder(tmp_path, gone, "another-host")
    remove_stale_folders({"TMPDIR": str(tmp_path)})
    assert folder.is_dir()


def test_folders_that_only_look_like_it_stay(tmp_path: Path, gone: int) -> None:
    folder = tmp_path / f"prted.{gone}"
    folder.mkdir()
    (folder / "mine").write_text("")
    link = tmp_path / f"ompi.{gone}"
    link.symlink_to(make_folder(tmp_path, gone, socket.gethostname(), "data.v"), target_is_directory=True)
    remove_stale_folders({"TMPDIR": str(tmp_path)})
    assert folder.is_dir() and link.is_dir()


def test_a_base_that_is_not_there_is_no_matter(tmp_path: Path) -> None:
    remove_stale_folders({"TMPDIR": str(tmp_path / "none")})
    assert not (tmp_path / "none").exists()


def test_what_is_left_of_an_mpiruns_own_folder_goes_and_another_hosts_stays(tmp_path: Path, gone: int) -> None:
    """One that is killed while it removes its folder leaves it without the file that says whose it is."""
    folder = make_folder(tmp_path, gone, "elsewhere")
    kept = tmp_path / f"ompi.{os.getpid()}", tmp_path / f"results.{gone}"  # the second is a user's own
    for beside in kept:
        beside.mkdir()
    remove_folder_of(gone, {"TMPDIR": str(tmp_path)})
    assert folder.is_dir()
    for mark in folder.iterdir():
        mark.unlink()
    remove_folder_of(gone, {"TMPDIR": str(tmp_path)})
    assert not folder.exists() and all(map(Path.is_dir, kept))


def test_the_whole_folder_of_an_mpirun_that_was_killed_goes_where_nobody_listens(tmp_path: Path, gone: int) -> None:
    """As where mpirun did not end in time, and was killed with its ranks."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        folder = make_folder(tmp_path, gone, socket.gethostname(), "ompi", port=listener.getsockname()[1])
        remove_folder_of(gone, {"TMPDIR": str(tmp_path)})
        assert folder.is_dir()
    remove_folder_of(gone, {"TMPDIR": str(tmp_path)})
    assert not folder.exists()


def test_folders_of_open_mpi_4_go_by_host_user_and_process(tmp_path: Path, gone: int) -> None:
    shared = tmp_path / f"ompi.{socket.gethostname()}.{os.geteuid()}"
    elsewhere = tmp_path / f"ompi.elsewhere.{os.geteuid()}" / f"pid.{gone}"
    elsewhere.mkdir(parents=True)
    for remove in (remove_stale_folders, lambda environment: remove_folder_of(gone, environment)):
        folder, own = shared / f"pid.{gone}", shared / f"pid.{os.getpid()}"
        for each in (folder, own):
            each.mkdir(parents=True, exist_ok=True)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            # An mpirun of a host with several addresses tells them all.
            contact = f"802291712.0;tcp://127.0.0.1,192.0.2.7:{listener.getsockname()[1]}\n{gone}\n"
            (folder / "contact.txt").write_text(contact)
            remove({"TMPDIR": str(tmp_path)})
            assert folder.is_dir()
        remove({"TMPDIR": str(tmp_path)})
        assert not folder.exists() and own.is_dir() and elsewhere.is_dir()
    own.rmdir()
    folder.mkdir()
    remove_folder_of(gone, {"TMPDIR": str(tmp_path)})
    assert not shared.exists()
