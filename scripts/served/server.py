"""A `trtrun serve` of one's own: started, watched, killed in parts, and looked after for what it leaves behind.

It knows processes and folders. It does not know requests.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import httpx

from scripts.served.processes import all_processes, environment_of, is_alive, rank_of, server_environment, words_of
from scripts.served.said import read_addresses, read_metrics
from trtrun.configuration.model_paths import ASSETS

T = TypeVar("T")
MARK = "TRTRUN_TRIAL"
"""Variable that every process of a server inherits: none is overlooked, whoever has become its parent."""

SHARED = "OMPI_MCA_btl_sm_backing_directory"
"""Variable that tells ranks where their shared memory is."""

CLEAR_SECONDS = 60.0
"""How long processes and files may take to be gone after whoever needed them."""


class TrialError(Exception):
    """The server is not as it has to be."""


def write_config(path: Path, num_ranks: int, **sections: Any) -> Path:
    """The shipped pair on CPU slots: one process, or a rank for the orchestrator, one for the draft, the others for the
    target. JSON is YAML."""
    if num_ranks not in (1, 3, 4, 5):
        raise TrialError(f"--ranks is 1, 3, 4 or 5, not {num_ranks}")
    target = ["cpu:0"] if num_ranks == 1 else [f"cpu:{place}" for place in range(1, num_ranks - 1)]
    values = {
        "target": {"model": "asset:target", "devices": target},
        "draft": {"model": "asset:draft", "devices": ["cpu:0"]},
        "threads": 1,
        **sections,
    }
    path.write_text(json.dumps(values), encoding="utf-8")
    return path


def write_tokenizer(folder: Path) -> Path:
    """The shipped pair's tokenizer with a chat template, which the pair has none of."""
    folder.mkdir()
    for file in (ASSETS / "target").glob("*token*.json"):
        (folder / file.name).symlink_to(file)
    template = "{% for message in messages %}# {{ message.role }}\n{{ message.content }}\n{% endfor %}# answer\n"
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return folder


class Server:
    """A running `trtrun serve`, whose temporary files all lie in one folder.

    Attributes:
        folder: for its temporary files, and for nothing else.
        lines: what it has said.
        model, url, metrics_url, grpc_address: once it is ready.
    """

    def __init__(self, config: Path, folder: Path, arguments: tuple[str, ...] = ()) -> None:
        self.folder = folder
        self.lines: list[str] = []
        self.model = self.url = self.metrics_url = self.grpc_address = ""
        self._mark = secrets.token_hex(8)
        self._command = [sys.executable, "-m", "launch.cli", "serve", "--config", str(config), *arguments]
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._news = asyncio.Event()
        self._shared_memory: set[Path] = set()

    async def start(self, patience: float) -> None:
        """Start it, and wait until it says where it listens.

        Raises:
            TrialError: it does not.
        """
        self.url = ""
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            "--http-port",
            "0",
            "--grpc-port",
            "0",
            "--metrics-port",
            "0",
            stderr=asyncio.subprocess.PIPE,
            env=server_environment({"TMPDIR": str(self.folder), MARK: self._mark}),
        )
        self._reading = asyncio.create_task(self._read(self._process))
        deadline = time.monotonic() + patience
        while not self.url:
            if self._reading.done() or time.monotonic() > deadline:
                raise TrialError("the server did not start:\n" + "\n".join(self.lines[-20:]))
            self._news.clear()
            await _wait(self._news, 1.0)

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stderr is not None
        async for line in process.stderr:
            self.lines.append(line.decode(errors="replace").rstrip("\n"))
            if told := read_addresses(self.lines[-1]):
                self.model, self.url, self.metrics_url = told.model, told.url, told.metrics_url
                self.grpc_address = told.grpc_address
            self._news.set()

    @property
    def front(self) -> int:
        """Process id of the front."""
        assert self._process is not None
        return self._process.pid

    def processes(self) -> dict[int, str]:
        """Every process of the server, the front's among them: process id → what it is: `front`, `engine`, `mpirun`,
        `reader`, `rank N`, or the name of its program."""
        found = {}
        for process in all_processes():
            environment = environment_of(process)
            if environment.get(MARK) != self._mark or not is_alive(process):
                continue
            found[process] = self._name(process, environment)
            if SHARED in environment:
                self._shared_memory.add(Path(environment[SHARED]))
        return found

    def _name(self, process: int, environment: dict[str, str]) -> str:
        rank, words = rank_of(environment), words_of(process)
        program = Path(words[0]).name if words else ""
        if process == self.front:
            return "front"
        if rank is not None:
            return f"rank {rank}"
        if program.startswith(("mpirun", "prterun")):
            return "mpirun"
        if "launch.serve.application.parser_worker" in words:
            return "reader"
        return "engine" if "serve-engine" in words else program

    async def find(self, name: str, patience: float) -> int:
        """Process id of a part, once it is there.

        Raises:
            TrialError: it does not come.
        """
        return await wait_for(
            lambda: next((process for process, part in self.processes().items() if part == name), None), patience, name
        )

    async def wait_healthy(self, patience: float) -> None:
        """Wait until requests are let in.

        Raises:
            TrialError: they are not.
        """
        async with httpx.AsyncClient(timeout=patience, trust_env=False) as client:
            deadline = time.monotonic() + patience
            while not (await client.get(self.url + "/health")).is_success:
                if time.monotonic() > deadline:
                    raise TrialError(f"no engine after {patience:g} s:\n" + "\n".join(self.lines[-20:]))
                await asyncio.sleep(0.02)

    async def metrics(self) -> dict[str, float]:
        """See `read_metrics`."""
        async with httpx.AsyncClient(timeout=30, trust_env=False) as client:
            return read_metrics((await client.get(self.metrics_url)).raise_for_status().text)

    def resident_bytes(self) -> dict[str, int]:
        """Memory that each part holds and shares with no other."""
        found = {}
        for process, part in self.processes().items():
            try:
                lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
            except OSError:
                continue
            private = [int(line.split()[1]) for line in lines if line.startswith(("Private_Clean", "Private_Dirty"))]
            found[part] = 1024 * sum(private)
        return found

    async def wait_over(self, patience: float = CLEAR_SECONDS) -> int:
        """Its exit status, once it has ended, and all of its processes and files with it.

        Raises:
            TrialError: some are left; they are ended.
        """
        assert self._process is not None and self._reading is not None
        status = await self._process.wait()
        try:
            await wait_for(lambda: not self.processes() or None, patience, "the end of all processes")
        except TrialError:
            left = self.processes()
            for process in left:
                os.kill(process, signal.SIGKILL)
            raise TrialError(f"left behind: {', '.join(sorted(left.values()))}") from None
        await self._reading
        left_files = sorted(map(str, [*self.folder.rglob("*"), *filter(Path.exists, self._shared_memory)]))
        if left_files:
            raise TrialError(f"left behind: {', '.join(left_files)}")
        return status

    async def end(self, patience: float) -> int:
        """Let it drain, and see it gone. Returns its exit status."""
        assert self._process is not None
        if self._process.returncode is None:
            self._process.terminate()
        try:
            await asyncio.wait_for(self._process.wait(), patience)
        except TimeoutError:
            self._process.kill()
            await self.wait_over()
            raise TrialError(f"the server did not end within {patience:g} s of SIGTERM") from None
        return await self.wait_over()


async def wait_for(ask: Callable[[], T | None], patience: float, what: str) -> T:
    """Ask again and again for something that can be seen from outside.

    Raises:
        TrialError: it does not come in time.
    """
    deadline = time.monotonic() + patience
    while (found := ask()) is None:
        if time.monotonic() > deadline:
            raise TrialError(f"waited {patience:g} s for {what}")
        await asyncio.sleep(0.02)
    return found


async def _wait(event: asyncio.Event, seconds: float) -> None:
    try:
        await asyncio.wait_for(event.wait(), seconds)
    except TimeoutError:
        return
