"""Two hosts on one machine: namespaces of network, name, processes and mounts, joined by a link, with sshd in each.

Needs root, Linux's `unshare`, `nsenter` and `ip`, and OpenSSH's sshd. Nothing of it has a name outside: killing the
first process of a host ends every process of the host and takes its addresses, mounts and the link along.
"""

from __future__ import annotations

import os
import selectors
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forked_commands import ForkedCommands, ForkedProcess

ROOT = Path(__file__).resolve().parents[3]
HOST_PROGRAM = Path(__file__).parent / "programs" / "host.py"
ADDRESSES = {"north": "10.78.0.1", "south": "10.78.0.2"}
NOBODY = "10.78.0.9"
"""An address of the hosts' network that no host has."""

SSHD = "/usr/sbin/sshd"
START_SECONDS = 60.0

SSHD_CONFIG = """\
Port 22
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PidFile none
MaxStartups 100
SetEnv TMPDIR={folder}/private
"""
SSH_CONFIG = """\
Host *
    IdentityFile {folder}/user_key
    IdentitiesOnly yes
    UserKnownHostsFile {folder}/known_hosts
    GlobalKnownHostsFile /dev/null
    StrictHostKeyChecking yes
    LogLevel ERROR
"""


def missing_parts() -> str:
    """What this machine lacks for two hosts; empty where it has everything."""
    if os.geteuid() != 0:
        return "needs root, for two hosts in network namespaces"
    programs = {"unshare": "util-linux", "nsenter": "util-linux", "ip": "iproute2", "ssh": "openssh-client"}
    lacking = [f"{name} ({package})" for name, package in programs.items() if shutil.which(name) is None]
    lacking += [] if os.access(SSHD, os.X_OK) else [f"{SSHD} (openssh-server)"]
    if lacking:
        return f"needs what two hosts are made of: install {', '.join(lacking)}"
    tried = subprocess.run(["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "true"], capture_output=True)
    return "" if tried.returncode == 0 else f"needs network namespaces: {tried.stderr.decode(errors='replace').strip()}"


@dataclass
class Host:
    """One running host.

    Attributes:
        name, address: by which the hosts know it.
        process: `unshare`, whose stdin keeps the host alive.
        init: process id of the host's first process, as this test sees it.
        forking: process id of the one that commands and ranks are forked from here, 0 while there is none.
    """

    name: str
    address: str
    process: subprocess.Popen[str]
    init: int
    forking: int = 0

    def words(self, *command: str) -> list[str]:
        """A command, as it is run on this host."""
        return ["nsenter", f"--target={self.init}", "--net", "--uts", "--ipc", "--mount", "--pid", *command]

    def run(self, *command: str, timeout: float = 60, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a command on this host and wait for its end."""
        return subprocess.run(self.words(*command), capture_output=True, text=True, timeout=timeout, **options)

    def processes(self) -> dict[int, str]:
        """Command lines of all processes of this host but the test's own, by process id as this test sees it."""
        namespace = os.readlink(f"/proc/{self.init}/ns/pid")
        found = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdecimal():
                continue
            try:
                if os.readlink(entry / "ns" / "pid") == namespace:
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
            except OSError:
                continue
        # A zombie has no command line; the host's own processes are its first and sshd's listener.
        return {
            process: line
            for process, line in found.items()
            if line and process not in (self.init, self.forking) and not line.startswith("sshd: /usr/sbin/sshd")
        }

    def cut_off(self) -> None:
        """Take the host's link down: nothing comes or goes any more, and nobody is told."""
        self.run("ip", "link", "set", "eth0", "down", check=True)

    def connect(self) -> None:
        """Take the link up again."""
        self.run("ip", "link", "set", "eth0", "up", check=True)


@dataclass
class Network:
    """The hosts, and what a job on them needs.

    Attributes:
        hosts: by name.
        forking: what starts commands on them, by host; empty until the first one.
        folder: seen by all hosts; `folder / "private"` is another directory on each.
    """

    folder: Path
    hosts: dict[str, Host] = field(default_factory=dict)
    forking: dict[str, ForkedCommands] = field(default_factory=dict)

    @property
    def ssh_arguments(self) -> list[str]:
        """For launch.ssh_arguments."""
        return ["-F", str(self.folder / "ssh_config")]

    def __getitem__(self, name: str) -> Host:
        return self.hosts[name]

    def trtrun(
        self, arguments: Sequence[object], variables: Mapping[str, str], seconds: float
    ) -> subprocess.CompletedProcess[str]:
        """Run the command on the first host, to its end.

        It is forked, and so are its ranks, each on its host: what ssh, sshd and mpirun start there stands for them
        (tests/helpers/forked_ranks.py).
        """
        commands = self._forked_commands()
        return commands.run([str(argument) for argument in arguments], {**self._own, **variables}, ROOT, seconds)

    def start(self, arguments: Sequence[object], variables: Mapping[str, str]) -> ForkedProcess:
        """Start the same, forked like that."""
        words = [str(argument) for argument in arguments]
        return self._forked_commands().start(words, {**self._own, **variables}, ROOT, ranks=True)

    @property
    def _own(self) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    def _forked_commands(self) -> ForkedCommands:
        """The first host's; each has them from the first time on."""
        if not self.forking:
            self.forking = {name: self._fork_on(host, self._own) for name, host in self.hosts.items()}
        return next(iter(self.forking.values()))

    def _fork_on(self, host: Host, environment: dict[str, str]) -> ForkedCommands:
        file = f"{self.folder}/private/forking"
        commands = ForkedCommands(environment, before=host.words(), file=(file, f"/proc/{host.init}/root{file}"))
        children = Path(f"/proc/{commands.process.pid}/task/{commands.process.pid}/children")
        wait_for(children.read_text, START_SECONDS, lambda: "nsenter starts nothing")
        host.forking = _only_child(commands.process.pid)
        return commands


@contextmanager
def start_network(folder: Path) -> Iterator[Network]:
    """Two hosts that reach each other by ssh without a password; they end with the block."""
    _write_files(folder)
    network = Network(folder)
    started: list[subprocess.Popen[str]] = []
    try:
        for name, address in ADDRESSES.items():
            process = _start_host(name, address, folder)
            started.append(process)
            _expect(process, "waiting")
            network.hosts[name] = Host(name, address, process, _only_child(process.pid))
        ends = [("eth0", str(host.init)) for host in network.hosts.values()]
        words = ["ip", "link", "add", ends[0][0], "netns", ends[0][1], "type", "veth"]
        subprocess.run([*words, "peer", "name", ends[1][0], "netns", ends[1][1]], check=True)
        for process in started:
            assert process.stdin is not None
            process.stdin.write("linked\n")
            process.stdin.flush()
        for process in started:
            _expect(process, "ready")
        yield network
    finally:
        for commands in network.forking.values():
            commands.close()
        for process in started:
            process.kill()  # unshare --kill-child kills the host's first process, and that everything of the host
            process.communicate(timeout=60)


def wait_for(condition: Callable[[], Any], seconds: float, what: Callable[[], str]) -> None:
    """Ask again and again until the condition holds; fail the test when it does not within `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what()}"
        time.sleep(0.05)


def _write_files(folder: Path) -> None:
    for key in ("host_key", "user_key"):
        words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)]
        subprocess.run(words, check=True, stdin=subprocess.DEVNULL)
    key = (folder / "host_key.pub").read_text().split()
    names = [f"{name},{address}" for name, address in ADDRESSES.items()]
    (folder / "known_hosts").write_text("".join(f"{name} {key[0]} {key[1]}\n" for name in names))
    (folder / "ssh_config").write_text(SSH_CONFIG.format(folder=folder))
    (folder / "sshd_config").write_text(SSHD_CONFIG.format(folder=folder))
    addresses = "".join(f"{address} {name}\n" for name, address in {**ADDRESSES, "nobody": NOBODY}.items())
    (folder / "hosts").write_text(f"127.0.0.1 localhost\n{addresses}")
    (folder / "private").mkdir()


def _start_host(name: str, address: str, folder: Path) -> subprocess.Popen[str]:
    namespaces = ["--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    return subprocess.Popen(
        ["unshare", *namespaces, sys.executable, str(HOST_PROGRAM), name, address, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _expect(process: subprocess.Popen[str], word: str) -> None:
    """Wait for the word on the host's stdout."""
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        assert selector.select(START_SECONDS), f"a host did not say {word!r} within {START_SECONDS:g} s"
    said = process.stdout.readline()
    assert said == f"{word}\n", f"a host said {said!r}, not {word!r}"


def _only_child(process: int) -> int:
    """The one child of a process."""
    children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    assert len(children) == 1, children
    return int(children[0])
