"""What the tests on two hosts share: models that both see, configurations, the command on north, and its ranks."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import output_rows
from forked_commands import ForkedProcess
from network import ROOT, Host, Network, wait_for
from output_rows import without_drafting

PATIENCE = 150.0
"""Seconds for one job; other work may keep the machine busy."""

TWO_HOSTS = {"target": {"north": ["cpu:1"], "south": ["cpu:0"]}, "draft": {"south": ["cpu:1"]}}
"""Ranks 0 and 2 on north, ranks 1 and 3 on south: no host's ranks follow each other."""

AWAY = {"target": {"south": ["cpu:0"]}, "draft": {"north": ["cpu:0"]}}
"""Ranks 0 and 1 on north, rank 2 on south."""

RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK")


def rank_of(process: int) -> int | None:
    """The rank that mpirun has given a process, None where it is no rank."""
    for name, value in environment_of(process).items():
        if name in RANK_VARIABLES:
            return int(value)
    return None


def environment_of(process: int) -> dict[str, str]:
    """Environment that a process was started with; empty for one that has ended."""
    try:
        items = Path(f"/proc/{process}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return {}
    return dict(item.partition("=")[::2] for item in items if item)


def own_lines(errors: str) -> list[str]:
    """What trtrun itself said on stderr."""
    return [line for line in errors.splitlines() if line.startswith("trtrun: ")]


@dataclass
class Site:
    """Two hosts, models that both see, and the command on north.

    Attributes:
        environment: of every command, beside what PATH and the like say.
    """

    network: Network
    pair: Path
    folder: Path
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def private(self) -> Path:
        """A directory that is another one on each host."""
        return self.network.folder / "private"

    def config(self, devices: dict[str, Any] = TWO_HOSTS, **sections: Any) -> Path:
        """Write a configuration and return its path; JSON is YAML."""
        values: dict[str, Any] = {
            name: {"model": str(self.pair / name), "devices": placed} for name, placed in devices.items()
        }
        values |= {"launch": {"ssh_arguments": self.network.ssh_arguments}, "kv_cache": {"max_tokens": 4000}}
        # Runs that are compared draft alike.
        values |= {"speculation": {"pacing": "fixed", **({} if "draft" in devices else {"method": "none"})}}
        for key, section in sections.items():
            values[key] = {**values.get(key, {}), **section} if isinstance(section, dict) else section
        path = self.folder / f"run{len(list(self.folder.glob('*.yaml')))}.yaml"
        path.write_text(json.dumps(values), encoding="utf-8")
        return path

    def words(self, *arguments: object) -> list[str]:
        """The command on north."""
        return self.network["north"].words(*self.command(*arguments))

    def command(self, *arguments: object) -> list[str]:
        """The command as a shell on a host has it."""
        extra = [f"{name}={value}" for name, value in self.environment.items()]
        # MPI's files are named by process id and host, and other tests' hosts have the same ones.
        own = [f"TMPDIR={self.private}", f"PYTHONPATH={ROOT}", "OMP_NUM_THREADS=1"]
        before = ["env", f"--chdir={ROOT}", *own, *extra]
        return [*before, sys.executable, "-m", "launch.cli", *(str(argument) for argument in arguments)]

    def trtrun(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        """Run the command on north to its end, forked, as its ranks are."""
        return self.network.trtrun(arguments, self._variables, PATIENCE)

    def start(self, *arguments: object) -> ForkedProcess:
        """Start the same."""
        return self.network.start(arguments, self._variables)

    @property
    def _variables(self) -> dict[str, str]:
        return {"TMPDIR": str(self.private), **self.environment}

    def remote_processes(self) -> dict[str, list[str]]:
        """Command lines of what runs on the hosts beside their own first processes, by host; hosts without are left
        out."""
        found = {name: list(host.processes().values()) for name, host in self.network.hosts.items()}
        return {name: lines for name, lines in found.items() if lines}

    def expect_nothing_left(self, seconds: float = 60) -> None:
        """Wait until no process of a job is left on either host."""
        wait_for(lambda: not self.remote_processes(), seconds, lambda: str(self.remote_processes()))


def run(words: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE, check=False)


@dataclass
class RunningJob:
    """A job of several ranks on two hosts, in the middle of a very long text."""

    site: Site
    process: subprocess.Popen[str] | ForkedProcess

    @classmethod
    def start(
        cls, site: Site, devices: dict[str, Any] = TWO_HOSTS, is_forked: bool = False, **sections: Any
    ) -> RunningJob:
        """Start it and wait for its first token. Programs of its own are for tests of what ends with what; of a forked
        rank `ranks` has what stands for it, which ends it and ends with it."""
        file = site.config(devices, **{"kv_cache": {"max_tokens": 60000}, **sections})
        arguments = ("run", "--config", file, "--prompt", "x", "--max-tokens", 50000, "--ignore-eos")
        process: subprocess.Popen[str] | ForkedProcess
        if is_forked:
            process = site.start(*arguments)
        else:
            process = subprocess.Popen(
                site.words(*arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace"
            )
        job = cls(site, process)
        assert process.stdout is not None
        if not process.stdout.read(1):
            raise AssertionError(process.communicate(timeout=PATIENCE)[1])
        return job

    @property
    def ranks(self) -> dict[int, tuple[str, int]]:
        """Host and process id, as this test sees it, of each rank."""
        found = {}
        for name, host in self.site.network.hosts.items():
            for process, line in host.processes().items():
                rank = rank_of(process)
                if rank is not None and "launch.cli" in line:
                    found[rank] = (name, process)
        return found

    def find(self, host: Host, *names: str) -> int:
        """Process id of the one program of a host with one of these names."""
        found = [p for p, line in host.processes().items() if Path(line.split()[0]).name in names]
        assert len(found) == 1, (names, host.processes())
        return found[0]

    @property
    def parent(self) -> int:
        """Process id of the `trtrun run` that the user has started."""
        lines = self.site.network["north"].processes()
        found = [process for process, line in lines.items() if "-m launch.cli run" in line and "mpi4py" not in line]
        assert len(found) == 1, lines
        return found[0]

    def end(self, seconds: float = PATIENCE) -> tuple[int, str, float]:
        """Wait for the end of the job; returns the exit status, stderr, and how many seconds it took."""
        start = time.monotonic()
        _, errors = self.process.communicate(timeout=seconds)
        assert self.process.returncode is not None
        return self.process.returncode, errors, time.monotonic() - start

    def stop(self) -> None:
        """End what is left of it, however the test ended."""
        for host in self.site.network.hosts.values():
            for process in host.processes():
                if Path(f"/proc/{process}").exists():
                    os.kill(process, 9)
        self.process.kill()
        self.process.communicate(timeout=60)


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write a JSON lines file."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of an output without what differs from run to run."""
    return without_drafting(output_rows.read_rows(path))


def copy_to(host: Host, source: Path, target: Path) -> None:
    """Copy a file or directory to where only this host sees it."""
    assert shutil.which("cp")
    host.run("cp", "-r", str(source), str(target), check=True)
