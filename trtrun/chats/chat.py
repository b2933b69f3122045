"""A chat as a prompt: its messages, tools and what else the checkpoint's template is given (where the prompt ends,
documents, effort, further values), and the tokens of it.

    encoder = ChatEncoder(Path("checkpoints/target"), tokenizer)
    text, tokens = encoder.read(Chat.read({"messages": [{"role": "user", "content": "Hello"}]}))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtrun.chats.messages import read_messages
from trtrun.chats.tools import read_tools
from trtrun.core.values import check_characters, read_flag, show_value
from trtrun.errors import InvalidFieldError, InvalidRequestError, nearest, one_line

if TYPE_CHECKING:
    from trtrun.chats.chat_template import ChatTemplate

RENDERING_FIELDS = (
    "add_generation_prompt", "continue_final_message", "chat_template_kwargs", "documents", "reasoning_effort",
)  # fmt: skip
"""Fields of a request that `read_rendering` reads."""

_RESERVED = (
    "messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize",
)  # fmt: skip


@dataclass(frozen=True)
class Rendering:
    """What a chat template is given beside messages.

    Attributes:
        add_generation_prompt: the text ends where an answer begins.
        continue_final_message: it ends in the last message.
        documents: that the model may answer from.
        effort: how much the model is to think, in OpenAI's words.
        values: further ones, by name.
        needs_effort: where a template has no setting for effort, that is refused, and not passed over.
    """

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    documents: Sequence[Mapping[str, Any]] | None = None
    effort: str | None = None
    values: Mapping[str, Any] = field(default_factory=dict)
    needs_effort: bool = True

    def values_for(self, template: ChatTemplate) -> dict[str, Any]:
        """The values for a template, what OpenAI's words for effort mean to it among them.

        Raises:
            InvalidFieldError: it has no such setting, or a value has the name of a function of all templates.
        """
        values, effort = dict(self.values), self.effort
        for name in sorted(template.functions & values.keys()):
            raise _wrong(
                "chat_template_kwargs", f"cannot hold {name}, which is a function of all chat templates: leave it out"
            )
        if effort is None:
            return values
        if effort == "none" and "enable_thinking" in template.names:
            values.setdefault("enable_thinking", False)
        if "reasoning_effort" in template.names:
            values.setdefault("reasoning_effort", effort)
        elif effort != "none" and self.needs_effort:
            line = f"the model's chat template has no such setting, and cannot use {show_value(effort)}: leave it out"
            raise InvalidFieldError("reasoning_effort", f"reasoning_effort: {line}", "unsupported_field")
        return values


def read_rendering(given: Mapping[str, Any]) -> Rendering:
    """What a request says of it; null is nothing.

    Raises:
        InvalidFieldError: a field is wrong.
    """
    continues = _flag(given, "continue_final_message", False)
    begins = _flag(given, "add_generation_prompt", not continues)
    if continues and begins:
        raise InvalidFieldError(
            "continue_final_message",
            "continue_final_message and add_generation_prompt cannot both be true: the last message either goes on, or "
            "another one begins",
        )
    values, documents = given.get("chat_template_kwargs"), given.get("documents")
    values = {} if values is None else values
    if not isinstance(values, dict):
        raise _wrong("chat_template_kwargs", f"must be an object, not {show_value(values)}")
    for name in _RESERVED:
        if name in values:
            raise _wrong("chat_template_kwargs", f"cannot hold {name}")
    if documents is not None and not (isinstance(documents, list) and all(isinstance(one, dict) for one in documents)):
        raise _wrong("documents", f"must be a list of objects, not {show_value(documents)}")
    effort = given.get("reasoning_effort")
    if effort is not None and not isinstance(effort, str):
        raise _wrong("reasoning_effort", f"must be a text, not {show_value(effort)}")
    return Rendering(begins, continues, documents, effort, values)


def _flag(given: Mapping[str, Any], name: str, default: bool) -> bool:
    value = given.get(name)
    try:
        return default if value is None else read_flag(name, value)
    except InvalidRequestError as error:
        raise InvalidFieldError(name, str(error)) from None


def _wrong(field: str, line: str) -> InvalidFieldError:
    return InvalidFieldError(field, f"{field} {line}")


if TYPE_CHECKING:
    from trtrun.chats.chat_template import ChatTemplate
    from trtrun.tokens.text import Tokenizer

CHAT_FIELDS = ("messages", "tools", *RENDERING_FIELDS)
"""What makes a chat, in a request or a row of a file."""


@dataclass(frozen=True)
class Chat:
    """A conversation that the model answers, or whose last message it goes on with. Made by `read`.

    Attributes:
        messages: each with `role`, `content` as text, and perhaps what the assistant thought and called.
        tools: that the model is shown, in OpenAI's words; None where there are none.
        rendering: what else the template is given.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    rendering: Rendering = field(default_factory=Rendering)

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Chat:
        """A chat of the fields `messages`, `tools`, `add_generation_prompt`, `continue_final_message`,
        `chat_template_kwargs`, `documents` and `reasoning_effort`, as requests to /v1/chat/completions have them.

        Raises:
            InvalidFieldError: one is wrong, unknown, or there are no messages.
        """
        for name in values:
            if name not in CHAT_FIELDS:
                raise InvalidFieldError(name, f"unknown field {show_value(name)} of a chat{nearest(name, CHAT_FIELDS)}")
        messages = read_messages(values.get("messages"))
        use = read_tools({name: value for name, value in values.items() if name == "tools" and value is not None})
        return cls(messages, None if use is None else use.shown, read_rendering(values))


def read_chats(
    messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]], **shared: object
) -> list[Chat]:
    """Read one conversation, or several, with the other fields of `Chat.read`, the same for all; sequences and mappings
    of any kind do, as a program has them.

    Raises:
        InvalidFieldError: as of `Chat.read`.
    """
    fields = {name: _as_json(value) for name, value in shared.items()}
    is_one = not messages or isinstance(messages[0], Mapping)
    return [Chat.read({**fields, "messages": _as_json(told)}) for told in ([messages] if is_one else messages)]


def _as_json(value: object) -> object:
    """Lists and objects as JSON would give them."""
    if isinstance(value, Mapping):
        return {name: _as_json(item) for name, item in value.items()}
    return [_as_json(item) for item in value] if isinstance(value, list | tuple) else value


class ChatEncoder:
    """Makes tokens of chats by the template of a tokenizer's directory, which is read when the first one comes."""

    def __init__(self, directory: Path, tokenizer: Tokenizer | None) -> None:
        self._directory = directory
        self._tokenizer = tokenizer

    @cached_property
    def template(self) -> ChatTemplate | None:
        """The template; None if there is none.

        Raises:
            CheckpointError: it is no template.
        """
        from trtrun.chats.chat_template import read_chat_template  # a process that only reads rows has no use

        return read_chat_template(self._directory)

    def read(self, chat: Chat) -> tuple[str, tuple[int, ...]]:
        """The text of a chat's prompt, and its tokens.

        Raises:
            InvalidRequestError: there is no template, it cannot use the messages, or their text cannot be tokenized.
            CheckpointError: the template is none.
        """
        if self._tokenizer is None:
            raise InvalidRequestError("messages: the target has no tokenizer: give prompt_token_ids instead of a chat")
        text = self._render(chat)
        return text, encode_text(self._tokenizer, text)

    def _render(self, chat: Chat) -> str:
        template = self.template
        if template is None:
            raise InvalidRequestError(
                "messages: the model has no chat template: give a prompt, or add chat_template.jinja to its "
                "tokenizer's directory"
            )
        if chat.tools and not template.shows_tools:
            raise InvalidRequestError("tools: the model's chat template does not show tools to it: leave them out")
        asked = chat.rendering
        return template.render(
            chat.messages,
            asked.add_generation_prompt,
            asked.continue_final_message,
            asked.documents,
            asked.values_for(template),
            chat.tools,
        )


def encode_text(tokenizer: Tokenizer, text: str, adds_special_tokens: bool = False) -> tuple[int, ...]:
    """The tokens of a text. A template writes special tokens itself, that of the beginning, too.

    Raises:
        InvalidRequestError: it cannot be tokenized.
    """
    check_characters("the prompt", text)
    try:
        return tuple(tokenizer.encode(text, add_special_tokens=adds_special_tokens))
    except MemoryError:
        raise  # no fault of the text's alone
    except Exception as error:  # the library raises bare Exception
        raise InvalidRequestError(f"the prompt cannot be tokenized: {one_line(error)}") from None
