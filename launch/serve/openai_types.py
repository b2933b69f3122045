"""Requests of the OpenAI API: which fields there are, what they mean here, and what is refused.

Fields become SamplingParams, which checks their values. A field that would change the answer and is not supported is
refused; one of OpenAI's that changes nothing is accepted; any other name is refused with the nearest known one. It
knows JSON values, and no HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from launch.serve.refusals import Kind, Refusal
from trtrun.errors import InvalidRequestError, nearest
from trtrun.prompts import Prompt
from trtrun.sampling_params import LARGEST_COUNT, SamplingParams
from trtrun.values import find_surrogate, read_flag, show_value

SAMPLING_FIELDS = frozenset(item.name for item in fields(SamplingParams)) - {"logprobs"}
"""Fields that are SamplingParams' own: OpenAI's, and those beyond them (top_k, min_p, ignore_eos, …)."""

IGNORED_FIELDS = frozenset(
    {
        "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
        "parallel_tool_calls",
    }
)  # fmt: skip
"""OpenAI's own that change nothing here: accepted, and not looked at."""

UNSUPPORTED_FIELDS: Mapping[str, tuple[Any, ...]] = {
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "verbosity": (),
    "web_search_options": (),
}
"""OpenAI's own that would change the answer, with the values that ask for nothing; null does so everywhere."""

_TOKEN_FLAGS = {"return_token_ids", "return_token_origins", "return_token_texts"}
_COMMON = {"model", "stream", "stream_options", "logprobs"} | _TOKEN_FLAGS
COMPLETION_FIELDS = SAMPLING_FIELDS | IGNORED_FIELDS | UNSUPPORTED_FIELDS.keys() | _COMMON | {"prompt"}
CHAT_FIELDS = (
    SAMPLING_FIELDS
    | IGNORED_FIELDS
    | UNSUPPORTED_FIELDS.keys()
    | _COMMON
    | {"messages", "top_logprobs", "max_completion_tokens"}
)

COMPLETION_TOKENS = 16
"""max_tokens of a completion that does not say it, as OpenAI has it. A chat then goes on to the end of the context."""

_ROLES = ("system", "developer", "user", "assistant")


@dataclass(frozen=True)
class Answering:
    """How a request wants its answer.

    Attributes:
        sampling: of all its choices.
        stream: piece by piece.
        include_usage: a last piece says what the request took.
        return_token_ids: choices have their tokens beside their text.
        return_token_origins: choices say how each token came.
        return_token_texts: and what each token's part of the text is.
    """

    sampling: SamplingParams
    stream: bool
    include_usage: bool
    return_token_ids: bool
    return_token_origins: bool = False
    return_token_texts: bool = False

    @property
    def shows_tokens(self) -> bool:
        """Whether a piece without text says something all the same."""
        return self.return_token_ids or self.return_token_origins or self.return_token_texts


@dataclass(frozen=True)
class CompletionCall:
    """A request to /v1/completions."""

    prompts: Sequence[Prompt]
    answering: Answering


@dataclass(frozen=True)
class ChatCall:
    """A request to /v1/chat/completions; each message has `role`, `content` as text, and perhaps `name`."""

    messages: Sequence[Mapping[str, str]]
    answering: Answering


def read_completion(values: object, model_name: str) -> CompletionCall:
    """What a body of /v1/completions asks for.

    Raises:
        Refusal: a field is unknown, not supported or wrong.
    """
    given = _read_fields(values, COMPLETION_FIELDS, model_name)
    if "prompt" not in given:
        raise _wrong("prompt", "prompt is missing: a text, a list of token ids, or a list of these")
    prompts = _read_prompts(given["prompt"])
    logprobs = given.get("logprobs")
    if isinstance(logprobs, bool):
        raise _wrong("logprobs", f"logprobs must be a whole number, not {show_value(logprobs)}")
    return CompletionCall(prompts, _read_answering(given, logprobs, COMPLETION_TOKENS))


def read_chat(values: object, model_name: str) -> ChatCall:
    """What a body of /v1/chat/completions asks for.

    Raises:
        Refusal: a field is unknown, not supported or wrong.
    """
    given = _read_fields(values, CHAT_FIELDS, model_name)
    if "messages" not in given:
        raise _wrong("messages", 'messages is missing: a list such as [{"role": "user", "content": "…"}]')
    messages = _read_messages(given["messages"])
    wants, most = _flag(given, "logprobs"), given.get("top_logprobs")
    if most is not None and not wants:
        raise _wrong("top_logprobs", "top_logprobs needs logprobs to be true")
    if "max_completion_tokens" in given:
        if given.get("max_tokens", given["max_completion_tokens"]) != given["max_completion_tokens"]:
            raise _wrong("max_tokens", "max_tokens and max_completion_tokens mean the same: give one of them")
        given["max_tokens"] = given["max_completion_tokens"]
    return ChatCall(messages, _read_answering(given, (most or 0) if wants else None, LARGEST_COUNT))


def _read_fields(values: object, known: frozenset[str], model_name: str) -> dict[str, Any]:
    """The fields that say something, all of them known and supported; null means the default everywhere."""
    if not isinstance(values, dict):
        raise Refusal(Kind.INVALID, f"the body must be a JSON object, not {show_value(values)}")
    for name in values:
        if name not in known:
            told = name[:100].encode(errors="backslashreplace").decode()  # half a character cannot be sent back
            line = f"unknown field {show_value(name)}{nearest(name, known)}"
            raise Refusal(Kind.INVALID, line, told, "unknown_field")
    given = {name: value for name, value in values.items() if value is not None and name not in IGNORED_FIELDS}
    for name, harmless in UNSUPPORTED_FIELDS.items():
        if name not in given:
            continue
        value = given.pop(name)
        if value not in harmless and not (name == "best_of" and value == given.get("n", 1)):
            raise _wrong(name, f"{name} is not supported here: leave it out", "unsupported_field")
    model = given.get("model")
    if model != model_name:
        said = "model is missing" if model is None else f"there is no model {show_value(model)}"
        raise Refusal(
            Kind.UNKNOWN_MODEL, f"{said}: this server has {show_value(model_name)}", "model", "model_not_found"
        )
    return given


def _read_answering(given: Mapping[str, Any], logprobs: object, max_tokens: int) -> Answering:
    stream = _flag(given, "stream")
    options = given.get("stream_options", {})
    if not isinstance(options, dict):
        raise _wrong("stream_options", f"stream_options must be an object, not {show_value(options)}")
    for name in options:
        if name != "include_usage":
            raise _wrong(
                "stream_options",
                f"unknown field {show_value(name)} of stream_options{nearest(name, ['include_usage'])}",
            )
    if options and not stream:
        raise _wrong("stream_options", "stream_options needs stream to be true")
    # OpenAI's defaults, where trtrun's are greedy.
    sampling: dict[str, object] = {"temperature": 1.0, "max_tokens": max_tokens, "logprobs": logprobs}
    sampling |= {name: given[name] for name in SAMPLING_FIELDS & given.keys()}
    try:
        parameters = SamplingParams.from_mapping(sampling)
    except InvalidRequestError as error:
        raise _wrong(_field_of(str(error)), str(error)) from None
    flags = {name: _flag(given, name) for name in _TOKEN_FLAGS}
    return Answering(parameters, stream, _flag(options, "include_usage"), **flags)


def _read_prompts(value: object) -> list[Prompt]:
    """A text, token ids, or a list of texts and lists of token ids."""
    if isinstance(value, str):
        return [_read_text("prompt", value)]
    if not isinstance(value, list) or not value:
        raise _wrong(
            "prompt", f"prompt must be a text, a list of token ids, or a list of these, not {show_value(value)}"
        )
    if type(value[0]) is int:
        return [_read_tokens(value)]
    return [_read_text("prompt", item) if isinstance(item, str) else _read_tokens(item) for item in value]


def _read_tokens(value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(token) is int for token in value):
        raise _wrong(
            "prompt", f"prompt must be a text, a list of token ids, or a list of these, not {show_value(value)}"
        )
    return tuple(value)


def _read_text(name: str, value: str) -> str:
    if surrogate := find_surrogate(value):
        raise _wrong(name, f"{name} holds {surrogate}, half of a surrogate pair, which is no character")
    return value


def _read_messages(value: object) -> list[dict[str, str]]:
    if not isinstance(value, list) or not value:
        raise _wrong("messages", f"messages must be a list with one message at least, not {show_value(value)}")
    return [_read_message(f"messages[{place}]", item) for place, item in enumerate(value)]


def _read_message(where: str, value: object) -> dict[str, str]:
    """One message, its content as one text."""
    if not isinstance(value, dict):
        raise _wrong("messages", f"{where} must be an object, not {show_value(value)}")
    for name, item in value.items():
        if name not in ("role", "content", "name") and item is not None:
            known = nearest(name, ("role", "content", "name"))
            raise _wrong("messages", f"{where}: {show_value(name)} is unknown or not supported{known}")
    role, content, name = value.get("role"), value.get("content"), value.get("name")
    if role not in _ROLES:
        raise _wrong("messages", f"{where}.role must be one of {', '.join(_ROLES)}, not {show_value(role)}")
    if isinstance(content, list):
        content = "\n".join(_read_part(f"{where}.content[{place}]", part) for place, part in enumerate(content))
    if not isinstance(content, str):
        raise _wrong("messages", f"{where}.content must be a text or a list of text parts, not {show_value(content)}")
    message = {"role": role, "content": _read_text(f"{where}.content", content)}
    if name is not None:
        if not isinstance(name, str):
            raise _wrong("messages", f"{where}.name must be a text, not {show_value(name)}")
        message["name"] = _read_text(f"{where}.name", name)
    return message


def _read_part(where: str, value: object) -> str:
    text = value.get("text") if isinstance(value, dict) and value.get("type") == "text" else None
    if not isinstance(text, str):
        raise _wrong("messages", f'{where} must be {{"type": "text", "text": "…"}}: this model reads text alone')
    return text


def _flag(values: Mapping[str, Any], name: str) -> bool:
    try:
        return read_flag(name, values.get(name, False))
    except InvalidRequestError as error:
        raise _wrong(name, str(error)) from None


def _field_of(line: str) -> str | None:
    """The field that a message about sampling parameters begins with."""
    name = line.split(maxsplit=1)[0].rstrip(":")
    return name if name in SAMPLING_FIELDS or name == "logprobs" else None


def _wrong(name: str | None, line: str, code: str | None = None) -> Refusal:
    return Refusal(Kind.INVALID, line, name, code)
