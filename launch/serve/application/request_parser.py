"""Parses requests of all protocols, from bytes to prompts and checked parameters: short ones in the frontend's event
loop, others in a parser worker, by the same functions.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import cached_property
from typing import Any

import msgspec
from typing_extensions import override

from launch.serve.admission.limits import check_counts, check_text, distinct
from launch.serve.admission.refusals import Refusal, wrap_errors
from launch.serve.api.anthropic.requests import count_tokens, in_words_of_messages, read_message
from launch.serve.api.kserve.grpc_messages import FORMS, Sent, read_body, write_answer
from launch.serve.api.kserve.http_bodies import InferBody
from launch.serve.api.kserve.models import MODELS, Model
from launch.serve.api.kserve.processing import process
from launch.serve.api.kserve.requests import check_request, is_stopping
from launch.serve.api.kserve.row_requests import AskedRows, ModelFacts, read_row_requests
from launch.serve.api.openai.calls import ChatCall, CompletionCall, PromptMaker
from launch.serve.api.openai.planning import AnswerPlanner
from launch.serve.api.openai.responses.requests import in_words_of_responses, read_response
from launch.serve.api.openai.tokenizing import detokenize, tokenize
from launch.serve.api.openai.types import ModelNames, read_chat, read_completion
from launch.serve.http.bodies import parse_json
from launch.serve.parsing.messages import (
    Answered,
    Facts,
    Read,
    Refused,
    Stops,
    Task,
)
from launch.serve.parsing.parsers import LoopParser, UnencodedRequest
from trtrun.api.prompts import PromptReader
from trtrun.chats.chat_template import ChatTemplate
from trtrun.tokens.text import Tokenizer

Result = Read | Answered | Stops | Refused

_TRANSLATED: Mapping[str, tuple[Callable[..., ChatCall], Callable[[Refusal], Refusal]]] = {
    "response": (read_response, in_words_of_responses),
    "message": (read_message, in_words_of_messages),
}
"""What reads each kind of request that becomes a chat, and what puts a refusal of the chat in its words."""


class RequestParser(LoopParser):
    """Parses requests for one model."""

    def __init__(self, facts: Facts, tokenizer: Tokenizer | None) -> None:
        self._facts = facts
        self._tokenizer = tokenizer
        self._model_facts = ModelFacts(
            tokenizer,
            facts.vocab_size,
            facts.eos_token_ids,
            facts.draft_len,
            facts.excludes_prompt,
            facts.lora_tasks,
        )

    @cached_property
    def _prompts(self) -> PromptReader:
        return PromptReader(self._facts, self._tokenizer)

    @cached_property
    def _prompt_maker(self) -> PromptMaker:
        facts, template = self._facts, None
        if facts.template is not None:
            template = ChatTemplate(facts.template, facts.template_tokens, facts.tool_template)
        return PromptMaker(facts.model_name, self._tokenizer, template, refuses_unseen_tools=facts.refuses_unseen_tools)

    @cached_property
    def _planner(self) -> AnswerPlanner:
        facts = self._facts
        template = facts.tool_template or facts.template
        return AnswerPlanner(facts.tool_format, facts.reasoning_format, template, self._tokenizer, self._prompts)

    def prepare(self) -> None:
        """Read what chats and guides need, before the first request."""
        _ = self._prompt_maker, self._planner
        self._prompts.prepare_guides()

    @override
    def parse_in_loop(
        self,
        kind: str,
        body: bytes,
        most_tokens: Callable[[], int],
        model: str = "",
        json_length: int = 0,
        adapters: Sequence[str] = (),
    ) -> UnencodedRequest | Stops | None:
        if kind == "completion":
            call = read_completion(parse_json(body), *self._names(adapters))
            if call.answering.sampling.guided is not None:
                return None
            return self._asked_completion(call, most_tokens)
        if kind not in FORMS or MODELS[model].is_processing:
            return None
        with wrap_errors():
            found = self._parse_tensors(read_body(Sent(kind, MODELS[model], body, json_length)), MODELS[model])
        if isinstance(found, UnencodedRequest) and any(row.guided is not None for row in found.sampling):
            return None
        return found

    def read(self, task: Task, body: bytes) -> tuple[Result, list[bytes]]:
        """Parse a request and encode its prompts, in a worker.

        Returns:
            What the request asks for, or why it is refused; and the blocks that follow the reply.
        """
        try:
            if task.kind in ("tokenize", "detokenize", "count"):
                return self._answer_tokens(task, body)
            if task.kind in FORMS:
                with wrap_errors():
                    return self._read_tensors(task, body)
            return self._read_text(task, body)
        except Refusal as refusal:
            return Refused.of(refusal), []

    def _read_text(self, task: Task, body: bytes) -> tuple[Result, list[bytes]]:
        """Parse and encode a completion, or a request that is a chat or becomes one."""
        values, names = parse_json(body), self._names(task.adapters)
        if task.kind == "completion":
            call = read_completion(values, *names)
            return self._encode(task, self._asked_completion(call, lambda: task.most_tokens))
        if task.kind == "chat":
            return self._encode(task, self._parse_chat(read_chat(values, *names), task.most_tokens))
        read, in_its_words = _TRANSLATED[task.kind]
        chat = read(values, *names)
        try:
            return self._encode(task, self._parse_chat(chat, task.most_tokens))
        except Refusal as refusal:
            raise in_its_words(refusal) from None

    def _asked_completion(self, call: CompletionCall, most_tokens: Callable[[], int]) -> UnencodedRequest:
        is_needed = call.encoding.is_needed
        prompts = self._prompt_maker.of_completion(call, most_tokens()) if is_needed else call.prompts
        return UnencodedRequest.of(prompts, call.answering.sampling, call.answering)

    def _parse_chat(self, call: ChatCall, most_tokens: int) -> UnencodedRequest:
        prompt, draft = self._prompt_maker.of_chat(call, most_tokens)
        answering = self._planner.plan(call, prompt).with_draft(draft)
        return UnencodedRequest.of([prompt], answering.sampling, answering)

    def _names(self, adapters: Sequence[str]) -> ModelNames:
        return ModelNames(self._facts.model_name, adapters, self._facts.sampling_defaults)

    def _parse_tensors(self, body: InferBody, model: Model) -> UnencodedRequest | Stops:
        """Parse a request of KServe for a generating model, in any of its forms."""
        request = check_request(model, body.request_id, body.tensors, body.outputs, self._facts.max_batch_size)
        if is_stopping(request):
            return Stops(request_id=body.request_id)
        rows = read_row_requests(request, self._model_facts)
        others = AskedRows(body.request_id, tuple(body.outputs), body.binary, body.all_binary, tuple(rows))
        return UnencodedRequest([row.prompt for row in rows], [row.sampling for row in rows], others)

    def _read_tensors(self, task: Task, raw: bytes) -> tuple[Result, list[bytes]]:
        """Parse a request of KServe, or answer it if its model needs no engine."""
        model = MODELS[task.model]
        body = read_body(Sent(task.kind, model, raw, task.json_length))
        if model.is_processing:
            request = check_request(model, body.request_id, body.tensors, body.outputs, self._facts.max_batch_size)
            assert self._tokenizer is not None  # the frontend has looked
            response = process(request, self._tokenizer, self._model_facts)
            content, json_length = write_answer(task.kind, response, body)
            return Answered(num_inferences=request.batch_size, json_length=json_length), [content]
        found = self._parse_tensors(body, model)
        return (found, []) if isinstance(found, Stops) else self._encode(task, found)

    def _answer_tokens(self, task: Task, body: bytes) -> tuple[Result, list[bytes]]:
        values, names = parse_json(body), self._names(task.adapters)
        if task.kind == "tokenize":
            told = tokenize(values, names, self._tokenizer, self._prompt_maker, task.most_tokens)
        elif task.kind == "count":
            told = count_tokens(values, names, self._prompt_maker, task.most_tokens)
        else:
            with wrap_errors():
                told = detokenize(values, names, self._tokenizer, self._prompts)
        return Answered(num_inferences=1), [msgspec.json.encode(told)]

    def _encode(self, task: Task, request: UnencodedRequest) -> tuple[Result, list[bytes]]:
        """Check a request and make tokens of its prompts."""
        prompts, found = request.prompts, distinct(request.sampling)
        check_counts(prompts, request.sampling)
        for prompt in prompts:
            if isinstance(prompt, str):
                check_text(prompt, self._tokenizer, task.most_tokens)
        with wrap_errors():
            for parameters in found:
                self._prompts.check(parameters)
            tokens = [self._prompts.encode(prompt) for prompt in prompts]
        lengths = tuple(map(len, tokens))
        numbers = {id(parameters): number for number, parameters in enumerate(found)}
        read = Read(
            lengths=lengths,
            samplings=tuple(parameters.as_mapping() for parameters in found),
            places=tuple(numbers[id(parameters)] for parameters in request.sampling),
            others=_others(request.others),
        )
        is_too_long = max(lengths) > task.most_tokens
        return read, [] if is_too_long else [array("i", ids).tobytes() for ids in tokens]


def _others(asked: Any) -> dict[str, Any]:
    """What travels of a request beside its prompts and parameters, by name."""
    others = {item.name: getattr(asked, item.name) for item in fields(asked)}
    others.pop("prompt", None), others.pop("sampling", None)
    if isinstance(asked, AskedRows):
        others |= {"binary": sorted(asked.binary), "rows": [_others(row) for row in asked.rows]}
    return others
