"""Helpers of the server tests: the real command in a process of its own, its processes, its metrics."""

from __future__ import annotations

import json
import os
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx
from forked_commands import ForkedProcess, forked_words, ranks_below, running_processes, shared_commands

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from scripts.harness.announcements import is_idle, read_addresses, read_metrics
from scripts.harness.processes import ROOT, server_environment, words_of

T = TypeVar("T")
ONE_PROCESS = {"target": ["cpu:0"], "draft": ["cpu:0"]}
THREE_RANKS = {"target": ["cpu:1"], "draft": ["cpu:0"]}
PLAIN = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""For requests without TLS: without a context httpx reads the certificates of all authorities, each time anew, which
takes far more of a core than the request does."""

LONGEST_STRETCH = 0.05
"""Seconds of processor time, as docs/serve.md has it."""

PATIENCE = 150.0
"""Seconds that anything may take on a busy machine before a test gives up on it."""


class Server:
    """A running `trtrun serve`.

    It, its engine and its ranks are forked from a process that has imported torch (helpers/forked_commands.py), unless
    a test is of what the kernel does to them when it dies.

    Args:
        config: its configuration.
        arguments: of the command, behind that.
        environment: variables beside this process's.
        launcher: words of a user's own mpirun, whose ranks the command is.
        program: of Python.
        is_forked: whether it is no new program, nor its ranks.

    Attributes:
        process: the frontend.
        lines: what it has said so far.
        url, metrics_url, grpc_address: once it is ready.
    """

    def __init__(
        self,
        config: Path,
        *arguments: str,
        environment: dict[str, str] | None = None,
        launcher: Sequence[str] = (),
        program: Sequence[str] = ("-m", "launch.cli"),
        is_forked: bool = True,
    ) -> None:
        words = ["serve", "--config", str(config), *arguments]
        values = server_environment(environment or {})
        self.process: subprocess.Popen[str] | ForkedProcess
        if is_forked and not launcher:
            python = [sys.executable, *program]
            self.process = shared_commands().start(words, values, ROOT, python, ranks=True)
        else:
            begin = [*(forked_words() if is_forked else ()), sys.executable]
            python = [*begin, *(("-m", "mpi4py") if launcher else ()), *program]
            self.process = subprocess.Popen(
                [*launcher, *python, *words], stderr=subprocess.PIPE, text=True, cwd=ROOT, env=values
            )
        self.lines: list[str] = []
        self.url = self.grpc_address = self.metrics_url = ""
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._news:
                self.lines.append(line.rstrip("\n"))
                self._news.notify_all()
        with self._news:
            self._news.notify_all()

    def wait_for(self, text: str) -> str:
        """The first line that holds `text`, once it is said."""
        deadline = time.monotonic() + PATIENCE
        with self._news:
            while True:
                found = [line for line in self.lines if text in line]
                if found:
                    return found[0]
                assert self._reader.is_alive() and time.monotonic() < deadline, "\n".join(self.lines)
                self._news.wait(1.0)

    def wait_ready(self) -> Server:
        """Wait until it says where it listens."""
        told = read_addresses(self.wait_for("is served at"))
        assert told is not None
        self.url, self.metrics_url, self.grpc_address = told.url, told.metrics_url, told.grpc_address
        return self

    def wait_ended(self) -> int:
        """Its exit status, once it has ended and all is read that it has said."""
        status = self.process.wait(timeout=PATIENCE)
        self._reader.join(timeout=PATIENCE)
        return status

    def metrics(self) -> dict[str, float]:
        """Every sample of its metrics by its name."""
        return read_metrics(httpx.get(self.metrics_url, timeout=PATIENCE, verify=False).raise_for_status().text)

    def wait_idle(self) -> dict[str, float]:
        """Wait until nothing runs or waits; returns the metrics of then."""
        return wait_until(self._idle_metrics, "an idle engine")

    def _idle_metrics(self) -> dict[str, float] | None:
        metrics = self.metrics()
        return metrics if is_idle(metrics) else None

    def engine(self) -> int:
        """Process id of the engine's first process: the engine itself, or the parent of its mpirun."""
        return wait_until(lambda: _find_engine(self.process.pid), "an engine")

    def rank(self, rank: int) -> int:
        """Process id of a rank."""
        return wait_until(lambda: ranks_below(self.process.pid).get(rank), f"rank {rank}")

    @contextmanager
    def engine_stopped(self) -> Iterator[None]:
        """While the engine's own process stands still: however fast the machine is, no request is done meanwhile."""
        engine = self.engine()
        os.kill(engine, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(engine, signal.SIGCONT)

    def post(self, path: str, body: Any, **others: Any) -> httpx.Response:
        """Post a body as JSON, or as it is where it is bytes."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return httpx.post(self.url + path, content=content, **{"timeout": PATIENCE, "verify": PLAIN, **others})

    def get(self, path: str, **others: Any) -> httpx.Response:
        """What it says there."""
        return httpx.get(self.url + path, **{"timeout": PATIENCE, "verify": PLAIN, **others})

    def end(self) -> None:
        """End it and all below it, whatever state it is in."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                self.process.kill()  # the kernel takes its engine along
        self.wait_ended()


def _find_engine(frontend: int) -> int | None:
    children, standing = running_processes()
    for process in children.get(frontend, []):
        if "serve-engine" in words_of(process):
            return standing.get(process, process)
    return None


@contextmanager
def serving(config: Path, *arguments: str, **options: Any) -> Iterator[Server]:
    """A server that is ready, and is ended at the end; options as of `Server`. Whatever was sent to it, its event loop
    has not worked for long at a stretch: that is the loop's own processor time since the server was ready, so that
    neither a busy machine nor what is imported at a start counts."""
    server = Server(config, *arguments, **options)
    try:
        yield server.wait_ready()
        _check_stretches(server)
    finally:
        server.end()


def _check_stretches(server: Server) -> None:
    """Hold the longest stretch to its limit, unless the server has ended already."""
    try:
        longest = server.metrics()["trtrun:front_longest_stretch_seconds"]
    except httpx.TransportError:
        return
    assert longest < LONGEST_STRETCH


def wait_until(ask: Callable[[], T | None], what: str) -> T:
    """Wait for something that can be seen from outside."""
    deadline = time.monotonic() + PATIENCE
    while True:
        found = ask()
        if found is not None:
            return found
        assert time.monotonic() < deadline, f"waited {PATIENCE:g} s for {what}"
        threading.Event().wait(0.05)


def write_config(path: Path, model: Path, devices: dict[str, list[str]], **sections: Any) -> Path:
    """A configuration of a pair in `model`; JSON is YAML."""
    values: dict[str, Any] = {name: {"model": str(model / name), "devices": slots} for name, slots in devices.items()}
    values |= {"speculation": {"draft_len": 4}, "threads": 1}
    server = {"http_port": 0, "grpc_port": 0, "metrics_port": 0, "model_name": "pair"}
    values |= {"server": server | sections.pop("server", {})}
    path.write_text(json.dumps(values | sections), encoding="utf-8")
    return path
