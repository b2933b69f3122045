"""`trtrun run`: prompts from the command line or a file, text to the screen or rows to a file.

It knows what becomes of the rows of a run. How prompts become text is the LLM's business, which process calls it is
`job`'s, and when a run is to end early is `drain`'s.
"""

from __future__ import annotations

import sys
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from launch.batch.journal import RowJournal, RowStream, check_output, finished_rows, open_writer
from launch.batch.messages import describe_drain, join_tokens, print_texts, summarize, tell, tell_refusal
from launch.batch.options import RunOptions, is_stream
from launch.batch.rows import PromptRow, all_rows, output_row, refused_row
from launch.check.preflight import check_job, has_tokenizer
from launch.check.rank_check import check_before_run
from launch.exit_codes import ExitCode, FailedError
from launch.mpi.drain import Drain, EndedAtStart
from launch.mpi.job import Job, finish_mpi, is_reporting_rank
from launch.terminal import Bar
from parallel.errors import ParallelError
from parallel.mpi_rank import find_mpi_rank
from trtrun.config import RuntimeConfig
from trtrun.errors import ConfigError, InvalidRequestError, TrtrunError
from trtrun.llm import LLM
from trtrun.outputs import RequestOutput


def check_run(job: Job, options: RunOptions) -> None:
    """Raise a TrtrunError for anything that the user got wrong, before ranks start."""
    rows = _check_rows(options)
    check_job(job.config, job.topology)
    if any(isinstance(row.prompt, str) for row in rows) and not has_tokenizer(job.config):
        raise ConfigError(
            f"{job.config.target.model} has no tokenizer: name one with the key 'tokenizer', or give prompt_token_ids"
        )


def finish_without_models(options: RunOptions) -> int | None:
    """Finish the output if no prompt is left to run: after --resume, or in a part that has no rows.

    Returns:
        The exit status of the run; None when there is something to run.

    Raises:
        TrtrunError: the user got something about the rows or the output wrong.
    """
    if not _may_have_nothing_to_run(options):
        return None
    rows = _check_rows(options)
    finished = finished_rows(options.output, rows, options.resume) if options.keeps_rows and options.output else {}
    if _num_runnable([row for row in rows if row.index not in finished]):
        return None
    with _open_output(options, rows) as writer:
        return _finish_rows(rows, writer)


def _may_have_nothing_to_run(options: RunOptions) -> bool:
    """Known on all ranks, so that all of them agree on whether to ask rank 0."""
    return options.resume or options.part is not None


def _check_rows(options: RunOptions) -> list[PromptRow]:
    """The input rows of this run, once the output and what it holds already are known to be right."""
    if options.output is not None:
        check_output(options.output)
        if options.resume and is_stream(options.output):
            raise ConfigError(f"--resume needs an output file; {options.output} is not one")
    rows = read_rows(options)
    if options.output is not None and not is_stream(options.output):
        finished_rows(options.output, rows, options.resume)
    return rows


def read_rows(options: RunOptions) -> list[PromptRow]:
    """The input rows of this run: all of them, or with a part its share, under the indexes of the whole.

    Raises:
        ConfigError: no prompt at all, or the file cannot be read.
        InvalidRequestError: a sampling option is outside its range.
    """
    rows = all_rows(options.prompts, options.prompts_file, options.sampling)
    return rows if options.part is None else [rows[index] for index in options.part.of(len(rows))]


def open_llm(config: RuntimeConfig) -> LLM:
    """Load the models, with a progress bar on a terminal. On worker ranks this serves to the end of the job.

    Raises:
        SystemExit: on worker ranks, with code 0, when the job is over; on rank 0 where the ranks do not fit together.
    """
    check_before_run(config)
    with Bar("loading weights", in_bytes=True) as bar:
        llm = LLM.open(config, bar.update)
    if llm is None:
        raise SystemExit(ExitCode.DONE)
    return llm


@dataclass
class _Outcome:
    """What a run came to.

    Attributes:
        refused: why each row that was not run was refused, by index.
        num_left: rows that a drain left for --resume.
        elapsed: seconds, without loading.
        statistics: the LLM's totals.
    """

    refused: dict[int, str] = field(default_factory=dict)
    num_left: int = 0
    elapsed: float = 0.0
    statistics: dict[str, Any] = field(default_factory=dict)


def play_run(config: RuntimeConfig, options: RunOptions, drain: Drain) -> int:
    """This rank's part of a run: workers serve inside `open_llm`, rank 0 goes on with the prompts.

    Raises:
        FailedError: the run cannot go on; rows that are finished stay with the output.
    """
    rows = read_rows(options) if is_reporting_rank() else []
    with _open_output(options, rows) as writer:
        pending = rows if writer is None else writer.pending
        if _may_have_nothing_to_run(options) and not _share_count(_num_runnable(pending)):
            status = _finish_rows(rows, writer)
            finish_mpi()
            return status
        try:
            with drain.starting():
                outcome = _run_prompts(config, pending, writer, drain)
        except EndedAtStart:  # not worth the wait for the other ranks: the end of this one ends the job
            tell(describe_drain(drain.cause, len(rows) - _num_runnable(pending), len(rows)))
            return ExitCode.DRAINED
    finish_mpi()
    if outcome.num_left:
        tell(describe_drain(drain.cause, len(rows) - outcome.num_left, len(rows)))
        return ExitCode.DRAINED
    line = summarize(len(pending), len(outcome.refused), outcome.elapsed, outcome.statistics)
    if len(pending) < len(rows):
        line += f"; {len(rows) - len(pending)} rows were done before"
    tell(line)
    return ExitCode.ROWS_REFUSED if outcome.refused else ExitCode.DONE


def _run_prompts(
    config: RuntimeConfig, rows: Sequence[PromptRow], writer: RowStream | RowJournal | None, drain: Drain
) -> _Outcome:
    """Load the models and complete the rows; what goes wrong from there on is no refusal any more."""
    with open_llm(config) as llm:
        drain.start_running()
        started = time.perf_counter()
        try:
            if len(rows) == 1 and writer is None and _is_streamable(rows[0]):
                outcome = _stream(llm, rows[0])
            else:
                outcome = _complete(llm, rows, writer, lambda: drain.seconds_left(config.launch.drain_seconds))
        except (TrtrunError, ParallelError) as error:
            raise FailedError(str(error)) from error
        outcome.elapsed = time.perf_counter() - started
        outcome.statistics = llm.statistics()
    return outcome


@contextmanager
def _open_output(options: RunOptions, rows: Sequence[PromptRow]) -> Iterator[RowStream | RowJournal | None]:
    """The writer of the output, on the rank that has the rows; opened before models are loaded in vain."""
    if options.output is None or not is_reporting_rank():
        yield None
        return
    writer = open_writer(options.output, rows, options.resume)
    try:
        yield writer
    finally:
        writer.close()


def _num_runnable(rows: Sequence[PromptRow]) -> int:
    return sum(row.error is None for row in rows)


def _share_count(count: int) -> int:
    """Rank 0's count on all ranks: only rank 0 is sure to see the files, and all must agree on whether to load."""
    place = find_mpi_rank()
    if place is None or place.size == 1:
        return count
    from mpi4py import MPI

    shared = array("q", [count])
    MPI.COMM_WORLD.Bcast(shared, root=0)
    return shared[0]


def _finish_rows(rows: Sequence[PromptRow], writer: RowStream | RowJournal | None) -> int:
    """The end of a run that has nothing to compute: rows that cannot run are refused, again where it is resumed."""
    if not is_reporting_rank():
        return ExitCode.DONE
    pending = rows if writer is None else writer.pending
    if writer is not None:
        for row in pending:
            writer.write(row.index, refused_row(row, str(row.error)))
        writer.finish()
    for row in pending:
        tell_refusal(row.index, str(row.error))
    if rows:
        tell(f"nothing left to run; {len(rows) - len(pending)} rows were done before")
    else:
        tell("nothing to run: there are more parts than rows, and this part has none")
    return ExitCode.ROWS_REFUSED if pending else ExitCode.DONE


def _is_streamable(row: PromptRow) -> bool:
    return row.sampling is not None and row.sampling.n == 1 and row.sampling.logprobs is None


def _stream(llm: LLM, row: PromptRow) -> _Outcome:
    """Show one prompt's text as it comes."""
    assert row.prompt is not None and row.sampling is not None
    try:
        for chunk in llm.stream(row.prompt, row.sampling):
            sys.stdout.write(chunk.text if llm.tokenizer is not None else join_tokens(chunk.token_ids) + " ")
            sys.stdout.flush()
    except InvalidRequestError as error:
        tell_refusal(row.index, str(error))
        return _Outcome({row.index: str(error)})
    sys.stdout.write("\n")
    sys.stdout.flush()
    return _Outcome()


def _complete(
    llm: LLM,
    rows: Sequence[PromptRow],
    writer: RowStream | RowJournal | None,
    seconds_left: Callable[[], float | None],
) -> _Outcome:
    """Complete all rows together, and write or print each."""
    good = [row for row in rows if row.error is None]
    outputs: dict[int, RequestOutput] = {}
    refused = {row.index: row.error for row in rows if row.error is not None}
    with Bar("prompts") as bar:

        def settle(result: RequestOutput) -> None:
            row = good[result.index]
            outputs[row.index] = result
            if result.error is not None:
                refused[row.index] = result.error
            if writer is not None:
                writer.write(row.index, output_row(row, result))
            bar.update(len(outputs) + len(rows) - len(good), len(rows))

        if writer is not None:
            for row in rows:
                if row.error is not None:
                    writer.write(row.index, refused_row(row, row.error))
        prompts = [row.prompt for row in good if row.prompt is not None]
        sampling = [row.sampling for row in good if row.sampling is not None]
        llm.generate(prompts, sampling, on_finish=settle, seconds_left=seconds_left)
        num_left = len(good) - len(outputs)
        if writer is not None and not num_left:
            writer.finish()
    if writer is None:
        print_texts(rows, outputs, llm.tokenizer is not None)
    if not num_left:  # else --resume tells them, with the rest
        for index, error in sorted(refused.items()):
            tell_refusal(index, error)
    return _Outcome(refused, num_left)
