"""Runs the rows of an input through an LLM: read one after another, written as they finish, none held in between; and
what the user is told of them.

It does not know where rows are kept, how they are read, or which process runs them.
"""

from __future__ import annotations

import sys
import time
from bisect import insort
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from launch.batch.input import InputRows
from launch.batch.ordered import RowWriter, TextPrinter, join_tokens
from launch.batch.rows import MOST_OF_AN_ERROR, PromptRow, batch_output_row, output_row, refused_row
from launch.jobs.terminal import Bar
from trtrun.api.interrupts import listening
from trtrun.api.prompts import Prompt
from trtrun.chats.chat import Chat
from trtrun.core.sampling_params import SamplingParams
from trtrun.core.values import cut_text
from trtrun.errors import InvalidRequestError
from trtrun.start.job_spec import JobSpec

MOST_REFUSALS = 20
"""Refusals that are told one by one; the others are counted."""


def tell(line: str) -> None:
    """Say one line to the user."""
    print(f"trtrun: {line}", file=sys.stderr, flush=True)


class Refusals:
    """Why rows were refused: the first few in input order, and how many there are."""

    def __init__(self) -> None:
        self._first: list[tuple[int, str]] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, row: PromptRow, error: str) -> None:
        """Take in why a row was refused."""
        self._count += 1
        insort(self._first, (row.index, f"{row.name} refused: {cut_text(error, MOST_OF_AN_ERROR)}"))
        del self._first[MOST_REFUSALS:]

    def tell(self, has_rows: bool) -> None:
        """Say them to the user; `has_rows` says whether there are output rows that say the rest."""
        for _, line in self._first:
            tell(line)
        if self._count > len(self._first):
            where = ": the `error` of each output row says why" if has_rows else ""
            tell(f"{self._count - len(self._first)} more rows were refused{where}")


def summarize(num_rows: int, refused: int, elapsed: float, statistics: Mapping[str, Any]) -> str:
    """The figures of a run that came to its end; `elapsed` is in seconds, without loading."""
    tokens = statistics["num_tokens"]
    prompts = "1 prompt" if num_rows == 1 else f"{num_rows} prompts"
    line = f"{prompts}, {tokens} tokens in {elapsed:.2f} s ({tokens / max(elapsed, 1e-9):.1f} tokens/s)"
    if statistics["num_draft_tokens"]:
        line += f", mean acceptance length {statistics['mean_acceptance_length']:.2f}"
    line += f", {statistics['num_rounds']} rounds"
    if statistics["draft_losses"]:
        line += ", without drafts from the loss of the draft on"
    return line + (f", {refused} refused" if refused else "")


def describe_drain(cause: str | None, num_done: int, num_rows: int) -> str:
    """What a drained run leaves, and how to go on."""
    return (
        f"drained after {cause}: {num_done} of {num_rows} rows are done, {num_rows - num_done} are left; "
        "the same command with --resume runs them"
    )


if TYPE_CHECKING:
    from launch.serve.application.batch_rows import AskedRow, RowService
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

    def refuse(self, row: PromptRow, error: str) -> None:
        """A row could not run."""
        self.refused.add(row, error)
        self.num_settled += 1


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
    outcome.refuse(row, error)


def _is_streamable(row: PromptRow) -> bool:
    sampling = row.sampling
    if row.batch_row is not None:
        return False
    return sampling is not None and sampling.n == 1 and sampling.logprobs is None and sampling.prompt_logprobs is None


def _stream(llm: LLM, row: PromptRow) -> Outcome:
    """Show one prompt's text as it comes."""
    assert isinstance(row.prompt, str | tuple | Chat) and row.sampling is not None
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
    in_flight: dict[int, tuple[PromptRow, AskedRow | None]] = {}

    @cache
    def row_service() -> RowService:
        from launch.serve.application.batch_rows import RowService  # most runs do without what it takes

        return RowService(JobSpec(llm.config), llm.tokenizer, llm.engine.scheduler.limits)

    def prompts() -> Iterator[tuple[Prompt | Chat, SamplingParams]]:
        number = 0
        for row in pending:
            asked = None if row.batch_row is None else row_service().read(row.batch_row)
            if isinstance(asked, Mapping):
                writer.write(row.index, batch_output_row(row, asked))
                outcome.refuse(row, asked["response"]["body"]["error"]["message"])
                continue
            prompt, sampling = (row.prompt, row.sampling) if asked is None else (asked.prompt, asked.sampling)
            if not isinstance(prompt, str | tuple | Chat) or sampling is None:
                _refuse(row, writer, outcome)
                continue
            in_flight[number] = row, asked
            number += 1
            yield prompt, sampling

    # Texts that are printed tell how far it is.
    with Bar("prompts") if not isinstance(writer, TextPrinter) else nullcontext() as bar, listening():
        if bar is not None:
            bar.update(0, num_pending)
        for result in llm.generate_as_completed(prompts(), seconds_left):
            row, asked = in_flight.pop(result.index)
            if asked is None:
                writer.write(row.index, output_row(row, result))
            else:
                writer.write(row.index, batch_output_row(row, row_service().answer(asked, result)))
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
