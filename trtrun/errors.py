"""Errors that a user can cause or must see: every message is one line that says what is wrong and what to do.

The command line prints the message of a `TrtrunError` without a traceback. Anything else is a defect and keeps its
traceback. This module knows no other module.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import ContextDecorator, contextmanager
from pathlib import Path
from types import TracebackType


class TrtrunError(Exception):
    """Base of all errors whose message is meant for the user, as one line."""


class ConfigError(TrtrunError):
    """The YAML file, a `--set` option or a device list is wrong."""


class CheckpointError(TrtrunError):
    """A model directory is missing something, damaged, or of a kind that is not supported."""


class PlacementError(TrtrunError):
    """The number of ranks or the device lists do not fit together."""


class InvalidRequestError(TrtrunError):
    """One request has a wrong parameter, or is longer than the engines can ever hold. Other requests go on."""


class InvalidFieldError(InvalidRequestError):
    """A field of a request is wrong, told by its name, too.

    Attributes:
        field: its name.
        code: a word for programs; None where the line says it all.
    """

    def __init__(self, field: str, line: str, code: str | None = None) -> None:
        super().__init__(line)
        self.field = field
        self.code = code


class PromptTooLongError(InvalidRequestError):
    """A prompt has more tokens than can ever be held."""


class StartError(TrtrunError):
    """A rank could not start, for a reason that the user can mend; the message is the rank's own."""


class LibraryPanicError(TrtrunError):
    """A library that is written in Rust gave up in the middle of a call; what was asked of it is not done."""


class RustLibrary(ContextDecorator):
    """Calls of a library that is written in Rust, as a `with` block or around a function: its panics are errors.

    What pyo3 makes of a panic is no `Exception`, so that code which is ready for every error lets it pass, and threads,
    tasks and whole processes end by it. Nothing else is taken up: KeyboardInterrupt and SystemExit go on.
    """

    def __init__(self, name: str) -> None:
        """Take the library's name, for messages."""
        self._name = name

    def __enter__(self) -> None:
        """Nothing is to be done."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Raise a LibraryPanicError in place of a panic."""
        # Each library has a class of its own, which cannot be imported.
        if kind is not None and (kind.__module__, kind.__name__) == ("pyo3_runtime", "PanicException"):
            raise LibraryPanicError(f"the library {self._name} panicked: {_one_line(str(error), 200)}") from None


class QueueFullError(InvalidRequestError):
    """The queue holds as many requests as may wait; the same request is welcome later."""


class RankFailedError(TrtrunError):
    """A rank of the job failed; the message names role, rank and cause. Its notes, if any, are the ranks' stacks.

    The job is of no use afterwards: its other ranks hang where the failed one left them, and end with this process,
    whose exit status is not 0 then.
    """


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ` (did you mean 'x'?)` for the known name nearest to `name`, or a list of the known names."""
    choices = sorted(known)
    match = difflib.get_close_matches(name[:100], choices, n=1, cutoff=0.5)
    return f" (did you mean '{match[0]}'?)" if match else f" (known: {', '.join(choices)})"


MOST_SHOWN = 300
"""Characters of a path or key in messages."""


def shorten(value: object, most: int = 100) -> str:
    """A value for a message: its repr in one line, cut where it is longer than `most` characters."""
    return _one_line(repr(value), most)


def one_line(error: Exception, most: int = 200) -> str:
    """What an error of a library says, for a message: in one line, cut where it is longer than `most` characters."""
    return _one_line(str(error), most)


def why_unreadable(error: Exception) -> str:
    """Why a file or a server cannot be read, for a message that names it; empty where the error says nothing."""
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.start + 1} is not valid UTF-8"
    if isinstance(error, RecursionError):
        return "lists or objects are nested too deeply"
    return (error.strerror if isinstance(error, OSError) else None) or one_line(error)


def _one_line(text: str, most: int) -> str:
    text = " ".join(text.split())
    return text if len(text) <= most else f"{text[: most - 1]}…"


def name_section(section: str, message: object) -> str:
    """What is said of a section of the configuration, with its name in front, unless it begins with it or its key."""
    return str(message) if str(message).startswith((f"{section}:", f"{section}.")) else f"{section}: {message}"


def shorten_path(path: Path) -> str:
    """A path for a message: in one line, without its middle where it is long."""
    text = str(path) if str(path).isprintable() else repr(str(path))
    return text if len(text) <= MOST_SHOWN else f"{text[: MOST_SHOWN // 2]}…{text[-MOST_SHOWN // 2 :]}"


@contextmanager
def wrap_errors(file: object, error: type[TrtrunError]) -> Iterator[None]:
    """Everything that goes wrong while a user's file is read becomes one line with the file's name.

    The mistakes that users make have messages of their own and pass through; this is for those that nobody thought of.

    Args:
        file: what is read, for the message.
        error: class of the error that is raised in place of an unexpected one.
    """
    try:
        yield
    except LibraryPanicError as panic:
        raise error(f"{file} cannot be used: {panic}") from None
    except TrtrunError:
        raise
    except RecursionError:
        raise error(f"{file}: what stands in it is nested too deeply") from None
    except OSError as problem:
        raise error(f"{file} cannot be read: {problem.strerror or shorten(str(problem))}") from None
    except Exception as problem:
        raise error(f"{file} cannot be used: {type(problem).__name__}: {one_line(problem)}") from problem
