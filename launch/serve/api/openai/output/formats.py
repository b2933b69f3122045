"""The forms in which families of models write calls and thoughts: by name, and by what their chat templates hold.

What grammars make a model write them is in `grammars`.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from launch.serve.api.openai.output import harmony, qwen3_coder
from launch.serve.api.openai.output import named_calls as deepseek
from launch.serve.api.openai.output import named_calls as mistral
from launch.serve.api.openai.output import object_calls as hermes
from launch.serve.api.openai.output import object_calls as llama3
from launch.serve.api.openai.output.machine import Machine
from trtrun.errors import nearest

NONE = "none"
"""What a configuration says where nothing is to be looked for."""

_ID_LETTERS = string.ascii_letters + string.digits


def new_id() -> str:
    """Make an id for a call."""
    return f"call_{secrets.token_hex(12)}"


def _short_id() -> str:
    """Make an id for a call, as Mistral's templates want it back."""
    return "".join(secrets.choice(_ID_LETTERS) for _ in range(9))


Schemas = Mapping[str, Mapping[str, Any]]
"""JSON schemas of tools' arguments, by the tools' names."""


@dataclass(frozen=True)
class ToolFormat:
    """How calls are written.

    Attributes:
        make_parser: for a request with tools of these names; and with these schemas, where it reads them.
        marks: of which some are special tokens, that a text usually lacks.
        call_marks: with one of which a call begins, also where a model has not ended its thoughts. None of a form
            without marks, whose calls are an answer's beginning, and of messages with heads.
        call_texts: what a call begins with, where that is more than its mark: text that only talks of the mark has not
            that.
        argument_key: of arguments in a call that is an object.
        new_id: of a call.
        is_harmony: messages with heads; thoughts are in some of them.
        has_bare_names: of tools, without quotes: they end at a blank, a bracket or a quote.
        reads_schemas: what an argument is, its schema says.
    """

    make_parser: Callable[[Collection[str], Schemas], Machine]
    marks: tuple[str, ...] = ()
    call_marks: tuple[str, ...] = ()
    argument_key: str = "arguments"
    new_id: Callable[[], str] = new_id
    is_harmony: bool = False
    has_bare_names: bool = False
    reads_schemas: bool = False
    call_texts: tuple[str, ...] = ()

    @property
    def call_beginnings(self) -> tuple[str, ...]:
        """What calls begin with, by which they are told from text."""
        return self.call_texts or self.call_marks


@dataclass(frozen=True)
class ReasoningFormat:
    """How thoughts are written.

    Attributes:
        open_mark, close_mark: around them.
        always_thinks: an answer begins with thoughts, unless the prompt ends them.
        is_harmony: messages with heads.
    """

    open_mark: str = "<think>"
    close_mark: str = "</think>"
    always_thinks: bool = False
    is_harmony: bool = False

    @property
    def marks(self) -> tuple[str, ...]:
        """Marks of the format; some of them are special tokens."""
        return _HARMONY_MARKS if self.is_harmony else (self.open_mark, self.close_mark)

    @property
    def marks_of_all(self) -> tuple[str, str]:
        """What all thoughts of an answer, of which there may be several, begin and end with."""
        return (harmony.ANALYSIS, harmony.FINAL) if self.is_harmony else (self.open_mark, self.close_mark)


_HARMONY_MARKS = (harmony.START, harmony.CHANNEL, harmony.MESSAGE, harmony.CONSTRAIN, *harmony.ENDS)

JSON = "json"
"""A list of calls alone: what a model without a family's form is made to write."""

_DEEPSEEK = ToolFormat(
    lambda names, schemas: deepseek.DeepSeekParser(),
    deepseek.MARKS,
    (deepseek.CALLS, deepseek.CALL),
    has_bare_names=True,
)

TOOL_FORMATS: Mapping[str, ToolFormat] = {
    "hermes": ToolFormat(
        lambda names, schemas: hermes.HermesParser(),
        (hermes.OPEN, hermes.CLOSE),
        (hermes.OPEN,),
        call_texts=(f"{hermes.OPEN}\n{{", f"{hermes.OPEN}{{"),
    ),
    "llama3_json": ToolFormat(
        lambda names, schemas: llama3.Llama3Parser(names), (llama3.TAG,), (llama3.TAG,), "parameters"
    ),
    "mistral": ToolFormat(
        lambda names, schemas: mistral.MistralParser(),
        (mistral.MARK, mistral.ARGS, mistral.CALL_ID),
        (mistral.MARK,),
        new_id=_short_id,
    ),
    "gpt-oss": ToolFormat(
        lambda names, schemas: harmony.HarmonyParser(), _HARMONY_MARKS, is_harmony=True, has_bare_names=True
    ),
    "qwen3_coder": ToolFormat(
        lambda names, schemas: qwen3_coder.Qwen3CoderParser(schemas),
        (hermes.OPEN, hermes.CLOSE),
        (hermes.OPEN, qwen3_coder.FUNCTION),
        has_bare_names=True,
        reads_schemas=True,
        call_texts=(f"{hermes.OPEN}\n{qwen3_coder.FUNCTION}", f"{hermes.OPEN}{qwen3_coder.FUNCTION}"),
    ),
    "llama_nemotron_json": ToolFormat(
        lambda names, schemas: mistral.MarkedListParser(mistral.NEMOTRON, mistral.END_NEMOTRON),
        (mistral.NEMOTRON, mistral.END_NEMOTRON),
        (mistral.NEMOTRON,),
    ),
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v31": _DEEPSEEK,
    JSON: ToolFormat(lambda names, schemas: mistral.ListParser(names), argument_key="parameters"),
}

REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    "qwen3": ReasoningFormat(),
    "deepseek_r1": ReasoningFormat(always_thinks=True),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
    "gpt-oss": ReasoningFormat(is_harmony=True),
}

_TOOL_ALIASES = {"openai": "gpt-oss", "qwen": "hermes", "llama3": "llama3_json", "qwen3_xml": "qwen3_coder"}
_REASONING_ALIASES = {"openai_gptoss": "gpt-oss", "deepseek-r1": "deepseek_r1"}


def find_tool_format(asked: str | None, template: str | None) -> str:
    """The name of a checkpoint's form of calls; empty where none is known.

    Args:
        asked: by the configuration; None leaves it to the template.
        template: the source of its chat template; None without one.

    Raises:
        ValueError: there is no such form; the message names the nearest.
    """
    return _find(asked, TOOL_FORMATS, _TOOL_ALIASES, lambda: _tools_of(template or ""))


def find_reasoning_format(asked: str | None, template: str | None) -> str:
    """Find the format of thoughts, as `find_tool_format` does for calls."""
    return _find(asked, REASONING_FORMATS, _REASONING_ALIASES, lambda: _reasoning_of(template or ""))


def _find(
    asked: str | None, known: Mapping[str, object], aliases: Mapping[str, str], by_template: Callable[[], str]
) -> str:
    if asked is None:
        return by_template()
    name = aliases.get(asked, asked)
    if name == NONE:
        return ""
    if name not in known:
        raise ValueError(f"there is no {asked!r}{nearest(asked, [*known, *aliases, NONE])}")
    return name


def _tools_of(template: str) -> str:
    """Name the format of calls by the marks that a template puts around earlier ones. Some families have the same
    marks, with something else between them than an object."""
    if harmony.CHANNEL in template and harmony.START in template:
        return "gpt-oss"
    if deepseek.CALL in template:
        return "deepseek_v3" if deepseek.FENCE in template else "deepseek_v31"
    if all(mark in template for mark in (hermes.OPEN, qwen3_coder.FUNCTION, qwen3_coder.PARAMETER)):
        return "qwen3_coder"
    if hermes.OPEN in template and not any(mark in template for mark in ("<function=", "<arg_key>", "<tool_calls>")):
        return "hermes"
    if mistral.MARK in template:
        return "mistral"
    if mistral.NEMOTRON in template:
        return "llama_nemotron_json"
    if (
        llama3.TAG in template and "<function=" not in template
    ) or '"parameters": dictionary of argument name' in template:
        return "llama3_json"
    return ""


def _reasoning_of(template: str) -> str:
    if harmony.CHANNEL in template and harmony.START in template:
        return "gpt-oss"
    if "[THINK]" in template:
        return "mistral"
    if "</think>" not in template:
        return ""
    return "deepseek_r1" if "<｜Assistant｜>" in template else "qwen3"
