"""What a process runs that reads requests of all protocols for a frontend, whatever their length: from bytes to tokens
and checked parameters, one request after the other, until the frontend is gone.

    python -m launch.serve.application.parser_worker        its standard input is a socket

What it makes of them is what the frontend's event loop makes of short ones, by the same functions. The kernel bounds
it: the processor time of a task, and the memory that it may have. A task that goes beyond ends the process, or is
refused; the frontend starts another one. It ends with the frontend, and with nothing else that a terminal or a batch
system sends to all, as it has a session of its own: then requests are still read. It knows bodies, the tokenizer and
the chat template. It does not know who asks, or what becomes of it.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import sys
import traceback
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec

from launch.jobs.mpi.parent_death import end_with_parent
from launch.serve.admission.limits import check_counts, check_text, distinct
from launch.serve.admission.refusals import Kind, Refusal, refusing
from launch.serve.api.anthropic.requests import count_tokens, in_words_of_messages, read_message
from launch.serve.api.kserve.grpc_messages import Sent, read_body, write_answer
from launch.serve.api.kserve.models import MODELS
from launch.serve.api.kserve.processing import process
from launch.serve.api.kserve.requests import check_request, is_stopping
from launch.serve.api.kserve.row_requests import ModelFacts, RowRequest, read_row_requests
from launch.serve.api.openai.calls import Answering, ChatCall
from launch.serve.api.openai.planning import AnswerPlanner
from launch.serve.api.openai.prompts import PromptMaker, detokenize, tokenize
from launch.serve.api.openai.responses.requests import in_words_of_responses, read_response
from launch.serve.api.openai.types import ModelNames, read_chat, read_completion
from launch.serve.http.bodies import parse_json
from launch.serve.parsing.messages import (
    BLOCK_HEAD_BYTES,
    CHANGED,
    HEAD_BYTES,
    Answered,
    Facts,
    Read,
    Refused,
    Reply,
    Stops,
    Task,
    pack,
    too_much_memory,
    unpack,
)
from trtrun.api.prompts import Prompt, PromptReader
from trtrun.chats.chat_template import ChatTemplate
from trtrun.core.sampling_params import SamplingParams
from trtrun.errors import CheckpointError
from trtrun.tokens.text import Tokenizer, hash_tokenizer_files, read_tokenizer

Result = Read | Answered | Stops | Refused

_TRANSLATED: Mapping[str, tuple[Callable[..., ChatCall], Callable[[Refusal], Refusal]]] = {
    "response": (read_response, in_words_of_responses),
    "message": (read_message, in_words_of_messages),
}
"""Who reads a request that becomes a chat, and who says what is wrong with the chat in its words."""


class RequestParser:
    """Reads for one model."""

    def __init__(self, facts: Facts, tokenizer: Tokenizer | None) -> None:
        self._facts = facts
        self._tokenizer = tokenizer
        template = None
        if facts.template is not None:
            template = ChatTemplate(facts.template, facts.template_tokens, facts.tool_template)
        self._prompts = PromptReader(facts, tokenizer)
        self._planner = AnswerPlanner(
            facts.tool_format,
            facts.reasoning_format,
            facts.tool_template or facts.template,
            tokenizer,
            self._prompts,
        )
        self._makes_prompts = PromptMaker(
            facts.model_name, tokenizer, template, refuses_unseen_tools=facts.refuses_unseen_tools
        )
        self._model_facts = ModelFacts(
            tokenizer,
            facts.vocab_size,
            facts.eos_token_ids,
            facts.draft_len,
            facts.excludes_prompt,
            facts.lora_tasks,
        )

    def prepare(self) -> None:
        """Have read what guides need, before the first request."""
        self._prompts.prepare_guides()

    def read(self, task: Task, body: bytes) -> tuple[Result, list[bytes]]:
        """What a request asks for, and the blocks that go with it; a refusal where it is wrong."""
        try:
            if task.kind == "completion":
                return self._read_completion(task, body)
            if task.kind == "chat":
                return self._read_chat(task, read_chat(parse_json(body), *self._names(task)))
            if task.kind in _TRANSLATED:
                return self._read_translated(task, body)
            if task.kind in ("tokenize", "detokenize", "count"):
                return self._answer_tokens(task, body)
            with refusing():
                return self._read_tensors(task, body)
        except Refusal as refusal:
            return Refused.of(refusal), []

    def _read_completion(self, task: Task, body: bytes) -> tuple[Result, list[bytes]]:
        call = read_completion(parse_json(body), *self._names(task))
        prompts = self._makes_prompts.of_completion(call, task.most_tokens)
        return self._encode(task, prompts, [call.answering.sampling], _others(call.answering))

    def _read_translated(self, task: Task, body: bytes) -> tuple[Result, list[bytes]]:
        """A request that becomes a chat."""
        read, in_its_words = _TRANSLATED[task.kind]
        call = read(parse_json(body), *self._names(task))
        try:
            return self._read_chat(task, call)
        except Refusal as refusal:
            raise in_its_words(refusal) from None

    def _read_chat(self, task: Task, call: ChatCall) -> tuple[Result, list[bytes]]:
        prompt, draft = self._makes_prompts.of_chat(call, task.most_tokens)
        answering = self._planner.plan(call, prompt).with_draft(draft)
        return self._encode(task, [prompt], [answering.sampling], _others(answering))

    def _answer_tokens(self, task: Task, body: bytes) -> tuple[Result, list[bytes]]:
        values, names = parse_json(body), self._names(task)
        if task.kind == "tokenize":
            told = tokenize(values, names, self._tokenizer, self._makes_prompts, task.most_tokens)
        elif task.kind == "count":
            told = count_tokens(values, names, self._makes_prompts, task.most_tokens)
        else:
            with refusing():
                told = detokenize(values, names, self._tokenizer, self._prompts)
        return Answered(num_inferences=1), [msgspec.json.encode(told)]

    def _names(self, task: Task) -> ModelNames:
        return ModelNames(self._facts.model_name, task.adapters, self._facts.sampling_defaults)

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
            assert self._tokenizer is not None  # the frontend has looked
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


MOST_KEPT_BYTES = 1 << 28
"""How much a process may have grown to read another request: memory that Python does not give back."""

_CHANGED_LINE = "the tokenizer's files have changed since the server has read them: start the server again"


def main() -> None:
    """Read on."""
    parent = int(sys.argv[1])
    end_with_parent(signal.SIGKILL)
    if os.getppid() != parent:
        return
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with socket.socket(fileno=os.dup(0)) as frontend:
        facts = unpack(_read(frontend, HEAD_BYTES), Facts)
        os.nice(facts.niceness)
        parser = _make_parser(facts)
        if parser is not None:
            parser.prepare()
        _read_on(frontend, parser, facts)


def _make_parser(facts: Facts) -> RequestParser | None:
    """Who reads; None where the tokenizer's files are not those that the frontend has read."""
    if facts.tokenizer is None:
        return RequestParser(facts, None)
    directory = Path(facts.tokenizer)
    try:
        tokenizer = read_tokenizer(directory)
    except CheckpointError:
        tokenizer = None  # as while they are being replaced
    # Behind the reading: whatever has come between shows.
    return RequestParser(facts, tokenizer) if hash_tokenizer_files(directory) == facts.tokenizer_hash else None


def _read_on(frontend: socket.socket, parser: RequestParser | None, facts: Facts) -> None:
    """A task after the other."""
    has_at_first = _pages()[0]
    _bound_memory(facts.most_bytes)
    while head := _receive(frontend, HEAD_BYTES):
        task = unpack(_receive(frontend, int.from_bytes(head, "big")), Task)
        body = _receive(frontend, int.from_bytes(_receive(frontend, BLOCK_HEAD_BYTES), "big"))
        signal.setitimer(signal.ITIMER_PROF, task.seconds)  # what it sends then ends the process
        result, blocks = _do(parser, task, body)
        signal.setitimer(signal.ITIMER_PROF, 0)
        is_last = parser is None or _pages()[0] - has_at_first > MOST_KEPT_BYTES
        frontend.sendall(pack(Reply(result=result, sizes=tuple(map(len, blocks)), is_last=is_last)))
        for block in blocks:
            frontend.sendall(block)
        del result, blocks, body
        if is_last:
            return


def _do(parser: RequestParser | None, task: Task, body: bytes) -> tuple[Result, list[bytes]]:
    if parser is None:
        return Refused(kind=Kind.FAILED.name, reason=_CHANGED_LINE, field=None, code=CHANGED), []
    try:
        return parser.read(task, body)
    except MemoryError:
        return Refused.of(too_much_memory()), []
    except Exception:  # a defect, whose traceback goes where the frontend's goes
        traceback.print_exc()
        return Refused(kind=Kind.FAILED.name, reason="the server failed; its log says how", field=None, code=None), []


def _bound_memory(most_bytes: int) -> None:
    """Let this process have so much more than it has now, as far as it may have that."""
    wanted, (_, hard) = _pages()[1] + most_bytes, resource.getrlimit(resource.RLIMIT_AS)
    # The hard limit stays: an ordinary user may not raise it.
    resource.setrlimit(resource.RLIMIT_AS, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # requests are nobody's but the client's


def _pages() -> tuple[int, int]:
    """Bytes of this process that are in memory, and of its address space."""
    size, resident = Path("/proc/self/statm").read_text(encoding="ascii").split()[:2]
    return int(resident) * resource.getpagesize(), int(size) * resource.getpagesize()


def _read(frontend: socket.socket, head_bytes: int) -> bytes:
    return _receive(frontend, int.from_bytes(_receive(frontend, head_bytes), "big"))


def _receive(frontend: socket.socket, count: int) -> bytes:
    """So many bytes; none where the frontend has ended the connection."""
    found = bytearray(count)
    view, num_received = memoryview(found), 0
    while num_received < count:
        got = frontend.recv_into(view[num_received:])
        if not got:
            return b""
        num_received += got
    return bytes(found)


if __name__ == "__main__":
    main()
