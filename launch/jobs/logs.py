"""Where log lines go: each rank's to a file of its own and, as far as -v asks for them, to the terminal, in one format.

    2026-11-20T12:00:00.123 node1 rank 2 target INFO trtrun.rounds.round: message

What a user must read in any case is printed elsewhere, in plain lines that start with "trtrun: "; this is for what
helps when something went wrong. Modules log to the logger of their own name and know nothing of this one. It does not
know what they say.
"""

from __future__ import annotations

import logging
import os
import platform
import socket
import stat
import sys
import threading
from collections.abc import MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import TracebackType

from launch.jobs.mpi.hosts import is_placed
from launch.jobs.mpi.mpirun import TERMINAL_VARIABLE
from launch.jobs.placement.allocation import find_job
from parallel.mpi_rank import MpiRank
from parallel.topology import Topology
from trtrun import __version__
from trtrun.errors import ConfigError

FILE_ONLY = {"file_only": True}
"""`extra` of a log line that the user is told in other words: it goes to the rank's file, never to the terminal."""

PACKAGES = ("launch", "trtrun", "parallel")
LAUNCHER = "launcher"
FRONT = "front"

logger = logging.getLogger(__name__)
for _name in PACKAGES:
    # Where nothing is set up, lines are dropped; Python would print warnings in a format of its own.
    logging.getLogger(_name).addHandler(logging.NullHandler())


@dataclass(frozen=True)
class Speaker:
    """Whose lines these are.

    Attributes:
        host: the configuration's name of it, else this machine's own.
        role: such as "target" or "draft+target"; LAUNCHER for the process that starts mpirun, FRONT for a server's.
        rank: None for these two.
    """

    host: str
    role: str = LAUNCHER
    rank: int | None = None

    def __str__(self) -> str:
        return f"{self.host} {self.role}" if self.rank is None else f"{self.host} rank {self.rank} {self.role}"

    @property
    def file_name(self) -> str | None:
        """The process's log file in the log directory; the launcher has none."""
        if self.rank is None:
            return None if self.role == LAUNCHER else f"{self.role}-{self.host}.log"
        return f"rank-{self.rank:03d}-{self.role}-{self.host}.log"


def find_front() -> Speaker:
    """The front of a server: never a rank, and with a file of its own."""
    return Speaker(socket.gethostname(), FRONT)


def find_speaker(topology: Topology, mpi_rank: MpiRank | None) -> Speaker:
    """Who this process is: a rank, the launcher of several, or a job by itself.

    Args:
        topology: of the job.
        mpi_rank: this process's, as mpirun told it.
    """
    rank = mpi_rank.rank if mpi_rank is not None else 0
    # A job of one rank has a launcher too where that rank is on another host.
    if topology.world_size != (1 if mpi_rank is None else mpi_rank.size) or (mpi_rank is None and is_placed(topology)):
        return Speaker(socket.gethostname())  # also one of too few ranks, which are about to be refused
    return Speaker(topology.host(rank) or socket.gethostname(), "+".join(topology.roles(rank)), rank)


def quiet_libraries(verbosity: int, environment: MutableMapping[str, str] | None = None) -> None:
    """Keep off the terminal what libraries say on their own, unless the user has set otherwise. Before torch's import.

    Args:
        verbosity: number of -v: 0 keeps everything off, 1 lets warnings pass, 2 opens all.
        environment: default os.environ.
    """
    values = os.environ if environment is None else environment
    if verbosity == 0:
        for name, value in {
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            "TRANSFORMERS_VERBOSITY": "error",
            "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "GRPC_VERBOSITY": "NONE",  # what strangers send to its port would be lines there
        }.items():
            values.setdefault(name, value)
    values.setdefault("NCCL_DEBUG", "INFO" if verbosity > 1 else "WARN")
    if not stat.S_ISREG(os.fstat(2).st_mode):  # NCCL would empty a file
        values.setdefault("NCCL_DEBUG_FILE", "/dev/stderr")  # its default is stdout, where rows may be
    if not sys.warnoptions:
        logging.captureWarnings(True)


def set_up_logging(speaker: Speaker, verbosity: int = 0, directory: Path | None = None) -> None:
    """Send this process's log lines to the terminal and to its file. What an earlier call set up ends.

    The terminal gets warnings, with one -v information, with two everything; of libraries errors, warnings,
    everything; and tracebacks, where there is no file to have them. The file gets information and libraries' warnings,
    with -vv everything. It is appended to: a job that goes on writes behind what it wrote before.

    Args:
        speaker: this process.
        verbosity: number of -v.
        directory: of the files, made if it is missing; None keeps none. The launcher has no file.

    Raises:
        ConfigError: the file cannot be written.
    """
    root = logging.getLogger()
    for old in [handler for handler in root.handlers if isinstance(handler, _TerminalHandler | _FileHandler)]:
        root.removeHandler(old)
        old.close()
    has_file = directory is not None and speaker.file_name is not None
    handlers: list[logging.Handler] = [_TerminalHandler(speaker, verbosity, keeps_traces=not has_file)]
    if directory is not None:
        _make_directory(directory)
        if speaker.file_name is not None:
            handlers.append(_FileHandler(speaker, verbosity, directory / speaker.file_name))
    for handler in handlers:
        root.addHandler(handler)
    root.setLevel(min(handler.level for handler in handlers))
    _hook_exceptions()
    job = find_job(os.environ)
    where = "" if job is None else f", {job[0]} job {job[1]}"
    logger.info(
        "started: trtrun %s, Python %s, process %d%s", __version__, platform.python_version(), os.getpid(), where
    )


class _Format(logging.Formatter):
    """One line a record; in files what does not fit into it follows with spaces before it. On a terminal so does a
    traceback that no file keeps."""

    def __init__(self, speaker: Speaker, keeps_lines: bool, keeps_traces: bool = True) -> None:
        super().__init__()
        self._speaker = speaker
        self._keeps_lines = keeps_lines
        self._keeps_traces = keeps_traces

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created).isoformat(timespec="milliseconds")
        head = f"{time} {self._speaker} {record.levelname} {record.name}: "
        message = record.getMessage()
        lines = (message.splitlines() if self._keeps_lines else [" ".join(message.split())]) or [""]
        if record.exc_info and self._keeps_traces:
            lines += self.formatException(record.exc_info).splitlines()
        if record.stack_info and self._keeps_lines:
            lines += record.stack_info.splitlines()
        return head + "\n    ".join(lines)


class _Filter(logging.Filter):
    """Lets lines of trtrun pass from one level on, and lines of libraries from another."""

    def __init__(self, own: int, others: int) -> None:
        super().__init__()
        self._own = own
        self._others = others

    def filter(self, record: logging.LogRecord) -> bool:
        is_own = record.name.partition(".")[0] in PACKAGES
        return record.levelno >= (self._own if is_own else self._others)


class _TerminalHandler(logging.Handler):
    """The user's terminal, or what stands for it: standard error."""

    def __init__(self, speaker: Speaker, verbosity: int, keeps_traces: bool) -> None:
        own = (logging.WARNING, logging.INFO, logging.DEBUG)[min(verbosity, 2)]
        others = (logging.ERROR, logging.WARNING, logging.DEBUG)[min(verbosity, 2)]
        super().__init__(min(own, others))
        self.addFilter(_Filter(own, others))
        self.setFormatter(_Format(speaker, keeps_lines=False, keeps_traces=keeps_traces))

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "file_only", False):
            return
        # A progress bar may stand in the line: it is wiped away, and drawn again below.
        is_terminal = TERMINAL_VARIABLE in os.environ or sys.stderr.isatty()
        with suppress(OSError, ValueError):
            sys.stderr.write(("\r\033[K" if is_terminal else "") + self.format(record) + "\n")
            sys.stderr.flush()


class _FileHandler(logging.FileHandler):
    """The process's own file; each line is written at once."""

    def __init__(self, speaker: Speaker, verbosity: int, path: Path) -> None:
        try:
            super().__init__(path, encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            raise _refuse(path, error) from None
        own = logging.DEBUG if verbosity > 1 else logging.INFO
        others = logging.DEBUG if verbosity > 1 else logging.WARNING
        self.setLevel(min(own, others))
        self.addFilter(_Filter(own, others))
        self.setFormatter(_Format(speaker, keeps_lines=True))

    def handleError(self, record: logging.LogRecord) -> None:
        """A disk that is full must neither end the job nor fill the terminal."""


def _make_directory(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _refuse(directory, error) from None
    if not os.access(directory, os.W_OK | os.X_OK):
        raise _refuse(directory, PermissionError(13, os.strerror(13)))


def _refuse(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"the log directory cannot be used: {path}: {error.strerror or error}; name another with --log-dir or "
        "launch.log_directory"
    )


def _hook_exceptions() -> None:
    """Log what nothing catches, in any thread; Python prints it afterwards, as ever."""

    def log(
        kind: type[BaseException], error: BaseException | None, trace: TracebackType | None, where: str = ""
    ) -> None:
        if error is not None and not issubclass(kind, KeyboardInterrupt | SystemExit):
            logger.critical("an exception%s that nothing caught", where, exc_info=(kind, error, trace), extra=FILE_ONLY)

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        log(kind, error, trace)
        sys.__excepthook__(kind, error, trace)

    def hook_thread(arguments: threading.ExceptHookArgs) -> None:
        name = arguments.thread.name if arguments.thread is not None else "?"
        log(arguments.exc_type, arguments.exc_value, arguments.exc_traceback, f" in thread {name}")
        threading.__excepthook__(arguments)

    sys.excepthook = hook
    threading.excepthook = hook_thread
