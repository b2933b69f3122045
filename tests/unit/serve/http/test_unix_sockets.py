"""Sockets as files: where they are, who may open them, and whose place they take."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from launch.serve.application.addresses import Addresses
from launch.serve.http.unix_sockets import AUTO, find_place, listen
from trtrun.configuration.process_sections import ServerSection
from trtrun.errors import ConfigError


def test_a_socket_is_its_users_whatever_the_mask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with listen(tmp_path / "s"):
            assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o600
            assert os.umask(0) == 0  # files made later are as they were
    finally:
        os.umask(before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_at_the_start_leaves_no_file(tmp_path: Path, number: signal.Signals) -> None:
    code = (
        "import os, sys; from launch.serve.application.addresses import *\n"
        "with Addresses.open(ServerSection(uds=sys.argv[1]), {}) as addresses, ended_without_files(addresses):\n"
        "    assert os.path.exists(sys.argv[1]); os.kill(os.getpid(), int(sys.argv[2]))"
    )
    words = [sys.executable, "-c", code, tmp_path / "s", str(int(number))]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (128 + number, f"trtrun: ended by {number.name}\n")
    assert not list(tmp_path.iterdir())


def test_the_place_of_a_dead_server_is_taken_and_that_of_another_is_not(tmp_path: Path) -> None:
    path = tmp_path / "s"
    listen(path).close()
    with Addresses.open(ServerSection(uds=path), {}) as addresses:
        with pytest.raises(ConfigError, match=r"a server answers at .*/s: end it, or name another path"):
            listen(path)
        with listen(tmp_path / "next"):
            (tmp_path / "next").rename(path)
            addresses.remove_files()
            assert path.exists()
    path.unlink()
    path.write_text("mine")
    with pytest.raises(ConfigError, match="is there, and is no socket"):
        listen(path)
    assert path.read_text() == "mine"


def test_files_go_with_their_server(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), Addresses.open(ServerSection(uds=tmp_path / "s"), {}):
        raise RuntimeError
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("/" + "x" * 102, "/xx.* has 108 bytes with .grpc behind it, and sockets' paths may have 107"),
        ("$NONE/s", "names \\$NONE, which is not set"),
        ("~nobody-of-that-name/s", "there is no such user"),
        ("missing/s", "there is no folder .*/missing: make it"),
    ],
)
def test_what_is_no_place_is_refused(given: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"server.uds: .*{message}"):
        listen(find_place(Path(given), {}))


def test_a_place_may_name_what_only_the_job_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    job = {"TMPDIR": str(tmp_path), "SLURM_JOB_ID": "7", "HOME": "/h"}
    assert find_place(Path("$TMPDIR/a-${SLURM_JOB_ID}.s"), job) == tmp_path / "a-7.s"
    assert find_place(Path("s"), {}) == tmp_path / "s"
    assert find_place(AUTO, job) == tmp_path / "trtrun-7.sock"


def test_a_folder_that_others_write_to_is_no_place_of_ones_own(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    own = tmp_path / "own"
    own.mkdir(mode=0o700)
    environment = {"TMPDIR": str(tmp_path), "XDG_RUNTIME_DIR": str(own)}
    assert find_place(AUTO, environment) == own / f"trtrun-{os.getpid()}.sock"
    place = find_place(AUTO, {"TMPDIR": str(tmp_path)})
    assert place.parent == Path(f"/tmp/trtrun-{os.geteuid()}") and stat.S_IMODE(place.parent.stat().st_mode) == 0o700


def test_certificates_are_of_ports(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="tls_cert: is of ports"):
        ServerSection(uds=tmp_path, tls_cert=tmp_path, tls_key=tmp_path)
    assert ServerSection(uds=tmp_path, adapter_directory=tmp_path).api_key_file is None


def test_another_user_cannot_connect() -> None:
    if os.geteuid():
        pytest.skip("needs root, to become another user")
    path = Path(f"/tmp/trtrun-test-{os.getpid()}.s")  # in a folder that everybody may enter
    with listen(path), socket.socket(socket.AF_UNIX) as asking:
        os.seteuid(65534)
        try:
            with pytest.raises(PermissionError):
                asking.connect(str(path))
        finally:
            os.seteuid(0)
            path.unlink()
