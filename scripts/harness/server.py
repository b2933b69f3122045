"""A `trtrun serve` of one's own: started, watched, killed in parts, and looked after for what it leaves behind.

It knows processes and folders. It does not know requests.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import httpx

from scripts.harness.announcements import read_metrics
from scripts.harness.children import Child, ChildError
from scripts.harness.processes import all_processes, environment_of, is_alive, rank_of, server_environment, words_of
from scripts.harness.serving import serve_words, wait_for_addresses
from trtrun.configuration.model_paths import ASSETS

T = TypeVar("T")
MARK = "TRTRUN_TRIAL"
"""Variable that every process of a server inherits: none is overlooked, whoever has become its parent."""

SHARED = "OMPI_MCA_btl_sm_backing_directory"
"""Variable that tells ranks where their shared memory is."""

CLEAR_SECONDS = 60.0
"""How long processes and files may take to be gone after whoever needed them."""


def write_config(path: Path, num_ranks: int, **sections: Any) -> Path:
    """The shipped pair on CPU slots: one process, or a rank for the orchestrator, one for the draft, the others for the
    target. JSON is YAML."""
    if num_ranks not in (1, 3, 4, 5):
        raise ChildError(f"--ranks is 1, 3, 4 or 5, not {num_ranks}")
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


def open_client(url: str, patience: float) -> httpx.AsyncClient:
    """A client of a server, which waits so many seconds for each piece of an answer."""
    return httpx.AsyncClient(base_url=url, timeout=patience, trust_env=False)


class Server:
    """A running `trtrun serve`, whose temporary files all lie in one folder.

    Args:
        config: its configuration.
        folder: for what it says, and in a folder there for its temporary files.
        options: of the command, behind those that name free ports.

    Attributes:
        model, url, metrics_url, grpc_address: once it is ready.
    """

    def __init__(self, config: Path, folder: Path, options: tuple[str, ...] = ()) -> None:
        self.model = self.url = self.metrics_url = self.grpc_address = ""
        self._folder = folder
        self._temporary = folder / "tmp"
        self._temporary.mkdir()
        self._mark = secrets.token_hex(8)
        self._words = serve_words(config, *options)
        self._started: list[Child] = []
        self._shared_memory: set[Path] = set()

    async def start(self, patience: float) -> None:
        """Start it, and wait until it says where it listens.

        Raises:
            ChildError: it does not.
        """
        self.url = ""
        variables = server_environment({"TMPDIR": str(self._temporary), MARK: self._mark})
        self._started.append(Child(self._words, self._folder, variables))
        told = await asyncio.to_thread(wait_for_addresses, self._started[-1], patience)
        self.model, self.metrics_url, self.grpc_address = told.model, told.metrics_url, told.grpc_address
        self.url = told.url

    @property
    def lines(self) -> list[str]:
        """What it has said, and said before it was started again."""
        return [line for child in self._started for line in child.errors.splitlines()]

    def error_lines(self) -> list[str]:
        """What it has said of errors of its own."""
        return [line for line in self.lines if "Traceback" in line or " ERROR " in line]

    @property
    def _process(self) -> subprocess.Popen[bytes]:
        return self._started[-1].process

    @property
    def front(self) -> int:
        """Process id of the frontend."""
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
            ChildError: it does not come.
        """
        return await wait_for(
            lambda: next((process for process, part in self.processes().items() if part == name), None), patience, name
        )

    async def wait_healthy(self, patience: float) -> None:
        """Wait until requests are let in.

        Raises:
            ChildError: they are not.
        """
        async with open_client(self.url, patience) as client:
            deadline = time.monotonic() + patience
            while not (await client.get("/health")).is_success:
                if time.monotonic() > deadline:
                    raise ChildError(f"no engine after {patience:g} s:\n" + "\n".join(self.lines[-20:]))
                await asyncio.sleep(0.02)

    async def metrics(self) -> dict[str, float]:
        """Every sample of its metrics by its name."""
        async with open_client(self.url, 30) as client:
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
            ChildError: some are left; they are ended.
        """
        status = await asyncio.to_thread(self._process.wait)
        try:
            await wait_for(lambda: not self.processes() or None, patience, "the end of all processes")
        except ChildError:
            raise ChildError(f"left behind: {', '.join(sorted(self.kill().values()))}") from None
        left_files = sorted(map(str, [*self._temporary.rglob("*"), *filter(Path.exists, self._shared_memory)]))
        if left_files:
            raise ChildError(f"left behind: {', '.join(left_files)}")
        return status

    def kill(self) -> dict[int, str]:
        """Kill all of its processes; returns those that ran."""
        left = self.processes()
        for process in left:
            os.kill(process, signal.SIGKILL)
        return left

    async def end(self, patience: float) -> int:
        """Let it drain, and see it gone. Returns its exit status."""
        if self._process.poll() is None:
            self._process.terminate()
        try:
            await asyncio.to_thread(self._process.wait, patience)
        except subprocess.TimeoutExpired:
            self._process.kill()
            await self.wait_over()
            raise ChildError(f"the server did not end within {patience:g} s of SIGTERM") from None
        return await self.wait_over()


async def wait_for(ask: Callable[[], T | None], patience: float, what: str) -> T:
    """Ask again and again for something that can be seen from outside.

    Raises:
        ChildError: it does not come in time.
    """
    deadline = time.monotonic() + patience
    while (found := ask()) is None:
        if time.monotonic() > deadline:
            raise ChildError(f"waited {patience:g} s for {what}")
        await asyncio.sleep(0.02)
    return found
