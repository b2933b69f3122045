"""Hosts that cannot take part are named, with the reason, before any rank is started."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pydantic
import pytest
from network import SSHD, Host
from two_hosts import AWAY, ROOT, Site, own_lines

from launch.jobs.mpi.hosts import ANSWER_SECONDS, CONNECT_SECONDS

pytestmark = pytest.mark.timeout(300)


def refusal(site: Site, file: Path) -> str:
    """The one line that a job ends with before it starts."""
    done = site.trtrun("run", "--config", file, "--prompt", "x", "--max-tokens", 1)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    (line,) = done.stderr.splitlines()
    assert own_lines(done.stderr) == [line]
    return line


def ssh_config(site: Site, folder: Path, old: str, new: str) -> list[str]:
    """Arguments of ssh with one line of its configuration changed."""
    text = (site.network.folder / "ssh_config").read_text()
    assert old in text
    (folder / "ssh_config").write_text("".join(new if old in line else line for line in text.splitlines(True)))
    return ["-F", str(folder / "ssh_config")]


def test_a_host_that_is_down(two_hosts: Site) -> None:
    line = refusal(two_hosts, two_hosts.config({**AWAY, "target": {"nobody": ["cpu:0"]}}))
    assert "host nobody is not reached by ssh" in line
    assert "No route to host" in line or "timed out" in line


def test_every_host_that_is_down_is_named_at_once(two_hosts: Site) -> None:
    devices = {"target": {"nobody": ["cpu:0"], "10.78.0.77": ["cpu:0"]}, "draft": {"south": ["cpu:0"]}}
    line = refusal(two_hosts, two_hosts.config(devices))
    assert "host nobody is not reached" in line and "host 10.78.0.77 is not reached" in line
    assert "host south" not in line


def test_a_host_that_does_not_know_the_key(two_hosts: Site, folder: Path) -> None:
    arguments = ssh_config(two_hosts, folder, "IdentityFile", f"    IdentityFile {folder}/no_key\n")
    line = refusal(two_hosts, two_hosts.config(AWAY, launch={"ssh_arguments": arguments}))
    assert "host south is not reached by ssh (" in line
    assert "Permission denied (publickey)" in line
    assert f"try: ssh -F {folder}/ssh_config south" in line


def test_a_host_whose_own_key_is_not_known(two_hosts: Site, folder: Path) -> None:
    arguments = ssh_config(two_hosts, folder, "UserKnownHostsFile", f"    UserKnownHostsFile {folder}/none\n")
    line = refusal(two_hosts, two_hosts.config(AWAY, launch={"ssh_arguments": arguments}))
    assert "host south is not reached by ssh (" in line
    assert "Host key verification failed" in line


def test_a_host_that_refuses_connections(two_hosts: Site, folder: Path) -> None:
    arguments = ssh_config(two_hosts, folder, "Host *", "Host *\n    Port 23\n")
    line = refusal(two_hosts, two_hosts.config(AWAY, launch={"ssh_arguments": arguments}))
    assert "host south is not reached by ssh (ssh: connect to host south port 23: Connection refused)" in line


@contextmanager
def stopped(host: Host) -> Iterator[None]:
    """An sshd that takes connections and says nothing."""
    found = [p for p in Path("/proc").iterdir() if p.name.isdecimal() and is_sshd(p, host)]
    assert len(found) == 1
    os.kill(int(found[0].name), signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(int(found[0].name), signal.SIGCONT)


def is_sshd(entry: Path, host: Host) -> bool:
    try:
        return (
            SSHD in (entry / "cmdline").read_text()
            and f"ListenAddress={host.address}" in (entry / "cmdline").read_text()
            and os.readlink(entry / "ns" / "pid") == os.readlink(f"/proc/{host.init}/ns/pid")
        )
    except OSError:
        return False


def test_a_host_that_says_nothing(two_hosts: Site) -> None:
    file = two_hosts.config(AWAY)
    start = time.monotonic()
    with stopped(two_hosts.network["south"]):
        line = refusal(two_hosts, file)
    assert time.monotonic() - start > CONNECT_SECONDS  # it was waited for, and not for ever
    assert "host south" in line
    assert ANSWER_SECONDS < 20


def test_a_host_without_this_python(two_hosts: Site, folder: Path) -> None:
    python = Path(sys.executable).parent
    south = two_hosts.network["south"]
    south.run("mount", "-t", "tmpfs", "none", str(python), check=True)
    try:
        line = refusal(two_hosts, two_hosts.config(AWAY))
    finally:
        south.run("umount", str(python), check=True)
    assert f"host south has no {sys.executable}" in line


def test_a_host_whose_trtrun_does_not_work(two_hosts: Site) -> None:
    """One of the packages that it needs is not there."""
    south, package = two_hosts.network["south"], Path(pydantic.__file__).parent
    south.run("mount", "-t", "tmpfs", "none", str(package), check=True)
    try:
        line = refusal(two_hosts, two_hosts.config(AWAY))
    finally:
        south.run("umount", str(package), check=True)
    assert f"host south has no trtrun that works for {sys.executable} (ImportError: " in line
    assert "pydantic" in line


def test_a_host_with_another_version_of_trtrun(two_hosts: Site, folder: Path) -> None:
    south, file = two_hosts.network["south"], ROOT / "trtrun" / "__init__.py"
    other = folder / "other.py"
    other.write_text(file.read_text().replace('__version__ = "', '__version__ = "77.'))
    south.run("mount", "--bind", str(other), str(file), check=True)
    try:
        line = refusal(two_hosts, two_hosts.config(AWAY))
    finally:
        south.run("umount", str(file), check=True)
    assert "host south has trtrun 77." in line
    assert "install one version on all hosts" in line


def test_an_argument_of_ssh_that_mpirun_would_tear_apart(two_hosts: Site) -> None:
    arguments = [*two_hosts.network.ssh_arguments, "-o", "ProxyCommand none at all"]
    line = refusal(two_hosts, two_hosts.config(AWAY, launch={"ssh_arguments": arguments}))
    assert "launch.ssh_arguments: mpirun cannot hand on 'ProxyCommand none at all'" in line
