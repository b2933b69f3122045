"""`trtrun run`: prompts from the command line or a file, text to the screen or rows to a file.

It knows what the user sees. How prompts become text is the LLM's business, and which process calls it is `job`'s.
"""

from __future__ import annotations

import sys
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from launch.job import Job, finish_mpi, is_reporting_rank
from launch.journal import RowJournal, RowStream, check_output, finished_rows, is_stream, open_writer
from launch.mpirun import find_place
from launch.options import RunOptions
from launch.preflight import check_job, has_tokenizer
from launch.rows import PromptRow, output_row, refused_row, rows_from_file, rows_from_prompts
from launch.terminal import Bar
from trtrun.config import RuntimeConfig
from trtrun.errors import ConfigError, InvalidRequestError
from trtrun.llm import LLM
from trtrun.outputs import CompletionOutput, RequestOutput

ROWS_REFUSED = 1
"""Exit status when the job ran but at least one row was refused."""


def check_run(job: Job, options: RunOptions) -> None:
    """Raise a TrtrunError for anything that the user got wrong, before ranks start."""
    rows = _check_rows(options)
    check_job(job.config, job.topology)
    if any(isinstance(row.prompt, str) for row in rows) and not has_tokenizer(job.config):
        raise ConfigError(
            f"{job.config.target.model} has no tokenizer: name one with the key 'tokenizer', or give prompt_token_ids"
        )


def finish_resumed(options: RunOptions) -> int | None:
    """With --resume, finish the output file if no prompt is left to run. No rank is needed for that, and no model.

    Returns:
        The exit status of the run; None when there is something to run.

    Raises:
        TrtrunError: the user got something about the rows or the output wrong.
    """
    rows = _check_rows(options)
    if not options.resume or options.output is None:
        return None
    finished = finished_rows(options.output, rows, resume=True)
    if _num_runnable([row for row in rows if row.index not in finished]):
        return None
    with _open_output(options, rows) as writer:
        return _finish_rows(rows, writer)


def _check_rows(options: RunOptions) -> list[PromptRow]:
    """All input rows, once the output and what it holds already are known to be right."""
    if options.output is not None:
        check_output(options.output)
        if options.resume and is_stream(options.output):
            raise ConfigError(f"--resume needs an output file; {options.output} is not one")
    rows = read_rows(options)
    if options.output is not None and not is_stream(options.output):
        finished_rows(options.output, rows, options.resume)
    return rows


def read_rows(options: RunOptions) -> list[PromptRow]:
    """All input rows, those of the command line first.

    Raises:
        ConfigError: no prompt at all, or the file cannot be read.
        InvalidRequestError: a sampling option is outside its range.
    """
    rows = rows_from_prompts(options.prompts, options.sampling)
    if options.prompts_file is not None:
        rows += rows_from_file(options.prompts_file, options.sampling, start=len(rows))
    if not rows:
        raise ConfigError("nothing to do: give --prompt TEXT or --prompts FILE.jsonl")
    return rows


def open_llm(config: RuntimeConfig) -> LLM:
    """Load the models, with a progress bar on a terminal. On worker ranks this serves to the end of the job.

    Raises:
        SystemExit: on worker ranks, with code 0, when the job is over.
    """
    with Bar("loading weights", in_bytes=True) as bar:
        return LLM(config=config, on_load_progress=bar.update)


def play_run(config: RuntimeConfig, options: RunOptions) -> int:
    """This rank's part of a run: workers serve inside `open_llm`, rank 0 goes on with the prompts.

    Returns:
        0, or 1 when a row was refused.
    """
    rows = read_rows(options) if is_reporting_rank() else []
    with _open_output(options, rows) as writer:
        pending = rows if writer is None else writer.pending
        if options.resume and not _share_count(_num_runnable(pending)):
            status = _finish_rows(rows, writer)
            finish_mpi()
            return status
        with open_llm(config) as llm:
            started = time.perf_counter()
            if len(rows) == 1 and writer is None and _is_streamable(rows[0]):
                refused = _stream(llm, rows[0])
            else:
                refused = _complete(llm, pending, writer)
            elapsed = time.perf_counter() - started
            statistics = llm.statistics()
    finish_mpi()
    line = _summary(len(pending), refused, elapsed, statistics)
    if len(pending) < len(rows):
        line += f"; {len(rows) - len(pending)} rows were done before"
    print(line, file=sys.stderr, flush=True)
    return ROWS_REFUSED if refused else 0


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
    place = find_place()
    if place is None or place.size == 1:
        return count
    from mpi4py import MPI

    shared = array("q", [count])
    MPI.COMM_WORLD.Bcast(shared, root=0)
    return shared[0]


def _finish_rows(rows: Sequence[PromptRow], writer: RowStream | RowJournal | None) -> int:
    """The end of a resumed run that has nothing to compute: rows that cannot run are refused again."""
    if writer is None:
        return 0
    for row in writer.pending:
        writer.write(row.index, refused_row(row, str(row.error)))
    writer.finish()
    for row in writer.pending:
        _tell_refusal(row.index, str(row.error))
    done = len(rows) - len(writer.pending)
    print(f"trtrun: nothing left to run; {done} rows were done before", file=sys.stderr, flush=True)
    return ROWS_REFUSED if writer.pending else 0


def _is_streamable(row: PromptRow) -> bool:
    return row.sampling is not None and row.sampling.n == 1 and row.sampling.logprobs is None


def _stream(llm: LLM, row: PromptRow) -> int:
    """Show one prompt's text as it comes; returns the number of refused rows."""
    assert row.prompt is not None and row.sampling is not None
    try:
        for chunk in llm.stream(row.prompt, row.sampling):
            sys.stdout.write(chunk.text if llm.tokenizer is not None else _join_tokens(chunk.token_ids) + " ")
            sys.stdout.flush()
    except InvalidRequestError as error:
        _tell_refusal(row.index, str(error))
        return 1
    sys.stdout.write("\n")
    sys.stdout.flush()
    return 0


def _complete(llm: LLM, rows: Sequence[PromptRow], writer: RowStream | RowJournal | None) -> int:
    """Complete all rows together and write or print each; returns the number of refused rows."""
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
        llm.generate(prompts, sampling, on_finish=settle)
        if writer is not None:
            writer.finish()
    if writer is None:
        _print_texts(rows, outputs, llm.tokenizer is not None)
    for index, error in sorted(refused.items()):
        _tell_refusal(index, str(error))
    return len(refused)


def _print_texts(rows: Sequence[PromptRow], outputs: dict[int, RequestOutput], has_text: bool) -> None:
    """All completions under the index of their prompt."""
    for row in rows:
        for completion in outputs[row.index].completions if row.index in outputs else ():
            number = f"{row.index}" if len(outputs[row.index].completions) == 1 else f"{row.index}.{completion.index}"
            print(f"--- {number} ({completion.finish_reason})")
            print(completion.text if has_text else _join_tokens(completion.token_ids))
            for line in _logprob_lines(completion):
                print(line)
    sys.stdout.flush()


def _logprob_lines(completion: CompletionOutput) -> list[str]:
    return [
        f"    token {entry.token_id}: logprob {entry.logprob:.4f}"
        + "".join(f", {token}: {value:.4f}" for token, value in entry.alternatives)
        for entry in completion.logprobs or ()
    ]


def _join_tokens(tokens: Sequence[int]) -> str:
    return " ".join(str(token) for token in tokens)


def _tell_refusal(index: int, error: str) -> None:
    print(f"trtrun: row {index} refused: {error}", file=sys.stderr, flush=True)


def _summary(num_rows: int, refused: int, elapsed: float, statistics: dict[str, Any]) -> str:
    tokens = statistics["num_tokens"]
    line = (
        f"trtrun: {num_rows} prompts, {tokens} tokens in {elapsed:.2f} s ({tokens / max(elapsed, 1e-9):.1f} tokens/s)"
    )
    if statistics["num_draft_tokens"]:
        line += f", mean acceptance length {statistics['mean_acceptance_length']:.2f}"
    line += f", {statistics['num_rounds']} rounds"
    return line + (f", {refused} refused" if refused else "")
