"""Runs mpirun as a child and answers for it: signals reach it, its noise does not reach the user, nothing stays behind.

It does not know what the job does. The job runs in a session of its own, so that Ctrl-C reaches this process alone, and
so that every process of the job can be found by its session when it has to end.
"""

from __future__ import annotations

import ctypes
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from launch.noise import NoiseFilter

GRACE_SECONDS = 5.0
"""How long mpirun may take to end its ranks after a signal, before all are killed."""

PAUSE_SECONDS = 0.25
"""Text held back as a possible box of mpirun's is shown after this long without more of it."""

_PR_SET_PDEATHSIG = 1


def supervise(command: Sequence[str], environment: Mapping[str, str], describe: Callable[[int], str]) -> int:
    """Run the command until it ends; return an exit status in the shell's way (128 + N after signal N).

    The ranks' stdout passes unchanged, their stderr through a filter of mpirun's boilerplate. SIGINT, SIGTERM and
    SIGHUP end the whole job; so do the death of this process and the end of whoever reads its output.

    Args:
        command: mpirun and its arguments.
        environment: of mpirun and the ranks.
        describe: names a rank in messages.
    """
    noise = NoiseFilter(describe)
    process = subprocess.Popen(
        list(command),
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=_end_with_parent,
    )
    with _forwarded_signals(process) as received:
        try:
            _pump(process, noise, received)
        except BrokenPipeError:  # the reader of our output is gone, as in `trtrun run … | head`
            received.append(signal.SIGPIPE)
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=GRACE_SECONDS)
        finally:
            _kill_session(process.pid)  # mpirun is gone, or the loop failed: no rank may stay
            process.wait()
    _show(noise.flush())
    return _tell_end(process.returncode, noise, received)


def _tell_end(status: int, noise: NoiseFilter, received: Sequence[int]) -> int:
    """Say how the job ended where nobody has said it; return the exit status."""
    if received:
        if received[0] != signal.SIGPIPE:
            _show(f"trtrun: ended by {signal.Signals(received[0]).name}; all ranks are stopped\n")
        return 128 + received[0]
    if noise.killed:
        return 128 + noise.killed[0][1]
    if status < 0:
        _show(f"trtrun: mpirun was killed by signal {-status}; all ranks are stopped\n")
        return 128 - status
    if status and not noise.said_something:
        _show(f"trtrun: a rank ended with exit code {status} and said nothing\n")
    return status


def _pump(process: subprocess.Popen[bytes], noise: NoiseFilter, received: list[int]) -> None:
    """Carry both outputs to the user until mpirun ends.

    Raises:
        BrokenPipeError: nobody reads this process's standard output any more.
    """
    assert process.stdout is not None and process.stderr is not None
    deadline: float | None = None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        selector.register(process.stderr, selectors.EVENT_READ)
        while selector.get_map():
            if received and deadline is None:
                deadline = time.monotonic() + GRACE_SECONDS
            if deadline is not None and time.monotonic() > deadline:
                return
            ready = selector.select(timeout=PAUSE_SECONDS)
            for key, _ in ready:
                data = os.read(key.fd, 65536)
                if not data:
                    selector.unregister(key.fileobj)
                elif key.fileobj is process.stdout:
                    sys.stdout.buffer.write(data)
                    sys.stdout.buffer.flush()
                else:
                    _show(noise.feed(data.decode(errors="replace")))
            if not ready:
                _show(noise.flush())
                if process.poll() is not None:  # a stray child may hold the pipes open for ever
                    return
    while process.poll() is None and (deadline is None or time.monotonic() < deadline):
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=PAUSE_SECONDS)
        if received and deadline is None:
            deadline = time.monotonic() + GRACE_SECONDS


@contextmanager
def _forwarded_signals(process: subprocess.Popen[bytes]) -> Iterator[list[int]]:
    """Turn the signals that ask this process to end into the end of the job; yields the signals received."""
    received: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if len(received) > 1:  # asked twice: no more grace
            _kill_session(process.pid)
        else:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, forward) for number in numbers}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end_with_parent() -> None:
    """In the child, before mpirun starts: ask the kernel to end it when this process dies, even by SIGKILL."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _kill_session(session: int) -> None:
    """Kill every process of a session: mpirun gives each rank a process group of its own, but the same session."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            # pid (name) state parent group session …; the name may hold spaces and parentheses.
            fields = (entry / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            with suppress(ProcessLookupError, PermissionError):
                os.kill(int(entry.name), signal.SIGKILL)


def _show(text: str) -> None:
    if text:
        with suppress(BrokenPipeError):
            sys.stderr.write(text)
            sys.stderr.flush()
