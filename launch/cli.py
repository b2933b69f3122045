"""The command `trtrun`: its subcommands, and how errors become one line and an exit status."""

from __future__ import annotations

import errno
import gc
import io
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NoReturn

import click

from launch.commands.batch_jobs import cancel, status, submit
from launch.commands.bench import bench
from launch.commands.demo import demo
from launch.commands.init import init
from launch.commands.inspect_job import check, plan
from launch.commands.run import generate_data, merge, run, warm_up
from launch.commands.serve import chat, serve, serve_engine
from launch.commands.train_drafter import train_drafter
from launch.commands.write_models import build, convert, quantize
from launch.exit_codes import ExitCode, FailedError, describe_exit_codes, status_of_signal
from launch.jobs.logs import FILE_ONLY
from launch.jobs.mpi.start_progress import StartProgress, say_hello
from parallel import abort
from parallel.errors import ParallelError
from trtrun import __version__
from trtrun.errors import RankFailedError, TrtrunError

MOST_UNCOLLECTED = 100_000
"""Objects that may come into being between two of Python's garbage collections. By default it is some hundreds, and
collections take a sixth of the time that torch takes to import."""

logger = logging.getLogger("launch.cli")  # as a program this module has another name


@click.group(
    epilog=f"Exit status: {describe_exit_codes()}",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="trtrun")
def cli() -> None:
    """Lossless speculative decoding of large language models over MPI."""


for _command in (
    *(demo, init, run, chat, serve, serve_engine, merge, plan, check, warm_up, submit, status, cancel, bench),
    *(generate_data, train_drafter, quantize, convert, build),
):
    cli.add_command(_command)


def guarded(action: Callable[[], int]) -> int:
    """Run a program; turn what the user got wrong into one line and an exit status. Defects keep their traceback."""
    abort.stand_by()  # before anything else registers with Python's end
    gc.set_threshold(MOST_UNCOLLECTED)
    _print_any_text()
    try:
        return action()
    except SystemExit as error:  # a worker rank's end
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except click.ClickException as error:
        message = error.format_message()
        hint = "; see --help" if isinstance(error, click.UsageError) else ""
        return _fail(message.rstrip(".") + hint)
    except (FailedError, RankFailedError) as error:
        return _fail(str(error), ExitCode.FAILED, _notes(error))
    except (TrtrunError, ParallelError) as error:
        return _fail(str(error))
    except (KeyboardInterrupt, click.Abort):
        return status_of_signal(signal.SIGINT)
    except BrokenPipeError:
        # The reader of our output is gone, as in `trtrun run … | head`. Python would complain again at its own end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return status_of_signal(signal.SIGPIPE)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            return _defect()
        return _fail(f"cannot write {error.filename or 'the output'}: {error.strerror}", ExitCode.FAILED)
    except Exception:
        return _defect()


def _defect() -> ExitCode:
    """Show the exception that is being handled."""
    traceback.print_exc()
    logger.critical("an exception that nothing caught", exc_info=True, extra=FILE_ONLY)
    return ExitCode.FAILED


def _print_any_text() -> None:
    """Have stdout and stderr take every text: what their encoding has no character for is written as its escape.

    A model may write any character. What the user has chosen for such cases stays: PYTHONIOENCODING has it behind a
    colon.
    """
    if os.environ.get("PYTHONIOENCODING", "").partition(":")[2]:
        return
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            with suppress(OSError):  # of a file that has become a pipe under it
                stream.reconfigure(errors="backslashreplace")


def _notes(error: BaseException | None) -> list[str]:
    """What an error, or one that it was raised from, has to tell besides its line."""
    notes: list[str] = []
    while error is not None:
        notes += getattr(error, "__notes__", ())
        error = error.__cause__
    return notes


def _fail(line: str, status: ExitCode = ExitCode.REFUSED, notes: Sequence[str] = ()) -> int:
    """Say one line, and below it what else there is to know, such as the ranks' stacks."""
    from launch.jobs.mpi.job import print_error

    logger.error("\n".join([line, *notes]), extra=FILE_ONLY)
    print_error(line)
    for note in notes:
        print(note, file=sys.stderr, flush=True)
    return status


def main() -> None:
    """Entry of the console script and of `python -m launch.cli`."""

    def action() -> int:
        say_hello()
        # Outside standalone mode click returns the command's value, and 0 after --help or --version.
        return int(cli.main(args=sys.argv[1:] or ["--help"], prog_name="trtrun", standalone_mode=False) or 0)

    leave(guarded(action))


def leave(status: int) -> NoReturn:
    """End this process. A rank that fails takes its job along, however it was started.

    MPI's own end waits for all ranks, so a rank that just exits would hang the job. `python -m mpi4py` prevents that,
    but a user's `mpirun … trtrun run …` does not have it.
    """
    logger.info("ends with exit status %d", status)
    StartProgress().tell_over(status)
    if status:
        from launch.jobs.mpi.job import join_world

        join_world()
    if status and "mpi4py.MPI" in sys.modules:
        abort.abort_at_exit(status)
    abort.skip_teardown(status)
    sys.exit(status)


if __name__ == "__main__":
    main()
