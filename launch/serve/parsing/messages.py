"""What the frontend and the processes that read for it say to each other: facts once, then a task and a reply, in
turns; MessagePack behind its length, and blocks behind that.

    4 bytes, big-endian: length of the message │ the message │ 8 bytes: length of the block │ the block     a task
    4 bytes, big-endian: length of the message │ the message │ its blocks, as long as it says               a reply

Lists that may be long travel as blocks of bytes: token ids as 32 bits each. Both ends are this program's own.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from launch.serve.admission.refusals import Kind, Refusal

CHANGED = "files_changed"
"""The code of a request's refusal where the tokenizer is not the one that the frontend has."""


class _Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="message"):
    """A message says its kind."""


class Facts(_Message, frozen=True, tag="facts"):
    """What reading takes of the served model.

    Attributes:
        tokenizer: its directory; None where there is none.
        tokenizer_hash: of the files that the frontend has read it from; see hash_tokenizer_files.
        template, template_tokens: of chats; None where there is none.
        tool_template: of chats with tools, where it is another one.
        tool_format, reasoning_format: in which chats' texts have calls and thoughts; empty where there are none.
        model_name: what OpenAI's clients call the model.
        vocab_size, eos_token_ids: of the model.
        draft_len, excludes_prompt, lora_tasks: see kserve's ModelFacts.
        refuses_unseen_tools: chats whose tools the template does not show.
        max_batch_size: rows that a request of KServe may have.
        sampling_defaults: of OpenAI's and Anthropic's requests that do not say them, by the names of SamplingParams.
        most_bytes: of memory beyond what the process has once it is ready.
        niceness: of the process.
    """

    tokenizer: str | None
    template: str | None
    template_tokens: dict[str, str]
    model_name: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    draft_len: int
    excludes_prompt: bool | None
    max_batch_size: int
    tokenizer_hash: str = ""
    tool_template: str | None = None
    tool_format: str = ""
    reasoning_format: str = ""
    sampling_defaults: dict[str, int | float] = {}
    most_bytes: int = 0
    niceness: int = 0
    lora_tasks: tuple[str, ...] = ()
    refuses_unseen_tools: bool = True


class Task(_Message, frozen=True, tag="task"):
    """Read the request whose bytes follow.

    Attributes:
        kind: of the request: `completion`, `chat`, `response`, `message`, `count` (tokens of a message), `tokenize`,
            `detokenize`, `infer`, `generate`, or `call` for a message of gRPC.
        seconds: of processor time that it may take.
        most_tokens: of a prompt; longer ones are counted, and not sent.
        model: of KServe, by its name.
        json_length: of a body whose end is bytes of tensors.
        adapters: names of those that may be asked for.
    """

    kind: str
    seconds: float
    most_tokens: int
    model: str = ""
    json_length: int = 0
    adapters: tuple[str, ...] = ()


class Read(_Message, frozen=True, tag="read"):
    """A request to complete. A block for each prompt follows, unless one is too long.

    Attributes:
        lengths: tokens of each prompt.
        samplings: parameters, as mappings.
        places: for each prompt, which of these are its own.
        others: the rest of what it asks for, by the names that its protocol has.
    """

    lengths: tuple[int, ...]
    samplings: tuple[dict[str, Any], ...]
    places: tuple[int, ...]
    others: dict[str, Any] = {}


class Answered(_Message, frozen=True, tag="answered"):
    """A request that needs no engine. Its answer follows, as one block.

    Attributes:
        num_inferences: results in it.
        json_length: where bytes of tensors follow the answer's JSON.
    """

    num_inferences: int
    json_length: int | None = None


class Stops(_Message, frozen=True, tag="stops"):
    """A request that stops those of the same id."""

    request_id: str


class Refused(_Message, frozen=True, tag="refused"):
    """The request is wrong; see Refusal."""

    kind: str
    reason: str
    field: str | None
    code: str | None

    @classmethod
    def of(cls, refusal: Refusal) -> Refused:
        """The message for a refusal."""
        return cls(kind=refusal.kind.name, reason=str(refusal), field=refusal.field, code=refusal.code)

    def refusal(self) -> Refusal:
        """The refusal again."""
        return Refusal(Kind[self.kind], self.reason, self.field, self.code)


class Reply(_Message, frozen=True, tag="reply"):
    """What came of a task.

    Attributes:
        result: of it.
        sizes: bytes of the blocks that follow.
        is_last: the process has grown too large to read another one.
    """

    result: Read | Answered | Stops | Refused
    sizes: tuple[int, ...] = ()
    is_last: bool = False


def too_much_memory() -> Refusal:
    """What a request is told that cannot be read within the memory of a process."""
    line = "reading the request takes more memory than it may: send less at once, or a simpler guide"
    return Refusal(Kind.TOO_LARGE, line)


HEAD_BYTES = 4
"""Bytes of the length of a message."""

BLOCK_HEAD_BYTES = 8
"""Bytes of the length of a task's block."""

_ENCODER = msgspec.msgpack.Encoder()
M = TypeVar("M", Facts, Task, Reply)


def pack(message: Facts | Task | Reply) -> bytes:
    """A message behind its length."""
    body = _ENCODER.encode(message)
    return len(body).to_bytes(HEAD_BYTES, "big") + body


def unpack(body: bytes, kind: type[M]) -> M:
    """A message again; the process that sent it is one of this program's.

    Raises:
        msgspec.DecodeError: it is none of that kind.
    """
    return msgspec.msgpack.decode(body, type=kind)
