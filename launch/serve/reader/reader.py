"""Reads requests of all protocols, whatever their length: from bytes to tokens and checked parameters.

What it makes of them is what the front's event loop makes of short ones, by the same functions. It knows bodies, the
tokenizer and the chat template. It does not know who asks, or what becomes of it.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from launch.serve.door.counts import check_counts, check_text, distinct
from launch.serve.door.refusals import Refusal, refusing
from launch.serve.http.json_bodies import parse_json
from launch.serve.kserve.forms import Sent, read_body, write_answer
from launch.serve.kserve.models import MODELS
from launch.serve.kserve.processing import process
from launch.serve.kserve.requests import check_request
from launch.serve.kserve.row_requests import ModelFacts, RowRequest, read_row_requests
from launch.serve.kserve.stopping import is_stopping
from launch.serve.openai.calls import Answering
from launch.serve.openai.chat_template import ChatTemplate
from launch.serve.openai.prompts import PromptMaker
from launch.serve.openai.types import read_chat, read_completion
from launch.serve.reading.messages import Answered, Facts, Read, Refused, Stops, Task
from trtrun.api.prompts import Prompt, PromptReader
from trtrun.core.sampling_params import SamplingParams
from trtrun.tokens.text import Tokenizer

Result = Read | Answered | Stops | Refused


class Reader:
    """Reads for one model."""

    def __init__(self, facts: Facts, tokenizer: Tokenizer | None) -> None:
        self._facts = facts
        self._tokenizer = tokenizer
        template = None if facts.template is None else ChatTemplate(facts.template, facts.template_tokens)
        self._prompts = PromptReader(facts, tokenizer)
        self._makes_prompts = PromptMaker(facts.model_name, tokenizer, template)
        self._model_facts = ModelFacts(
            tokenizer, facts.vocab_size, facts.eos_token_ids, facts.draft_len, facts.excludes_prompt
        )

    def read(self, task: Task, body: bytes) -> tuple[Result, list[bytes]]:
        """What a request asks for, and the blocks that go with it; a refusal where it is wrong."""
        try:
            if task.kind == "completion":
                return self._read_completion(task, body)
            if task.kind == "chat":
                return self._read_chat(task, body)
            return self._read_tensors(task, body)
        except Refusal as refusal:
            return Refused.of(refusal), []

    def _read_completion(self, task: Task, body: bytes) -> tuple[Result, list[bytes]]:
        call = read_completion(parse_json(body), self._facts.model_name)
        prompts = self._makes_prompts.of_completion(call, task.most_tokens)
        return self._encode(task, prompts, [call.answering.sampling], _others(call.answering))

    def _read_chat(self, task: Task, body: bytes) -> tuple[Result, list[bytes]]:
        call = read_chat(parse_json(body), self._facts.model_name)
        prompt, draft = self._makes_prompts.of_chat(call, task.most_tokens)
        answering = call.answering.with_draft(draft)
        return self._encode(task, [prompt], [answering.sampling], _others(answering))

    def _encode(
        self, task: Task, prompts: Sequence[Prompt], sampling: Sequence[SamplingParams], others: Mapping[str, Any]
    ) -> tuple[Result, list[bytes]]:
        """A request to complete, its prompts as tokens; sampling is of all of them, or of each."""
        of_each = list(sampling) * len(prompts) if len(sampling) == 1 else list(sampling)
        found = distinct(of_each)
        check_counts(prompts, of_each)
        for prompt in prompts:
            if isinstance(prompt, str):
                check_text(prompt, self._tokenizer, task.most_tokens)
        with refusing():
            for parameters in found:
                self._prompts.check(parameters)
            tokens = [self._prompts.encode(prompt) for prompt in prompts]
        lengths = tuple(map(len, tokens))
        numbers = {id(parameters): number for number, parameters in enumerate(found)}
        read = Read(
            lengths=lengths,
            samplings=tuple(parameters.as_mapping() for parameters in found),
            places=tuple(numbers[id(parameters)] for parameters in of_each),
            others=dict(others),
        )
        is_too_long = max(lengths) > task.most_tokens
        return read, [] if is_too_long else [array("i", ids).tobytes() for ids in tokens]

    def _read_tensors(self, task: Task, raw: bytes) -> tuple[Result, list[bytes]]:
        """A request of KServe, in any of its forms."""
        model = MODELS[task.model]
        body = read_body(Sent(task.kind, model, raw, task.json_length))
        request = check_request(model, body.request_id, body.tensors, body.outputs, self._facts.max_batch_size)
        if model.is_processing:
            assert self._tokenizer is not None  # the front has looked
            response = process(request, self._tokenizer, self._model_facts)
            content, json_length = write_answer(task.kind, response, body)
            return Answered(num_inferences=request.batch_size, json_length=json_length), [content]
        if is_stopping(request):
            return Stops(request_id=body.request_id), []
        rows = read_row_requests(request, self._model_facts)
        others = {
            "request_id": body.request_id,
            "outputs": list(body.outputs),
            "binary": sorted(body.binary),
            "all_binary": body.all_binary,
            "rows": [_others(row) for row in rows],
        }
        return self._encode(task, [row.prompt for row in rows], [row.sampling for row in rows], others)


def _others(value: Answering | RowRequest) -> dict[str, Any]:
    """What travels of a request beside its prompts and parameters, by name."""
    names = [item.name for item in fields(value) if item.name not in ("prompt", "sampling")]
    return {name: getattr(value, name) for name in names}
