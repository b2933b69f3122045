"""What requests of the OpenAI API ask for, once they are read: plain data, and the messages of chats, read, checked,
and made what chat templates see.

It knows prompts, sampling parameters and JSON values, and no template.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from launch.serve.door.refusals import Kind, Refusal
from trtrun.api.prompts import Prompt
from trtrun.core.sampling_params import SamplingParams
from trtrun.core.values import check_characters, show_value
from trtrun.errors import InvalidRequestError, nearest

ROLES = ("system", "developer", "user", "assistant")
REASONING = ("reasoning_content", "reasoning")
"""What an assistant thought, in the words of several servers."""

_FIELDS = ("role", "content", "name", *REASONING)
_EMPTY: Mapping[str, object] = {"tool_calls": [], "annotations": []}
"""What answers have beside their text, at values that say nothing: clients send answers back as they came."""


def read_messages(value: object) -> list[dict[str, str]]:
    """The messages of a chat, each content as one text.

    Raises:
        Refusal: there is none, or one is none, or has what is not read here.
    """
    if not isinstance(value, list) or not value:
        raise _wrong(f"messages must be a list with one message at least, not {show_value(value)}")
    return [_read_message(f"messages[{place}]", item) for place, item in enumerate(value)]


def read_prediction(value: object) -> str:
    """The text that an answer is expected to be; empty for null.

    Raises:
        Refusal: it is none.
    """
    if value is None:
        return ""
    content = value.get("content") if isinstance(value, dict) and value.get("type") == "content" else None
    if isinstance(content, list):
        texts = [part.get("text") if isinstance(part, dict) else None for part in content]
        content = "".join(map(str, texts)) if all(isinstance(text, str) for text in texts) else None
    if not isinstance(content, str):
        line = f'prediction must be {{"type": "content", "content": "…"}}, not {show_value(value)}'
        raise Refusal(Kind.INVALID, line, "prediction")
    return read_text("prediction", "prediction", content)


def read_text(name: str, field: str, value: str) -> str:
    """A text that has UTF-8.

    Raises:
        Refusal: it has none.
    """
    try:
        check_characters(name, value)
    except InvalidRequestError as error:
        raise Refusal(Kind.INVALID, str(error), field) from None
    return value


def _read_message(where: str, value: object) -> dict[str, str]:
    if not isinstance(value, dict):
        raise _wrong(f"{where} must be an object, not {show_value(value)}")
    role = value.get("role")
    for name, item in value.items():
        is_known = name in _FIELDS and (name not in REASONING or role == "assistant")
        if not is_known and item is not None and item != _EMPTY.get(name):
            known = nearest(name, _FIELDS)
            raise _wrong(f"{where}: {show_value(name)} is unknown or not supported{known}")
    if role not in ROLES:
        raise _wrong(f"{where}.role must be one of {', '.join(ROLES)}, not {show_value(role)}")
    content = value.get("content")
    if content is None and role == "assistant":
        content = ""  # an answer that is all thoughts
    if isinstance(content, list):
        content = "\n".join(_read_part(f"{where}.content[{place}]", part) for place, part in enumerate(content))
    if not isinstance(content, str):
        raise _wrong(f"{where}.content must be a text or a list of text parts, not {show_value(content)}")
    message = {"role": role, "content": read_text(f"{where}.content", "messages", content)}
    for name in ("name", *REASONING):
        text = value.get(name)
        if text is not None:
            message[name] = _read_own_text(f"{where}.{name}", text)
    return message


def _read_own_text(where: str, value: object) -> str:
    if not isinstance(value, str):
        raise _wrong(f"{where} must be a text, not {show_value(value)}")
    return read_text(where, "messages", value)


def _read_part(where: str, value: Any) -> str:
    text = value.get("text") if isinstance(value, dict) and value.get("type") == "text" else None
    if not isinstance(text, str):
        raise _wrong(f'{where} must be {{"type": "text", "text": "…"}}: this model reads text alone')
    return text


def _wrong(line: str) -> Refusal:
    return Refusal(Kind.INVALID, line, "messages")


@dataclass(frozen=True)
class Answering:
    """How a request wants its answer.

    Attributes:
        sampling: of all its choices.
        stream: piece by piece.
        include_usage: a last piece says what the request took.
        continuous_usage: and each piece says what it took so far.
        obfuscates: pieces hide by their length how long their text is.
        return_token_ids: choices have their tokens beside their text.
        return_token_origins: choices say how each token came.
        return_token_texts: and what each token's part of the text is.
        tokens_as_ids: log probabilities name tokens by their ids.
        request_id: that the answer's own ends with; None for a new one.
        echo: choices begin with their prompt.
        prompt_logprobs: alternatives of each token of the prompt, in the field of that name; None for no such field.
    """

    sampling: SamplingParams
    stream: bool
    include_usage: bool
    return_token_ids: bool
    return_token_origins: bool = False
    return_token_texts: bool = False
    continuous_usage: bool = False
    obfuscates: bool = False
    tokens_as_ids: bool = False
    request_id: str | None = None
    echo: bool = False
    prompt_logprobs: int | None = None

    def with_draft(self, token_ids: Sequence[int]) -> Answering:
        """The same with a draft for its choices, where it has none of its own and may be drafted for."""
        sampling = self.sampling
        if not token_ids or sampling.draft_token_ids or sampling.draft_len == 0:
            return self
        return replace(self, sampling=replace(sampling, draft_token_ids=tuple(token_ids)))

    @property
    def shows_tokens(self) -> bool:
        """Whether a piece without text says something all the same."""
        return self.return_token_ids or self.return_token_origins or self.return_token_texts


@dataclass(frozen=True)
class Encoding:
    """How a text becomes tokens, and how many of a prompt are kept.

    Attributes:
        adds_special_tokens: whether those are added that the tokenizer adds.
        most_tokens: that are kept; -1 for as many as there is room for, None for all.
        keeps_end: whether the last ones are.
    """

    adds_special_tokens: bool
    most_tokens: int | None = None
    keeps_end: bool = True

    @property
    def is_needed(self) -> bool:
        """Whether the prompts of a completion do not go on as they are."""
        return self.most_tokens is not None or not self.adds_special_tokens


@dataclass(frozen=True)
class CompletionCall:
    """A request to /v1/completions."""

    prompts: Sequence[Prompt]
    encoding: Encoding
    answering: Answering


@dataclass(frozen=True)
class Rendering:
    """What a chat template is given beside messages.

    Attributes:
        add_generation_prompt: the text ends where an answer begins.
        continue_final_message: it ends in the last message.
        documents: that the model may answer from.
        effort: how much the model is to think, in OpenAI's words.
        values: further ones, by name.
    """

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    documents: Sequence[Mapping[str, Any]] | None = None
    effort: str | None = None
    values: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ChatCall:
    """A request to /v1/chat/completions.

    Attributes:
        messages: each has `role`, `content` as text, and perhaps `name` and what the assistant thought.
        prediction: a draft for the answer; empty where there is none.
        rendering, encoding, answering: how it becomes a prompt, and what is wanted of the answer.
    """

    messages: Sequence[Mapping[str, str]]
    prediction: str
    rendering: Rendering
    encoding: Encoding
    answering: Answering
