"""A chat as a prompt: its messages, tools and what else the checkpoint's template is given, and the tokens of it.

    encoder = ChatEncoder(Path("checkpoints/target"), tokenizer)
    text, tokens = encoder.read(Chat.read({"messages": [{"role": "user", "content": "Hello"}]}))

It knows templates and tokenizers. It does not know how texts are generated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtrun.chats.messages import read_messages
from trtrun.chats.rendering import RENDERING_FIELDS, Rendering, read_rendering
from trtrun.chats.tools import read_tools
from trtrun.core.values import check_characters, show_value
from trtrun.errors import InvalidFieldError, InvalidRequestError, nearest, one_line

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
    """One conversation, or several, with the other fields of `Chat.read`, the same for all; sequences and mappings of
    any kind do, as a program has them.

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
        """None where there is none.

        Raises:
            CheckpointError: it is no template.
        """
        from trtrun.chats.chat_template_files import read_chat_template  # a process that only reads rows has no use

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
