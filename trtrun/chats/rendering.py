"""What a chat template is given beside messages and tools: where the prompt ends, documents, effort, further values.

It knows JSON values, and of a template which values it looks at.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trtrun.core.values import read_flag, show_value
from trtrun.errors import InvalidFieldError, InvalidRequestError

if TYPE_CHECKING:
    from trtrun.chats.chat_template import ChatTemplate

RENDERING_FIELDS = (
    "add_generation_prompt", "continue_final_message", "chat_template_kwargs", "documents", "reasoning_effort",
)  # fmt: skip
"""Of a request, that `read_rendering` reads."""

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
