"""The forms in which families of models write calls and thoughts: by name, and by what their chat templates hold.

What grammars make a model write them is in `grammars`.
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from launch.serve.api.openai.output import gemma_calls as gemma
from launch.serve.api.openai.output import harmony, tags
from launch.serve.api.openai.output import marked_calls as marked
from launch.serve.api.openai.output import named_calls as mistral
from launch.serve.api.openai.output import object_calls as hermes
from launch.serve.api.openai.output import object_calls as llama3
from launch.serve.api.openai.output.machine import Machine
from launch.serve.api.openai.output.tagged_calls import TaggedParser
from launch.serve.api.openai.output.tags import Tags
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
        new_id: of a call, where the model gives it none.
        is_harmony: messages with heads; thoughts are in some of them.
        has_bare_names: of tools, which end at a blank, a bracket or a quote, and have none of these.
        tags: of a form whose arguments are texts: what each is, its schema says.
    """

    make_parser: Callable[[Collection[str], Schemas], Machine]
    marks: tuple[str, ...] = ()
    call_marks: tuple[str, ...] = ()
    argument_key: str = "arguments"
    new_id: Callable[[], str] = new_id
    is_harmony: bool = False
    has_bare_names: bool = False
    call_texts: tuple[str, ...] = ()
    tags: Tags | None = None

    @property
    def call_beginnings(self) -> tuple[str, ...]:
        """What calls begin with, by which they are told from text."""
        return self.call_texts or self.call_marks


@dataclass(frozen=True)
class ReasoningFormat:
    """How thoughts are written.

    Attributes:
        open_mark, close_mark: around them.
        heading: behind the first mark, and no thought.
        always_thinks: an answer begins with thoughts, unless the prompt ends them.
        is_harmony: messages with heads.
    """

    open_mark: str = "<think>"
    close_mark: str = "</think>"
    heading: str = ""
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


def _marked(make_parser: Callable[[], Machine], marks: marked.Marks) -> ToolFormat:
    """A form of calls between marks of their own."""
    return ToolFormat(lambda names, schemas: make_parser(), marks, (marks.calls, marks.call), has_bare_names=True)


def _tagged(of: Tags) -> ToolFormat:
    """A form of calls whose arguments are texts between marks."""
    return ToolFormat(
        lambda names, schemas: TaggedParser(of, schemas),
        of.marks,
        of.call_marks,
        has_bare_names=True,
        # Behind GLM's mark is a name at once, which may be any.
        call_texts=(f"{of.open}\n{of.call}", f"{of.open}{of.call}") if of.call else (),
        tags=of,
    )


_DEEPSEEK = _marked(marked.DeepSeekParser, marked.DEEPSEEK)

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
    "gemma4": ToolFormat(
        lambda names, schemas: gemma.GemmaParser(),
        (gemma.OPEN, gemma.CLOSE, gemma.QUOTE),
        (gemma.OPEN,),
        has_bare_names=True,
        call_texts=(f"{gemma.OPEN}{gemma.WORD}",),
    ),
    "qwen3_coder": _tagged(tags.QWEN3_CODER),
    "glm45": _tagged(tags.GLM45),
    "glm47": _tagged(tags.GLM47),
    "minimax_m2": _tagged(tags.MINIMAX_M2),
    "kimi_k2": _marked(marked.KimiParser, marked.KIMI),
    "llama_nemotron_json": ToolFormat(
        lambda names, schemas: mistral.MarkedListParser(mistral.NEMOTRON, mistral.END_NEMOTRON),
        (mistral.NEMOTRON, mistral.END_NEMOTRON),
        (mistral.NEMOTRON,),
    ),
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v31": _DEEPSEEK,
    "deepseek_v32": _tagged(tags.DEEPSEEK_V32),
    "deepseek_v4": _tagged(tags.DEEPSEEK_V4),
    JSON: ToolFormat(lambda names, schemas: mistral.ListParser(names), argument_key="parameters"),
}

REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    "qwen3": ReasoningFormat(),
    "deepseek_r1": ReasoningFormat(always_thinks=True),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
    "gemma4": ReasoningFormat("<|channel>", "<channel|>", "thought"),
    "gpt-oss": ReasoningFormat(is_harmony=True),
}

_TOOL_ALIASES = {"openai": "gpt-oss", "qwen": "hermes", "llama3": "llama3_json", "qwen3_xml": "qwen3_coder"}
_REASONING_ALIASES = {
    "openai_gptoss": "gpt-oss",
    "deepseek-r1": "deepseek_r1",
    **dict.fromkeys(("glm45", "kimi_k2", "minimax_m2", "deepseek_v3", "deepseek_v31", "deepseek_v32"), "qwen3"),
}


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
    if marked.DEEPSEEK.call in template:
        return "deepseek_v3" if marked.FENCE in template else "deepseek_v31"
    if tags.DSML in template:
        return "deepseek_v32" if "function_calls" in template else "deepseek_v4"
    if marked.KIMI.call in template:
        return "kimi_k2"
    if tags.MINIMAX_M2.open in template and tags.MINIMAX_M2.call in template:
        return "minimax_m2"
    if gemma.OPEN in template and gemma.WORD in template:
        return "gemma4"
    if hermes.OPEN in template and (found := _named_by_tool_call(template)):
        return found
    if mistral.MARK in template:
        return "mistral"
    if mistral.NEMOTRON in template:
        return "llama_nemotron_json"
    if (
        llama3.TAG in template and "<function=" not in template
    ) or '"parameters": dictionary of argument name' in template:
        return "llama3_json"
    return ""


def _named_by_tool_call(template: str) -> str:
    """Name the format of calls between `<tool_call>` and `</tool_call>`."""
    if all(mark in template for mark in (tags.QWEN3_CODER.call, tags.QWEN3_CODER.parameter)):
        return "qwen3_coder"
    if all(mark in template for mark in (tags.GLM45.parameter, tags.GLM45.end_parameter)):
        return "glm47" if tags.GLM47.text_opening in template else "glm45"
    return "" if any(mark in template for mark in _NOT_HERMES) else "hermes"


_NOT_HERMES = ("<function=", "<arg_key>", "<tool_calls>", "]<]minimax[>[")
"""Marks of forms that have Hermes' mark and no object in it; the last one is MiniMax M3's."""

_THINKING = re.compile(r"\b(enable_)?thinking\b")


def _reasoning_of(template: str) -> str:
    if harmony.CHANNEL in template and harmony.START in template:
        return "gpt-oss"
    if "[THINK]" in template:
        return "mistral"
    if "<|channel>" in template:
        return "gemma4"
    if "</think>" not in template:
        return ""
    # A template that has a word for it begins thoughts itself, or does not.
    return "deepseek_r1" if "<｜Assistant｜>" in template and not _THINKING.search(template) else "qwen3"
