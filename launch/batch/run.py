"""`trtrun run`: prompts from the command line or a file, text to the screen or rows to a file.

It knows what is checked before a run and how it ends. What becomes of the rows is `complete`'s, how prompts become text
the LLM's business; which process calls it is `job`'s, and when a run is to end early is `drain`'s.
"""

from __future__ import annotations

from array import array
from collections.abc import Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice

from launch.batch.complete import Outcome, complete_rows, refuse_rows
from launch.batch.input import InputRows
from launch.batch.journal import check_output, finished_rows
from launch.batch.messages import describe_drain, summarize, tell
from launch.batch.options import RunOptions, is_stream
from launch.batch.ordered import RowWriter, open_writer
from launch.batch.written import IndexSet
from launch.check.preflight import check_job, has_tokenizer
from launch.check.rank_check import check_before_run
from launch.exit_codes import ExitCode, FailedError
from launch.mpi.drain import Drain, EndedAtStart
from launch.mpi.job import Job, finish_mpi, is_reporting_rank
from launch.mpi.start_progress import StartProgress
from launch.terminal import Bar
from parallel.errors import ParallelError
from parallel.mpi_rank import find_mpi_rank
from trtrun.config import RuntimeConfig
from trtrun.errors import ConfigError, TrtrunError
from trtrun.llm import LLM
from trtrun.roles.draft_loss import losable_ranks
from trtrun.topology import make_topology

ROWS_LOOKED_AT = 1000
"""Rows in which a text is looked for where there is no tokenizer; later ones are refused alone."""


@dataclass(frozen=True)
class CheckedRows:
    """The input rows of a run, once what is cheap to check about them and the output is known to be right.

    Attributes:
        rows: the input.
        done: indexes of rows that an earlier run finished.
    """

    rows: InputRows
    done: Container[int]


def check_run(job: Job, options: RunOptions) -> None:
    """Raise a TrtrunError for anything that the user got wrong, before ranks start."""
    check_models(job, check_rows(options))


def check_rows(options: RunOptions) -> CheckedRows:
    """The input, once it, the output and what that holds already are known to be right. Rows are not looked at, but
    for those that an earlier run finished.

    Raises:
        TrtrunError: one line that says what is wrong.
    """
    rows = read_input(options)
    if options.output is not None:
        check_output(options.output, options.prompts_file)
        if options.resume and is_stream(options.output):
            raise ConfigError(f"--resume needs an output file; {options.output} is not one")
    if options.output is None or not options.keeps_rows:
        return CheckedRows(rows, ())
    finished = finished_rows(options.output, rows, options.resume)
    if not len(finished):
        return CheckedRows(rows, ())
    done = IndexSet(rows.indexes)
    for row in finished.in_order():
        done.add(row.row_index)
    return CheckedRows(rows, done)


def check_models(job: Job, checked: CheckedRows) -> None:
    """Raise a TrtrunError for models that cannot run like this, or cannot run these rows."""
    if job.config.speculation.forced_acceptance is not None:
        raise ConfigError("speculation.forced_acceptance: texts would be nobody's; it is for trtrun bench alone")
    check_job(job.config, job.topology)
    if has_tokenizer(job.config):
        return
    if any(isinstance(row.prompt, str) for row in islice(checked.rows.read(), ROWS_LOOKED_AT)):
        raise ConfigError(
            f"{job.config.target.model} has no tokenizer: name one with the key 'tokenizer', or give prompt_token_ids"
        )


def finish_without_models(options: RunOptions, checked: CheckedRows) -> int | None:
    """Finish the output if no prompt is left to run: after --resume, or in a part that has no rows.

    Returns:
        The exit status of the run; None when there is something to run.

    Raises:
        TrtrunError: the output cannot be written.
    """
    if not _may_have_nothing_to_run(options) or _is_any_left(checked.rows, checked.done):
        return None
    with _open_output(options, checked.rows) as writer:
        return _finish_rows(options, checked.rows, writer)


def _may_have_nothing_to_run(options: RunOptions) -> bool:
    """Known on all ranks, so that all of them agree on whether to ask rank 0."""
    return options.resume or options.part is not None


def _is_any_left(rows: InputRows, done: Container[int]) -> bool:
    """Whether a row that is not done can run; reads to the first one."""
    return any(row.error is None for row in rows.read(lambda index: index not in done))


def read_input(options: RunOptions) -> InputRows:
    """The input rows of this run: all of them, or with a part its share, under the indexes of the whole.

    Raises:
        ConfigError: no prompt at all, or the file cannot be read.
        InvalidRequestError: a sampling option is outside its range.
    """
    return InputRows(options.prompts, options.prompts_file, options.sampling, options.part)


def load_llm(config: RuntimeConfig) -> LLM:
    """Load the models, with a progress bar on a terminal. On worker ranks this serves to the end of the job.

    Raises:
        SystemExit: on worker ranks, with code 0, when the job is over; on rank 0 where the ranks do not fit together.
    """
    check_before_run(config)
    with Bar("loading weights", in_bytes=True) as bar:
        llm = LLM.open(config, bar.update)
    if llm is None:
        raise SystemExit(ExitCode.DONE)
    StartProgress().tell_expendable(losable_ranks(config, make_topology(config)))
    return llm


def play_run(config: RuntimeConfig, options: RunOptions, drain: Drain) -> int:
    """This rank's part of a run: workers serve inside `load_llm`, rank 0 goes on with the prompts.

    Raises:
        FailedError: the run cannot go on; rows that are finished stay with the output.
    """
    if not is_reporting_rank():
        if not _may_have_nothing_to_run(options) or _share_flag(False):
            load_llm(config)
        finish_mpi()
        return ExitCode.DONE
    rows = read_input(options)
    with _open_output(options, rows, config) as writer:
        if _may_have_nothing_to_run(options) and not _share_flag(_is_any_left(rows, writer.done)):
            status = _finish_rows(options, rows, writer)
            finish_mpi()
            return status
        try:
            with drain.starting():
                outcome = _run_prompts(config, rows, writer, drain)
        except EndedAtStart:  # not worth the wait for the other ranks: the end of this one ends the job
            tell(describe_drain(drain.cause, writer.num_done_before, len(rows)))
            return ExitCode.DRAINED
    finish_mpi()
    if outcome.num_left:  # then --resume tells the refusals, with the rest
        tell(describe_drain(drain.cause, len(rows) - outcome.num_left, len(rows)))
        return ExitCode.DRAINED
    outcome.refused.tell(has_rows=options.output is not None)
    line = summarize(outcome.num_settled, len(outcome.refused), outcome.elapsed, outcome.statistics)
    if writer.num_done_before:
        line += f"; {writer.num_done_before} rows were done before"
    tell(line)
    return ExitCode.ROWS_REFUSED if len(outcome.refused) else ExitCode.DONE


def _run_prompts(config: RuntimeConfig, rows: InputRows, writer: RowWriter, drain: Drain) -> Outcome:
    """Load the models and complete the rows; what goes wrong from there on is no refusal any more."""
    with load_llm(config) as llm:
        drain.start_running()
        try:
            return complete_rows(llm, rows, writer, lambda: drain.seconds_left(config.launch.drain_seconds))
        except (TrtrunError, ParallelError) as error:
            raise FailedError(str(error)) from error


@contextmanager
def _open_output(options: RunOptions, rows: InputRows, config: RuntimeConfig | None = None) -> Iterator[RowWriter]:
    """The writer of the output; opened before models are loaded in vain."""
    has_text = config is None or options.output is not None or has_tokenizer(config)
    writer = open_writer(options.output, rows, options.resume, has_text)
    try:
        yield writer
    finally:
        writer.close()


def _share_flag(flag: bool) -> bool:
    """Rank 0's answer on all ranks: only rank 0 is sure to see the files, and all must agree on whether to load."""
    place = find_mpi_rank()
    if place is None or place.size == 1:
        return flag
    from mpi4py import MPI

    shared = array("q", [flag])
    MPI.COMM_WORLD.Bcast(shared, root=0)
    return bool(shared[0])


def _finish_rows(options: RunOptions, rows: InputRows, writer: RowWriter) -> int:
    """The end of a run that has nothing to compute: rows that cannot run are refused, again where it is resumed."""
    outcome = refuse_rows(rows, writer)
    outcome.refused.tell(has_rows=options.output is not None)
    if len(rows):
        tell(f"nothing left to run; {writer.num_done_before} rows were done before")
    else:
        tell("nothing to run: there are more parts than rows, and this part has none")
    return ExitCode.ROWS_REFUSED if len(outcome.refused) else ExitCode.DONE
