"""Processes that compile kernels side by side, into Triton's cache on disk, where whoever launches them finds them.

A kernel takes Triton up to four seconds, most of it on one core. The processes are programs of their own
(compile_worker.py), which hold no GPU. Several jobs and ranks may compile the same kernel at the same time: Triton puts
a finished file in its place in one step.

Triton 3.6 leaves out of a function's key what the functions that it calls take from their modules, unless their own
keys were asked for before. So a kernel had one key where another kernel was launched first, and another where it was
not, and was compiled twice: `settle_keys` makes them the same in every process.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

_PROGRAM = "trtrun.kernels.triton.compilation.compile_worker"
_PACKAGES = Path(__file__).resolve().parents[4]
END_SECONDS = 2.0


class CompileProcesses:
    """Some processes, and what they have been asked for."""

    def __init__(self, count: int, program: Sequence[str] = (sys.executable, "-m", _PROGRAM)) -> None:
        """Start `count` of them, or as many as can be; what is asked before they are ready waits.

        Raises:
            OSError: none can be started.
        """
        path = os.pathsep.join(filter(None, (str(_PACKAGES), os.environ.get("PYTHONPATH"))))
        self._processes: list[subprocess.Popen[str]] = []
        for _ in range(count):
            try:
                process = subprocess.Popen(
                    program,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
                    encoding="utf-8",
                )
            except OSError:
                if not self._processes:
                    raise
                break  # fewer will do
            self._processes.append(process)
        self._idle: queue.SimpleQueue[subprocess.Popen[str]] = queue.SimpleQueue()
        for process in self._processes:
            self._idle.put(process)
        self._threads = ThreadPoolExecutor(len(self._processes), thread_name_prefix="compile")
        self._asked: list[Future[bool]] = []

    def submit(self, request: Mapping[str, Any]) -> None:
        """Have a request compiled as soon as a process is free."""
        self._asked.append(self._threads.submit(self._compile, json.dumps(request)))

    def wait(self) -> int:
        """Wait for all that was asked for; how many kernels were compiled. Who launches the others compiles them."""
        wait(self._asked)
        return sum(asked.result() for asked in self._asked)

    def close(self) -> None:
        """End the processes, also those that are at work."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()
        self._threads.shutdown(cancel_futures=True)
        for process in self._processes:
            process.wait(END_SECONDS)
            for pipe in (process.stdin, process.stdout):
                _close(pipe)

    def _compile(self, request: str) -> bool:
        process = self._idle.get()
        try:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(request + "\n")
            process.stdin.flush()
            return process.stdout.readline() == "done\n"
        except OSError:  # it has ended
            return False
        finally:
            self._idle.put(process)


def _close(pipe: IO[str] | None) -> None:
    """Close a pipe whose other end may be gone with something unread in it."""
    if pipe is not None:
        with suppress(OSError):
            pipe.close()


def settle_keys(module: Mapping[str, Any]) -> None:
    """Ask for the keys of a module's functions in the order in which they stand there: what they call comes first. At
    the end of each module whose functions take constants from it."""
    for value in list(module.values()):
        if hasattr(type(value), "cache_key"):
            _ = value.cache_key
