"""Adapters that clients load and drop while the server runs: which names and directories are let in.

A path comes from outside: only what lies below one directory is looked at, links followed, those of its files, too.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from pathlib import Path

from launch.serve.admission.refusals import RETRY_SECONDS, Kind, Refusal, out_of_time
from launch.serve.engine.adapters import AdapterChange
from launch.serve.engine.messages import DropAdapter, LoadAdapter
from launch.serve.frontend.frontend import Frontend
from trtrun.configuration.process_sections import ServerSection
from trtrun.core.values import show_value
from trtrun.errors import ConfigError, nearest, shorten_path
from trtrun.lora.lora_config import CONFIG_FILE, WEIGHTS_FILE

logger = logging.getLogger(__name__)

_LONGEST_NAME = 200
"""Characters."""


_MOST_WAITING = 16
"""Changes that wait for the one that the engine is at."""


@dataclass
class AdapterDesk:
    """Loads and drops adapters, one after the other.

    Attributes:
        frontend: that takes requests.
        directory: below which adapters lie; None where none are loaded.
        timeout: seconds that a client waits.
    """

    frontend: Frontend
    directory: Path | None
    timeout: float
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    _waiting: set[asyncio.Task[None]] = field(default_factory=set)
    _changing: asyncio.Task[None] | None = None

    @classmethod
    def of(cls, frontend: Frontend, section: ServerSection) -> AdapterDesk:
        """Make the desk of a server.

        Raises:
            ConfigError: there is no such directory.
        """
        directory = section.adapter_directory
        if directory is not None and not directory.is_dir():
            raise ConfigError(f"server.adapter_directory: no such directory: {shorten_path(directory)}")
        return cls(frontend, None if directory is None else directory.resolve(), section.request_timeout_s)

    async def load(self, name: str, path: str) -> None:
        """Load an adapter.

        Args:
            name: that requests will call it by.
            path: of its directory, in the one below which adapters lie, or from the root.

        Raises:
            Refusal: the name is taken or none, the path is not below the directory, too many wait, or a rank cannot
                load it.
        """
        found = self._find(path)
        if not 0 < len(name) <= _LONGEST_NAME or not name.isprintable() or name != name.strip():
            line = f"lora_name must be a line of 1 to {_LONGEST_NAME} characters, not {show_value(name)}"
            raise Refusal(Kind.INVALID, line, "lora_name")
        if name == self.frontend.model_name:
            line = f"the name {show_value(name)} is the model's own (server.model_name): give another name"
            raise Refusal(Kind.INVALID, line, "lora_name")
        if name in self.frontend.adapters:
            line = f"the name {show_value(name)} is taken: unload that adapter first, or give another name"
            raise Refusal(Kind.INVALID, line, "lora_name")
        await self._change(LoadAdapter(lora_name=name, path=str(found)))

    async def drop(self, name: str) -> None:
        """Forget an adapter; requests that have it go on.

        Raises:
            Refusal: there is none of that name.
        """
        self._check()
        if name not in self.frontend.adapters:
            known = nearest(name, self.frontend.adapters) if self.frontend.adapters else ""
            line = f"there is no adapter {show_value(name)}{known}"
            raise Refusal(Kind.UNKNOWN_MODEL, line, "lora_name", "model_not_found")
        await self._change(DropAdapter(lora_name=name))

    async def _change(self, change: AdapterChange) -> None:
        """Have the engine do it, once it is done with what was asked before. Who gives up while it waits is not waited
        for; a change that the engine is at goes on to its end, and counts as if its client had waited."""
        if len(self._waiting) >= _MOST_WAITING:
            line = f"{len(self._waiting)} changes of adapters wait for their turn: send the request again later"
            raise Refusal(Kind.BUSY, line, code="queue_full", retry_after=RETRY_SECONDS)
        task = asyncio.create_task(self._take_turn(change))
        self._waiting.add(task)
        task.add_done_callback(self._waiting.discard)
        try:
            async with asyncio.timeout(self.timeout):
                await asyncio.shield(task)
        except TimeoutError:
            if task is not self._changing:
                raise out_of_time(self.timeout) from None
            line = (
                f"the adapter was not there within {self.timeout:g} s (server.request_timeout_s), and is still loaded"
            )
            raise Refusal(Kind.TIMEOUT, f"{line}: /v1/models has it once it is", code="timeout") from None
        finally:
            if task is not self._changing:
                task.cancel()
            elif not task.done():
                task.add_done_callback(_take_result)

    async def _take_turn(self, change: AdapterChange) -> None:
        async with self._turn:
            task = asyncio.current_task()
            assert task is not None
            self._changing = task
            self._waiting.discard(task)
            await self.frontend.client.change_adapters(change)

    def _check(self) -> Path:
        if self.directory is None:
            raise Refusal(
                Kind.INVALID,
                "adapters are not loaded or unloaded here: set server.adapter_directory and server.api_key_file",
                code="unsupported_endpoint",
            )
        return self.directory

    def _find(self, path: str) -> Path:
        """The directory of an adapter, if it may be looked at."""
        directory = self._check()
        try:
            found = (directory / path).resolve()
            files = [(found / name).resolve() for name in (CONFIG_FILE, WEIGHTS_FILE)]
            is_below = all(file.is_relative_to(directory) for file in (found, *files))
            is_there = is_below and found != directory and found.is_dir()
        except (OSError, ValueError, RuntimeError):  # no path, or links in a circle
            is_there = False
        if not is_there:
            # What lies elsewhere is not told from what is nowhere.
            line = f"lora_path: there is no directory {show_value(path)} below server.adapter_directory"
            raise Refusal(Kind.INVALID, line, "lora_path")
        return found


def _take_result(task: asyncio.Task[None]) -> None:
    """Log the failure of a change whose client has gone: nobody else asks what came of it."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.info("a change of adapters, whose client had gone, came to nothing: %s", error)
