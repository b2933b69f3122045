"""Rows of batches without a server, for `trtrun run`: read and answered by what does so in one, so that both say the
same. It does not know how rows are completed, or where they are kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from launch.serve.admission.refusals import Kind, Refusal, wrap_errors
from launch.serve.api.openai.api import ROW_ENDPOINTS, answering_of, check_row, error_body, in_words_of
from launch.serve.api.openai.calls import Answering
from launch.serve.application.facts import make_facts, model_name
from launch.serve.application.request_parser import RequestParser
from launch.serve.batches.rows import BatchRow, answered_row, refused_row
from launch.serve.frontend.frontend import Usage
from launch.serve.parsing.messages import Task
from launch.serve.parsing.parsers import ParsedRequest, parsed_of
from trtrun.api.prompts import PromptReader
from trtrun.chats.chat_template import read_chat_template
from trtrun.core.outputs import CompletionDelta, PromptLogprobs, RequestOutput
from trtrun.core.sampling_params import SamplingParams
from trtrun.scheduling.limits import SchedulerLimits
from trtrun.start.job_spec import JobSpec
from trtrun.tokens.text import Tokenizer


@dataclass(frozen=True)
class AskedRow:
    """A row that can run.

    Attributes:
        row: that it is.
        prompt: tokens.
        sampling: of its completions.
        answering: how its answer is wanted.
    """

    row: BatchRow
    prompt: tuple[int, ...]
    sampling: SamplingParams
    answering: Answering


class RowService:
    """Reads rows' bodies, and writes their answers, for one model."""

    def __init__(self, spec: JobSpec, tokenizer: Tokenizer | None, limits: SchedulerLimits) -> None:
        """Be ready for rows.

        Args:
            spec: of the job.
            tokenizer: of the model; None where prompts are token ids alone.
            limits: of the engine.

        Raises:
            TrtrunError: the chat template cannot be read, or the `server` section names a parser that there is not.
        """
        config = spec.config
        self._name, self._adapters, self._draft_len = model_name(config), tuple(config.adapters), config.draft_len
        self._tokenizer, self._limits = tokenizer, limits
        self._end_token_ids = PromptReader(spec.target, tokenizer).end_token_ids
        directory = config.tokenizer or config.target.model
        template = read_chat_template(directory) if tokenizer is not None else None
        self._parser = RequestParser(make_facts(spec, tokenizer, template), tokenizer)

    def read(self, row: BatchRow) -> AskedRow | dict[str, Any]:
        """What a row asks for; or the output row that refuses it."""
        kind, _ = ROW_ENDPOINTS[row.url]
        try:
            return self._read(row, kind)
        except Refusal as refusal:
            return self._refuse(row, in_words_of(kind, refusal))

    def _read(self, row: BatchRow, kind: str) -> AskedRow:
        task = Task(kind=kind, seconds=0.0, most_tokens=self._limits.max_prompt_length, adapters=self._adapters)
        found = parsed_of(*self._parser.read(task, row.body))
        assert isinstance(found, ParsedRequest)
        answering = answering_of(found)
        check_row(answering)
        if len(found.lengths) > 1:
            raise Refusal(Kind.INVALID, "prompt: a row of trtrun run has one prompt: give each its own row", "prompt")
        with wrap_errors():
            self._limits.check_prompt(found.lengths[0])
        return AskedRow(row, tuple(found.prompts[0]), found.sampling[0], answering)

    def answer(self, asked: AskedRow, output: RequestOutput) -> dict[str, Any]:
        """The output row of a row that was completed, or that the engine has refused."""
        if output.error is not None:
            return self._refuse(asked.row, Refusal(Kind.INVALID, output.error))
        sampling = asked.sampling
        _, answer_type = ROW_ENDPOINTS[asked.row.url]
        name = sampling.lora_name or self._name
        answer = answer_type(name, self._tokenizer, asked.answering, [asked.prompt], self._end_token_ids)
        usage = Usage(len(asked.prompt), sampling.n)
        scores = None if output.prompt_logprobs is None else PromptLogprobs.of(output.prompt_logprobs)
        for one in output.completions:
            usage.num_completion_tokens += len(one.token_ids)
            usage.statistics[one.index] = one.statistics
            answer.keep(
                CompletionDelta(
                    request_id="",
                    index=one.index,
                    token_ids=one.token_ids,
                    text=one.text,
                    statistics=one.statistics,
                    logprobs=None if one.logprobs is None else tuple(one.logprobs),
                    finish_reason=one.finish_reason,
                    token_origins=one.token_origins,
                    prompt_logprobs=None if one.index else scores,
                )
            )
        return _values(answered_row(asked.row.custom_id, b"".join(answer.whole(usage, self._draft_len))))

    def _refuse(self, row: BatchRow, refusal: Refusal) -> dict[str, Any]:
        """The output row of a row that is not completed."""
        return _values(refused_row(row.custom_id, refusal, error_body(refusal)))


def _values(line: bytes) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.json.decode(line)
    return found
