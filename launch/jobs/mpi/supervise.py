"""Runs mpirun as a child and answers for it: signals reach it, its prose does not reach the user, nothing stays behind.

It does not know what the job does, beyond whether it can drain (see drain.py). The job runs in a session of its own, so
that Ctrl-C reaches this process alone, and so that every process of the job can be found by its session when it has to
end.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

from launch.exit_codes import ExitCode, status_of_signal
from launch.jobs.mpi.drain import CONTROL_VARIABLE, DRAIN_SIGNALS, end_signals, write_order
from launch.jobs.mpi.host_folders import describe_lacks, remove_folder_of
from launch.jobs.mpi.host_ports import HostPorts
from launch.jobs.mpi.output_filter import OutputFilter, RankEnds
from launch.jobs.mpi.processes import clear_session, ending_with_parent, kill_session
from launch.jobs.mpi.start_progress import VARIABLE as STEPS_VARIABLE
from launch.jobs.mpi.start_progress import StartWatch

GRACE_SECONDS = 5.0
"""How long mpirun may take to end its ranks after a signal, before all are killed."""

DRAIN_GRACE_SECONDS = 20.0
"""How long the ranks may take to end beyond the time that they have for a drain, before all are killed."""

FAILED_GRACE_SECONDS = 10.0
"""How long the job may go on once a rank has said that it ends it: mpirun waits for ever for a host that is cut off."""

ENDED_GRACE_SECONDS = 0.5
"""The same for a job in which a rank that it needs has ended, and mpirun ends nobody else: time for its last words."""

OVER_GRACE_SECONDS = 5.0
"""The same for a job that can do without some ranks, once rank 0 is done: mpirun waits for ever for a host of these
that is cut off."""

STUCK_GRACE_SECONDS = 2.0
"""The same for a job in which a rank is stuck."""

PAUSE_SECONDS = 0.25
"""Text held back as a possible box of mpirun's is shown after this long without more of it."""

LOST_HOST_STATUSES = (0, 255)
"""With what mpirun ends when a host is cut off: of itself, or because ssh has given the connection up."""


def supervise(
    command: Sequence[str],
    environment: Mapping[str, str],
    output: OutputFilter,
    drain_seconds: float | None = None,
    steps: StartWatch | None = None,
    is_on_this_host: bool = False,
) -> int:
    """Run the command until it ends; return an exit status (see exit_codes.py).

    The ranks' stdout passes unchanged, their stderr through a filter of mpirun's boilerplate. SIGINT, SIGTERM, SIGUSR1
    and SIGHUP end the whole job; so do the death of this process and the end of whoever reads its output. A job that
    can drain is asked for that by the first SIGINT, SIGTERM or SIGUSR1; a SIGINT or SIGTERM after it ends the job.

    Args:
        command: mpirun and its arguments.
        environment: of mpirun and the ranks.
        output: what becomes of the ranks' and mpirun's words. Where mpirun goes on without ranks that end, it knows
            which of them end the job all the same.
        drain_seconds: how long a drain may take; None for a job that cannot drain.
        steps: names the ranks that are stuck on their way to work, and for them the job ends; None where ranks tell no
            steps.
        is_on_this_host: whether nobody on another host has to reach mpirun or the ranks.
    """
    values = {name: value for name, value in environment.items() if name not in (CONTROL_VARIABLE, STEPS_VARIABLE)}
    if steps is not None:
        values[STEPS_VARIABLE] = "1"
    orders = _Orders(drain_seconds)
    with orders.heard():
        process = subprocess.Popen(
            ending_with_parent(command),
            env=values if drain_seconds is None else {**values, CONTROL_VARIABLE: "stdin"},
            stdin=subprocess.DEVNULL if drain_seconds is None else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            orders.follow(process)
            _pump(process, output, orders, steps, HostPorts(process.pid) if is_on_this_host else None)
        except BrokenPipeError:  # the reader of our output is gone, as in `trtrun run … | head`
            orders.ended_by = signal.SIGPIPE
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=GRACE_SECONDS)
        finally:
            is_overdue = process.poll() is None
            clear_session(process.pid)  # mpirun is gone, or the loop failed: no rank may stay
            process.wait()
            remove_folder_of(process.pid, environment)
    with suppress(BrokenPipeError):
        _pass_on(output.flush_output())
    statuses = {process.returncode, output.fatal_end.status if output.fatal_end is not None else None}
    output.is_expected |= orders.drained_by is not None and ExitCode.DRAINED in statuses
    _show(output.finish())
    if steps is not None and steps.is_given_up:
        return ExitCode.FAILED
    status = process.returncode
    if output.ends is not None:
        status = _status_by_ends(status, output.ends, steps.status if steps is not None else None)
    status = _tell_end(status, output, orders, is_overdue)
    if orders.ended_by is None and (status == ExitCode.FAILED or status not in list(ExitCode)):
        for line in describe_lacks(environment):
            _show(f"trtrun: {line}\n")
    return status


class _Orders:
    """The signals that this process was sent, and what they do to the job.

    Args:
        drain_seconds: see `supervise`.

    Attributes:
        drained_by: signal number that asked for a drain, or None.
        ended_by: signal number that ended the job, or None.
    """

    def __init__(self, drain_seconds: float | None) -> None:
        self.drained_by: int | None = None
        self.ended_by: int | None = None
        self._drain_seconds = drain_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._deadline: float | None = None

    @property
    def is_overdue(self) -> bool:
        """Whether the job should have followed an order by now."""
        return self._deadline is not None and time.monotonic() > self._deadline

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Take the signals that ask this process to end."""
        before = {number: signal.signal(number, self._hear) for number in end_signals()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def follow(self, process: subprocess.Popen[bytes]) -> None:
        """The job is there: orders reach it from now on, and those that came before it."""
        self._process = process
        if self.ended_by is not None:
            self._end()
        elif self.drained_by is not None:
            self._drain(self.drained_by)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        can_drain = self._drain_seconds is not None and number in DRAIN_SIGNALS
        if self.ended_by is not None or (self.drained_by is not None and number in (signal.SIGINT, signal.SIGTERM)):
            self.ended_by = self.ended_by or number
            if self._process is not None:  # asked twice: no more grace
                kill_session(self._process.pid)
        elif not can_drain:
            self.ended_by = number
            self._end()
        elif self.drained_by is None:
            self.drained_by = number
            self._drain(number)

    def _end(self) -> None:
        self._deadline = time.monotonic() + GRACE_SECONDS
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)

    def _drain(self, number: int) -> None:
        assert self._drain_seconds is not None
        self._deadline = time.monotonic() + self._drain_seconds + DRAIN_GRACE_SECONDS
        if self._process is not None and self._process.stdin is not None:
            write_order(self._process.stdin.fileno(), number)


def _tell_end(status: int, output: OutputFilter, orders: _Orders, is_overdue: bool) -> int:
    """Say how the job ended where nobody has said it; return the exit status."""
    if orders.ended_by is not None:
        if orders.ended_by != signal.SIGPIPE:
            _show(f"trtrun: ended by {signal.Signals(orders.ended_by).name}; all ranks are stopped\n")
        return status_of_signal(orders.ended_by)
    if orders.drained_by is not None and is_overdue:
        name = signal.Signals(orders.drained_by).name
        _show(f"trtrun: the ranks did not drain in time after {name} and were killed; --resume goes on with the rest\n")
        return ExitCode.DRAINED
    if output.killed:
        return status_of_signal(output.killed[0][1])
    if output.has_failed and (is_overdue or status in LOST_HOST_STATUSES):
        return ExitCode.FAILED
    if status < 0:
        _show(f"trtrun: mpirun was killed by signal {-status}; all ranks are stopped\n")
        return status_of_signal(-status)
    if status and not output.said_something:
        _show(f"trtrun: a rank ended with exit code {status} and said nothing\n")
    return status


def _status_by_ends(status: int, ends: RankEnds, told: int | None) -> int:
    """The exit status of a job whose mpirun goes on without ranks, and has this one itself; `told` is rank 0's."""
    if ends.fatal is not None:
        return ends.fatal.status
    if told is not None:  # mpirun may have been ended
        return told
    return 0 if status in {end.status for end in ends.forgiven} else status


def _pump(
    process: subprocess.Popen[bytes],
    output: OutputFilter,
    orders: _Orders,
    steps: StartWatch | None,
    ports: HostPorts | None,
) -> None:
    """Carry both outputs to the user until mpirun ends, or is overdue, or a rank is stuck.

    Raises:
        BrokenPipeError: nobody reads this process's standard output any more.
    """
    assert process.stdout is not None and process.stderr is not None
    failed_deadline = ended_deadline = float("inf")

    def is_overdue() -> bool:
        nonlocal failed_deadline
        if output.has_failed:
            failed_deadline = min(failed_deadline, time.monotonic() + FAILED_GRACE_SECONDS)
        return orders.is_overdue or time.monotonic() > failed_deadline

    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        selector.register(process.stderr, selectors.EVENT_READ)
        while selector.get_map():
            if is_overdue():
                return
            if steps is not None and (stuck := steps.give_up()):
                _end_rest(process, output, "".join(f"trtrun: {line}\n" for line in stuck))
                return
            if output.fatal_end is not None:
                grace = 0.0 if output.killed else ENDED_GRACE_SECONDS
                ended_deadline = min(ended_deadline, time.monotonic() + grace)
            elif output.ends is not None and steps is not None and steps.status is not None:
                ended_deadline = min(ended_deadline, time.monotonic() + OVER_GRACE_SECONDS)
            if time.monotonic() >= ended_deadline:
                _end_rest(process, output)
                return
            if ports is not None:
                ports.tend(all_are_there=steps is not None and steps.all_are_done)
            ready = selector.select(timeout=PAUSE_SECONDS)
            for key, _ in ready:
                data = os.read(key.fd, 65536)
                if not data:
                    selector.unregister(key.fileobj)
                elif key.fileobj is process.stdout:
                    _pass_on(output.feed_output(data))
                else:
                    _show(_filter(data.decode(errors="replace"), output, steps))
            output.is_expected = orders.ended_by is not None
            if not ready:
                _pass_on(output.flush_output())
                _show(output.flush())
                if process.poll() is not None:  # a stray child may hold the pipes open for ever
                    return
    while process.poll() is None and not is_overdue():
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=PAUSE_SECONDS)


def _filter(text: str, output: OutputFilter, steps: StartWatch | None) -> str:
    """What of a piece of stderr is for the user."""
    if steps is not None:
        text = steps.feed(text)
        if output.ends is not None:
            output.ends.expendable = steps.expendable
    return output.feed(text)


def _end_rest(process: subprocess.Popen[bytes], output: OutputFilter, news: str = "") -> None:
    """End a job that does not end by itself, after some last news."""
    _show(output.flush() + news)
    output.is_expected = True
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=STUCK_GRACE_SECONDS)


def _pass_on(data: bytes) -> None:
    """Write what the ranks wrote to stdout."""
    if data:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()


def _show(text: str) -> None:
    if text:
        with suppress(BrokenPipeError):
            sys.stderr.write(text)
            sys.stderr.flush()
