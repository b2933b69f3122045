"""`trtrun run`: prompts from the command line or a file, text to the screen or rows to a file.

It knows how a run goes and how it ends. What is checked before is the business of `checks`, what becomes of the rows
that of `complete`, how prompts become text the LLM's; which process calls it is `job`'s, and when a run is to end early
is `drain`'s.
"""

from __future__ import annotations

from array import array

from launch.batch.checks import (
    finish_rows,
    is_any_left,
    may_have_nothing_to_run,
    model_sampling,
    open_output,
    read_input,
)
from launch.batch.complete import Outcome, complete_rows, describe_drain, summarize, tell
from launch.batch.input import InputRows
from launch.batch.options import RunOptions
from launch.batch.ordered import RowWriter
from launch.exit_codes import ExitCode, FailedError
from launch.jobs.check.rank_check import check_before_run
from launch.jobs.mpi.drain import Drain, EndedAtStart
from launch.jobs.mpi.job import finish_mpi, is_reporting_rank
from launch.jobs.mpi.start_progress import StartProgress
from launch.jobs.terminal import Bar
from parallel.errors import ParallelError
from parallel.mpi_rank import find_mpi_rank
from trtrun.api.llm import LLM
from trtrun.errors import TrtrunError
from trtrun.garbage import leave_out_what_is
from trtrun.loading.model_settings import describe_generation_defaults
from trtrun.rounds.failures import losable_ranks
from trtrun.start.job_spec import JobSpec


def load_llm(spec: JobSpec) -> LLM:
    """Load the models, with a progress bar on a terminal. On worker ranks this serves to the end of the job.

    Raises:
        SystemExit: on worker ranks, with code 0, when the job is over; on rank 0 where the ranks do not fit together.
    """
    check_before_run(spec)
    with Bar("loading weights", in_bytes=True, then="compiling kernels and trying rounds") as bar:
        llm = LLM.open(spec, bar.update)
    if llm is None:
        raise SystemExit(ExitCode.DONE)
    StartProgress().tell_expendable(losable_ranks(spec.config, spec.topology))
    leave_out_what_is()
    return llm


def play_run(spec: JobSpec, options: RunOptions, drain: Drain) -> int:
    """This rank's part of a run: workers serve inside `load_llm`, rank 0 goes on with the prompts.

    Raises:
        FailedError: the run cannot go on; rows that are finished stay with the output.
    """
    if not is_reporting_rank():
        if not may_have_nothing_to_run(options) or _share_flag(False):
            load_llm(spec)
        finish_mpi()
        return ExitCode.DONE
    config = spec.config
    rows = read_input(options, config)
    if defaults := model_sampling(options, config):
        tell(describe_generation_defaults(defaults))
    with open_output(options, rows, config) as writer:
        if may_have_nothing_to_run(options) and not _share_flag(is_any_left(rows, writer.done)):
            status = finish_rows(options, rows, writer)
            finish_mpi()
            return status
        try:
            with drain.starting():
                outcome = _run_prompts(spec, rows, writer, drain)
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


def _run_prompts(spec: JobSpec, rows: InputRows, writer: RowWriter, drain: Drain) -> Outcome:
    """Load the models and complete the rows; what goes wrong from there on is no refusal any more."""
    with load_llm(spec) as llm:
        drain.start_running()
        try:
            return complete_rows(llm, rows, writer, lambda: drain.seconds_left(spec.config.launch.drain_seconds))
        except (TrtrunError, ParallelError) as error:
            raise FailedError(str(error)) from error


def _share_flag(flag: bool) -> bool:
    """Rank 0's answer on all ranks: only rank 0 is sure to see the files, and all must agree on whether to load."""
    place = find_mpi_rank()
    if place is None or place.size == 1:
        return flag
    from mpi4py import MPI

    shared = array("q", [flag])
    MPI.COMM_WORLD.Bcast(shared, root=0)
    return bool(shared[0])
