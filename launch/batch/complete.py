"""Runs the rows of an input through an LLM: read one after another, written as they finish, none held in between.

It knows what becomes of each row. It does not know where rows are kept, how they are read, or which process runs them.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from launch.batch.input import InputRows
from launch.batch.messages import Refusals, join_tokens
from launch.batch.ordered import RowWriter, TextPrinter
from launch.batch.rows import PromptRow, output_row, refused_row
from launch.jobs.terminal import Bar
from trtrun.api.interrupts import listening
from trtrun.api.prompts import Prompt
from trtrun.chats.chat import Chat
from trtrun.core.sampling_params import SamplingParams
from trtrun.errors import InvalidRequestError

if TYPE_CHECKING:
    from trtrun.api.llm import LLM


@dataclass
class Outcome:
    """What a run came to.

    Attributes:
        refused: the rows that could not run.
        num_settled: rows that this run finished or refused.
        num_left: rows that a drain left for --resume.
        elapsed: seconds, without loading.
        statistics: the LLM's totals.
    """

    refused: Refusals = field(default_factory=Refusals)
    num_settled: int = 0
    num_left: int = 0
    elapsed: float = 0.0
    statistics: dict[str, Any] = field(default_factory=dict)


def complete_rows(llm: LLM, rows: InputRows, writer: RowWriter, seconds_left: Callable[[], float | None]) -> Outcome:
    """Complete all rows that are not done, and write or print each.

    Args:
        llm: of the models.
        rows: the input.
        writer: of the output.
        seconds_left: as LLM.generate_as_completed takes it.

    Raises:
        TrtrunError: the run cannot go on; what is written stays.
    """
    started = time.perf_counter()
    if isinstance(writer, TextPrinter) and len(rows) == 1:
        (row,) = rows.read()
        outcome = _stream(llm, row) if _is_streamable(row) else _complete(llm, rows, writer, seconds_left)
    else:
        outcome = _complete(llm, rows, writer, seconds_left)
    outcome.elapsed = time.perf_counter() - started
    outcome.statistics = llm.statistics()
    return outcome


def refuse_rows(rows: InputRows, writer: RowWriter) -> Outcome:
    """Write the rows that are not done where none of them can run; no model is needed for it."""
    outcome = Outcome()
    for row in rows.read(lambda index: index not in writer.done):
        _refuse(row, writer, outcome)
    writer.finish()
    return outcome


def _refuse(row: PromptRow, writer: RowWriter, outcome: Outcome) -> None:
    error = str(row.error)
    writer.write(row.index, refused_row(row, error))
    outcome.refused.add(row, error)
    outcome.num_settled += 1


def _is_streamable(row: PromptRow) -> bool:
    sampling = row.sampling
    return sampling is not None and sampling.n == 1 and sampling.logprobs is None and sampling.prompt_logprobs is None


def _stream(llm: LLM, row: PromptRow) -> Outcome:
    """Show one prompt's text as it comes."""
    assert row.prompt is not None and row.sampling is not None
    outcome = Outcome(num_settled=1)
    try:
        for chunk in llm.stream(row.prompt, row.sampling):
            sys.stdout.write(chunk.text if llm.tokenizer is not None else join_tokens(chunk.token_ids) + " ")
            sys.stdout.flush()
    except InvalidRequestError as error:
        outcome.refused.add(row, str(error))
        return outcome
    sys.stdout.write("\n")
    sys.stdout.flush()
    return outcome


def _complete(llm: LLM, rows: InputRows, writer: RowWriter, seconds_left: Callable[[], float | None]) -> Outcome:
    """Complete rows together: the LLM takes as many as it has use for, and gives each back as it finishes."""
    outcome = Outcome()
    pending = rows.read(lambda index: index not in writer.done)
    num_pending = len(rows) - writer.num_done_before
    in_flight: dict[int, PromptRow] = {}

    def prompts() -> Iterator[tuple[Prompt | Chat, SamplingParams]]:
        number = 0
        for row in pending:
            if row.prompt is None or row.sampling is None:
                _refuse(row, writer, outcome)
                continue
            in_flight[number] = row
            number += 1
            yield row.prompt, row.sampling

    # Texts that are printed tell how far it is.
    with Bar("prompts") if not isinstance(writer, TextPrinter) else nullcontext() as bar, listening():
        if bar is not None:
            bar.update(0, num_pending)
        for result in llm.generate_as_completed(prompts(), seconds_left):
            row = in_flight.pop(result.index)
            writer.write(row.index, output_row(row, result))
            if result.error is not None:
                outcome.refused.add(row, result.error)
            outcome.num_settled += 1
            if bar is not None:
                bar.update(outcome.num_settled, num_pending)
    for row in pending:  # after a drain: rows that could not run are done
        if row.error is None:
            break
        _refuse(row, writer, outcome)
    outcome.num_left = num_pending - outcome.num_settled
    if not outcome.num_left:
        writer.finish()
    return outcome
