"""What `trtrun run` checks before any rank starts, and how it ends where no prompt is left to run.

The process that starts the ranks asks it, and rank 0 once more. It does without torch, which takes longer to import
than all of this. It does not know how prompts are completed.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

from launch.batch.complete import refuse_rows, tell
from launch.batch.input import InputRows
from launch.batch.journal import check_output, finished_rows
from launch.batch.options import RunOptions, is_stream
from launch.batch.ordered import RowWriter, open_writer
from launch.batch.written import IndexSet
from launch.exit_codes import ExitCode
from launch.jobs.check.preflight import check_job, has_tokenizer
from launch.jobs.mpi.job import Job
from trtrun.chats.chat import Chat
from trtrun.configuration.config import RuntimeConfig
from trtrun.errors import ConfigError
from trtrun.loading.model_settings import sampling_defaults

ROWS_LOOKED_AT = 1000
"""Rows in which a text is looked for where there is no tokenizer; later ones are refused alone."""

CHATS_LOOKED_FOR = 20
"""Rows in which a chat is looked for, as the model may have no chat template; later ones are refused alone."""


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
    check_models(job, check_rows(options, job.config))


def check_rows(options: RunOptions, config: RuntimeConfig) -> CheckedRows:
    """The input, once it, the output and what that holds already are known to be right. Rows are not looked at, but
    for the first, and those that an earlier run finished.

    Raises:
        TrtrunError: one line that says what is wrong.
    """
    rows = read_input(options, config)
    if options.sampling and (first := next(rows.read(), None)) is not None and first.batch_row is not None:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in options.sampling)
        raise ConfigError(
            f"rows of a batch say in their body how they are sampled, and take no options: leave out {names}"
        )
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
    check_job(job.spec)
    if not has_tokenizer(job.config):
        if any(isinstance(row.prompt, str | Chat) for row in islice(checked.rows.read(), ROWS_LOOKED_AT)):
            raise ConfigError(
                f"{job.config.target.model} has no tokenizer: name one with the key 'tokenizer', or give "
                "prompt_token_ids"
            )
    elif any(isinstance(row.prompt, Chat) for row in islice(checked.rows.read(), CHATS_LOOKED_FOR)):
        from trtrun.chats.chat_template import read_chat_template  # which most runs have no use for

        directory = job.config.tokenizer or job.config.target.model
        if read_chat_template(directory) is None:
            raise ConfigError(
                f"{directory} has no chat template, and rows have messages: add chat_template.jinja there, or give "
                "prompts"
            )


def finish_without_models(options: RunOptions, checked: CheckedRows) -> int | None:
    """Finish the output if no prompt is left to run: after --resume, or in a part that has no rows.

    Returns:
        The exit status of the run; None when there is something to run.

    Raises:
        TrtrunError: the output cannot be written.
    """
    if not may_have_nothing_to_run(options) or is_any_left(checked.rows, checked.done):
        return None
    with open_output(options, checked.rows) as writer:
        return finish_rows(options, checked.rows, writer)


def may_have_nothing_to_run(options: RunOptions) -> bool:
    """Known on all ranks, so that all of them agree on whether to ask rank 0."""
    return options.resume or options.part is not None


def is_any_left(rows: InputRows, done: Container[int]) -> bool:
    """Whether a row that is not done can run; reads to the first one."""
    return any(row.error is None for row in rows.read(lambda index: index not in done))


def read_input(options: RunOptions, config: RuntimeConfig) -> InputRows:
    """The input rows of this run: all of them, or with a part its share, under the indexes of the whole.

    Raises:
        ConfigError: no prompt at all, or the file cannot be read.
        InvalidRequestError: a sampling option is outside its range.
        CheckpointError: what the model says of sampling is.
    """
    of_model = model_sampling(options, config)
    return InputRows(
        options.prompts, options.prompts_file, options.sampling, options.part, options.sampled, of_model=of_model
    )


def model_sampling(options: RunOptions, config: RuntimeConfig) -> dict[str, Any]:
    """Sampling of the model's own where neither row nor command line says it; training data has that of its options.

    Raises:
        CheckpointError: it is wrong.
    """
    return {} if options.sampled is not None else sampling_defaults(config)


@contextmanager
def open_output(options: RunOptions, rows: InputRows, config: RuntimeConfig | None = None) -> Iterator[RowWriter]:
    """The writer of the output; opened before models are loaded in vain."""
    has_text = config is None or options.output is not None or has_tokenizer(config)
    writer = open_writer(options.output, rows, options.resume, has_text)
    try:
        yield writer
    finally:
        writer.close()


def finish_rows(options: RunOptions, rows: InputRows, writer: RowWriter) -> int:
    """The end of a run that has nothing to compute: rows that cannot run are refused, again where it is resumed."""
    outcome = refuse_rows(rows, writer)
    outcome.refused.tell(has_rows=options.output is not None)
    if len(rows):
        tell(f"nothing left to run; {writer.num_done_before} rows were done before")
    else:
        tell("nothing to run: there are more parts than rows, and this part has none")
    return ExitCode.ROWS_REFUSED if len(outcome.refused) else ExitCode.DONE
