"""The exit statuses of every trtrun command, in one place.

A batch script goes by them: 3 means "run it again with --resume". This module knows no other module of the package.
"""

from __future__ import annotations

from enum import IntEnum

from trtrun.errors import TrtrunError


class ExitCode(IntEnum):
    """How a command ended, where no signal ended it (see `status_of_signal`)."""

    DONE = 0
    """All that was asked for is done."""

    FAILED = 1
    """It had begun and could not go on: a defect, a rank that failed, a disk that is full."""

    REFUSED = 2
    """Nothing ran: the command line, the configuration, a model or the input is wrong, and one line says what."""

    DRAINED = 3
    """A signal asked for an early end and rows are left; the same command with --resume runs them."""

    ROWS_REFUSED = 4
    """All rows are done, but some were refused; the `error` of their output rows says why."""


MEANINGS = {
    ExitCode.DONE: "done",
    ExitCode.FAILED: "failed: a defect, a rank that failed, an output that cannot be written any more",
    ExitCode.REFUSED: "refused before it began: one line says what is wrong",
    ExitCode.DRAINED: "drained: a signal asked for an early end, and --resume runs the rows that are left",
    ExitCode.ROWS_REFUSED: "done, but some rows were refused: their `error` says why",
}
"""A few words for each, for --help."""

SIGNAL_MEANING = "ended at once by signal N, as 137 for a rank that was killed"


class FailedError(TrtrunError):
    """A command that had begun cannot go on, and one line says why: its exit status is `FAILED`, not `REFUSED`."""


def status_of_signal(number: int) -> int:
    """The exit status after the end by a signal, as shells count it."""
    return 128 + number


def describe_exit_codes() -> str:
    """One line for all statuses, for --help."""
    codes = [f"{int(code)} {meaning}" for code, meaning in MEANINGS.items()]
    return "; ".join([*codes, f"128+N {SIGNAL_MEANING}"]) + "."
