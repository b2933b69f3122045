"""A run that keeps its rows can be asked to end early, and this is how a process hears that.

SIGINT, SIGTERM and SIGUSR1 (Slurm's warning before the time limit) ask for a drain: no more prompts are begun, those in
flight may finish for a while, the rest is left for --resume. Who hears depends on how the job was started:

- the parent of mpirun while it checks the job; from then on `supervise` hears for it, and writes a line to mpirun's
  standard input, which mpirun hands to rank 0. The line waits there until rank 0 is up, so a rank that is only starting
  is never hit by a signal that it cannot handle yet;
- rank 0 under such a parent reads these lines;
- rank 0 of a user's own mpirun, and the process of a job without ranks, take the signals themselves;
- other ranks leave it to rank 0.

While nothing runs yet the order interrupts the process with `EndedAtStart`; later it is only noted, and rank 0 asks
for `seconds_left` before every round. This module knows neither rows nor rounds, and imports nothing heavy: signals
must be heard from the first moment on.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from launch.exit_codes import ExitCode, status_of_signal
from parallel.mpi_rank import find_mpi_rank

CONTROL_VARIABLE = "TRTRUN_CONTROL"
"""Set to "stdin" for ranks whose parent writes its orders to rank 0's standard input."""

DRAIN_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
DRAIN_ORDER = "drain"


def end_signals() -> tuple[signal.Signals, ...]:
    """Signals that ask this process to end. SIGHUP, of a closed terminal, is one unless nohup has it ignored."""
    is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return DRAIN_SIGNALS if is_ignored else (*DRAIN_SIGNALS, signal.SIGHUP)


class EndedAtStart(BaseException):
    """The order to drain came before anything ran. No Exception: nothing on the way may take it for an error."""


class Drain:
    """Whether this process's run was asked to end early.

    Attributes:
        cause: name of the signal that asked, None while nobody has.
        has_interrupted: whether the order came before anything ran.
    """

    def __init__(self) -> None:
        self.cause: str | None = None
        self.has_interrupted = False
        self._heard_at = 0.0
        self._is_running = False
        self._is_announced = False
        self._cause_of_order: str | None = None
        self._launcher = os.getppid()
        self._main_thread = threading.get_ident()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Hear the orders that are meant for this process, in its main thread.

        Raises:
            EndedAtStart: anywhere inside, when the order comes before `start_running`.
        """
        place = find_mpi_rank()
        before = {number: signal.getsignal(number) for number in DRAIN_SIGNALS}
        if place is not None and place.rank != 0:
            # What is sent to all processes of a job must not end a rank that rank 0 still needs. SIGTERM does end it:
            # that is how mpirun ends a job in which another rank has failed.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        elif place is not None and os.environ.get(CONTROL_VARIABLE) == "stdin":
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGUSR1, self._hear)
            threading.Thread(target=self._read_orders, name="drain orders", daemon=True).start()
        else:
            for number in DRAIN_SIGNALS:
                signal.signal(number, self._hear)
        try:
            with self.starting():
                yield
        finally:
            for number, handler in before.items():
                # A warning that comes when all is done has nothing to end any more.
                signal.signal(number, signal.SIG_IGN if number == signal.SIGUSR1 else handler or signal.SIG_DFL)

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Around what an order may interrupt.

        Raises:
            EndedAtStart: for any error that comes out after an order: native code on the way (safetensors reading a
                tensor, pydantic making a class while it is imported) may put an error of its own in the place of what
                the signal raised inside it.
        """
        try:
            yield
        except Exception as error:
            if self.has_interrupted and not self._is_running:
                raise EndedAtStart from error
            raise

    def start_running(self) -> None:
        """From here on an order is noted and no longer interrupts."""
        self._is_running = True

    def seconds_left(self, drain_seconds: float) -> float | None:
        """Seconds that rows in flight may still take; None when nobody has asked for an early end.

        Args:
            drain_seconds: how long they may take in all. The first answer that is a number is told to the user.
        """
        if self.cause is None:
            return None
        if not self._is_announced:
            self._is_announced = True
            print(
                f"trtrun: {self.cause}: no more prompts are begun, those in flight have {drain_seconds:g} s; "
                "a second SIGINT or SIGTERM ends at once",
                file=sys.stderr,
                flush=True,
            )
        return self._heard_at + drain_seconds - time.monotonic()

    def _hear(self, number: int, frame: FrameType | None) -> None:
        place = find_mpi_rank()
        if number == signal.SIGTERM and place is not None and os.getppid() != self._launcher:
            os._exit(status_of_signal(number))  # the launcher is dead: this is `ending_with_parent`, not a user
        if self.cause is None:
            self.cause = self._cause_of_order or signal.Signals(number).name
            self._heard_at = time.monotonic()
            if not self._is_running:
                self.has_interrupted = True
                raise EndedAtStart
        elif number != signal.SIGUSR1:
            end_at_once(number)

    def _read_orders(self) -> None:
        """Read rank 0's standard input to its end; lines that are no order are passed over."""
        text = b""
        with suppress(OSError):
            # Not sys.stdin: a thread that waits inside it when Python ends is a fatal error.
            while data := os.read(0, 4096):
                *lines, text = (text + data).split(b"\n")
                for line in lines:
                    words = line.decode(errors="replace").split()
                    if words[:1] == [DRAIN_ORDER]:
                        self._cause_of_order = words[1] if len(words) > 1 else None
                        # As a signal it reaches the main thread even where that sleeps in a system call.
                        signal.pthread_kill(self._main_thread, signal.SIGUSR1)


def write_order(descriptor: int, number: int) -> None:
    """Write the order to drain because of signal `number` to mpirun's standard input; nothing where mpirun is gone."""
    with suppress(OSError):
        os.write(descriptor, f"{DRAIN_ORDER} {signal.Signals(number).name}\n".encode())


def leave_starting_ranks() -> None:
    """End this process with status DRAINED if it is a rank: the launcher then ends the others.

    Neither MPI's end, which waits for ranks that may load for minutes, nor its abort: MPI itself may have been
    interrupted while it started.
    """
    if find_mpi_rank() is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(ExitCode.DRAINED)


def end_at_once(number: int) -> None:
    """End this process with the status of a signal. Finished rows are in the output's working file already."""
    with suppress(OSError):  # such as a terminal that is closed
        os.write(2, f"trtrun: ended by {signal.Signals(number).name}\n".encode())
    os._exit(status_of_signal(number))


@contextmanager
def ending_at_once() -> Iterator[None]:
    """For runs that keep no rows: SIGUSR1 ends the process as SIGTERM does, but with a line from rank 0."""
    place = find_mpi_rank()
    if place is not None and place.rank != 0:
        yield
        return
    before = signal.signal(signal.SIGUSR1, lambda number, frame: end_at_once(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)
