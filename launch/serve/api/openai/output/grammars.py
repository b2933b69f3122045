"""Grammars in Lark of what a model must write: calls in its family's form, thoughts before them, text beside them.

Each form has rules for calls alone, for what follows the mark of a call, and for text with calls in it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from launch.serve.api.openai.output import gemma_calls as gemma
from launch.serve.api.openai.output import harmony
from launch.serve.api.openai.output import marked_calls as marked
from launch.serve.api.openai.output import named_calls as mistral
from launch.serve.api.openai.output import object_calls as hermes
from launch.serve.api.openai.output import object_calls as llama3
from launch.serve.api.openai.output.formats import JSON, REASONING_FORMATS, TOOL_FORMATS, ReasoningFormat
from launch.serve.api.openai.output.grammar_parts import (
    ANY,
    Lark,
    Wanted,
    arguments_schema,
    as_part,
    moved,
    repeated,
    without_notes,
)
from launch.serve.api.openai.output.tagged_grammars import tagged_behind, tagged_calls, tagged_free
from trtrun.chats.tools import Tool
from trtrun.core.guide import OPTIONS_KEY, Guide

_Rule = Callable[[Lark, Wanted], str]


def _arguments(lark: Lark, number: int, tool: Tool, must_call: bool) -> str:
    """The arguments of a call: as the tool's schema says, where it is strict or a call is wanted."""
    schema = arguments_schema(tool) if tool.is_strict or must_call else ANY
    return lark.put(f"arguments_{number}", as_part(schema))


def _objects(lark: Lark, wanted: Wanted, key: str) -> str:
    """A call of one of the tools, as an object."""
    rules = []
    for number, tool in enumerate(wanted.tools):
        opening = f'{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "{key}": '
        arguments = _arguments(lark, number, tool, wanted.must_call)
        rules.append(lark.put(f"call_{number}", f'{json.dumps(opening, ensure_ascii=False)} {arguments} "}}"'))
    return lark.put("call", " | ".join(rules))


def call_or_object(wanted: Wanted, other: Any) -> str:
    """A rule for a call, or JSON of another schema, which may begin alike: one schema is of both, as of two rules that
    begin alike the lexer takes one."""
    parts, key = [other], TOOL_FORMATS["llama3_json"].argument_key
    for tool in wanted.tools:
        properties = {"name": {"const": tool.name}, key: arguments_schema(tool) if tool.is_strict else ANY}
        parts.append(
            {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
        )
    # References are of a schema's own parts, which stand deeper now.
    placed = [moved(part, f"#/anyOf/{place}") for place, part in enumerate(parts[:1])]
    placed += [moved(part, f"#/anyOf/{place}/properties/{key}") for place, part in enumerate(parts[1:], start=1)]
    options = {OPTIONS_KEY: other[OPTIONS_KEY]} if isinstance(other, Mapping) and OPTIONS_KEY in other else {}
    return as_part({**options, "anyOf": placed})


def _hermes_rest(lark: Lark, wanted: Wanted) -> str:
    """A call behind its opening mark."""
    call = _objects(lark, wanted, TOOL_FORMATS["hermes"].argument_key)
    return lark.put("marked", f'"\\n" {call} "\\n" {lark.mark(hermes.CLOSE)}')


def _gemma_rest(lark: Lark, wanted: Wanted) -> str:
    """A call behind its opening mark, with arguments in JSON."""
    rules = []
    for number, tool in enumerate(wanted.tools):
        name = lark.mark(f"{gemma.WORD}{tool.name}")
        rules.append(lark.put(f"call_{number}", f"{name} {_arguments(lark, number, tool, wanted.must_call)}"))
    return lark.put("marked", f"({' | '.join(rules)}) {lark.mark(gemma.CLOSE)}")


class _Single(NamedTuple):
    """A form whose calls stand between marks each: the first mark, what stands behind it, and what between calls."""

    mark: str
    rest: _Rule
    between: str = ""


_SINGLE = {"hermes": _Single(hermes.OPEN, _hermes_rest, '"\\n"'), "gemma4": _Single(gemma.OPEN, _gemma_rest)}


def _single_calls(lark: Lark, wanted: Wanted, form: str) -> str:
    mark, rest, between = _SINGLE[form]
    return repeated(f"{lark.mark(mark)} {rest(lark, wanted)}", between, wanted)


def _single_free(lark: Lark, wanted: Wanted, form: str) -> str:
    mark, often = _SINGLE[form].mark, "*" if wanted.in_parallel else "?"
    return f"({lark.until(mark)} marked){often} {lark.without(mark)}"


def _llama_calls(lark: Lark, wanted: Wanted) -> str:
    return repeated(_objects(lark, wanted, TOOL_FORMATS["llama3_json"].argument_key), '"; "', wanted)


def _no_thoughts(lark: Lark, wanted: Wanted) -> str:
    """Any text that does not begin as thoughts do: the lexer would take them for it."""
    begin = lark.escaped(wanted.open_mark)
    return lark.put("NO_THOUGHTS", f"~/{begin}(.|\\n)*/") if begin else "TEXT"


def _llama_free(lark: Lark, wanted: Wanted) -> str:
    other = lark.put("OTHER", rf"/[^\s{{](.|\n)*/ & {lark.without(llama3.TAG)} & {_no_thoughts(lark, wanted)}")
    return f"BLANKS ({lark.mark(llama3.TAG)}? calls | {other}?)"


def _mistral_calls(lark: Lark, wanted: Wanted) -> str:
    return f"{lark.mark(mistral.MARK)} {_mistral_rest(lark, wanted)}"


def _mistral_rest(lark: Lark, wanted: Wanted) -> str:
    """What stands behind the first mark."""
    if not wanted.has_arguments_in_brackets:
        call = _objects(lark, wanted, TOOL_FORMATS["mistral"].argument_key)
        items = repeated(call, '", "', wanted)
        return lark.put("listed", f'/ ?/ "[" {items} "]"')  # some tokenizers have a blank in the bracket's token
    call_id = f"({lark.mark(mistral.CALL_ID)} /[a-zA-Z0-9]{{9}}/)?"
    rules = []
    for number, tool in enumerate(wanted.tools):
        arguments = _arguments(lark, number, tool, wanted.must_call)
        name = json.dumps(tool.name, ensure_ascii=False)
        rules.append(lark.put(f"call_{number}", f"{name} {call_id} {lark.mark(mistral.ARGS)} {arguments}"))
    return lark.put("listed", repeated(lark.put("call", " | ".join(rules)), lark.mark(mistral.MARK), wanted))


def _mistral_free(lark: Lark, wanted: Wanted) -> str:
    return f"({lark.until(mistral.MARK)} listed | {lark.without(mistral.MARK)})"


def _nemotron_calls(lark: Lark, wanted: Wanted) -> str:
    return f"{lark.mark(mistral.NEMOTRON)} {_nemotron_rest(lark, wanted)}"


def _nemotron_rest(lark: Lark, wanted: Wanted) -> str:
    """What stands behind the first mark."""
    call = _objects(lark, wanted, TOOL_FORMATS["llama_nemotron_json"].argument_key)
    items = repeated(call, '", "', wanted)
    return lark.put("listed", f'"[" {items} "]" {lark.mark(mistral.END_NEMOTRON)}')


def _nemotron_free(lark: Lark, wanted: Wanted) -> str:
    return f"({lark.until(mistral.NEMOTRON)} listed | {lark.without(mistral.NEMOTRON)})"


def _marked_calls(lark: Lark, wanted: Wanted, form: str) -> str:
    return f"{lark.mark(_MARKS[form].calls)} {_marked_rest(lark, wanted, form)}"


_MARKS = {"deepseek_v3": marked.DEEPSEEK, "deepseek_v31": marked.DEEPSEEK, "kimi_k2": marked.KIMI}
"""Marks of forms whose calls stand between these."""


def _marked_rest(lark: Lark, wanted: Wanted, form: str) -> str:
    """What stands behind the first mark."""
    marks, rules = _MARKS[form], []
    separator, fence = lark.mark(marks.separator), json.dumps(f"\n{marked.END_FENCE}")
    for number, tool in enumerate(wanted.tools):
        arguments = _arguments(lark, number, tool, wanted.must_call)
        if form == "deepseek_v3":
            head = lark.mark(f"{tool.name}\n{marked.FENCE}\n")
            written = f'"{marked.KIND}" {separator} {head} {arguments} {fence}'
        elif form == "kimi_k2":
            written = f"{lark.mark(f'{marked.FUNCTIONS}{tool.name}:')} NUMBER {separator} {arguments}"
        else:
            written = f"{lark.mark(tool.name)} {separator} {arguments}"
        rules.append(lark.put(f"call_{number}", written))
    lark.put("NUMBER", "/[0-9]{1,4}/")
    call = lark.put("call", f"{lark.mark(marks.call)} ({' | '.join(rules)}) {lark.mark(marks.end)}")
    calls = repeated(call, '"\\n"' if form == "deepseek_v3" else "", wanted)
    return lark.put("listed", f"{calls} {lark.mark(marks.end_calls)}")


def _marked_free(lark: Lark, wanted: Wanted, form: str) -> str:
    """Without the mark in front of all there is no call: what stands in one would not be guided."""
    listed, marks = _marked_rest(lark, wanted, form), _MARKS[form][:2]
    return f"({lark.until(*marks)} {listed} | {lark.without(*marks)})"


def _list_calls(lark: Lark, wanted: Wanted) -> str:
    items = repeated(_objects(lark, wanted, TOOL_FORMATS[JSON].argument_key), '", "', wanted)
    return f'"[" {items} "]"'


def _list_free(lark: Lark, wanted: Wanted) -> str:
    other = lark.put("OTHER", rf"/[^\s\[](.|\n)*/ & {_no_thoughts(lark, wanted)}")
    return f"BLANKS (calls | {other}?)"


def _single_behind(lark: Lark, wanted: Wanted, form: str) -> str:
    """The rest of a call behind its mark, and what an answer may go on with: calls, and text where it may have that."""
    mark, rest, between = _SINGLE[form]
    first, is_alone = rest(lark, wanted), wanted.must_call or wanted.other is not None
    if is_alone:
        return f"{first} ({between} {lark.mark(mark)} {first})*" if wanted.in_parallel else first
    return f"{first} {_single_free(lark, wanted, form) if wanted.in_parallel else lark.without(mark)}"


_TAGS = {name: form.tags for name, form in TOOL_FORMATS.items() if form.tags is not None}

CALLS: Mapping[str, _Rule] = {
    **{form: partial(_single_calls, form=form) for form in _SINGLE},
    "llama3_json": _llama_calls,
    "mistral": _mistral_calls,
    "llama_nemotron_json": _nemotron_calls,
    JSON: _list_calls,
    **{form: partial(_marked_calls, form=form) for form in _MARKS},
    **{form: partial(tagged_calls, tags=tags) for form, tags in _TAGS.items()},
}
BEHIND: Mapping[str, _Rule] = {
    **{form: partial(_single_behind, form=form) for form in _SINGLE},
    "llama3_json": lambda lark, wanted: "calls",
    "mistral": _mistral_rest,
    "llama_nemotron_json": _nemotron_rest,
    **{form: partial(_marked_rest, form=form) for form in _MARKS},
    **{form: partial(tagged_behind, tags=tags) for form, tags in _TAGS.items()},
}
"""What stands behind a call's mark that has ended thoughts."""

FREE: Mapping[str, _Rule] = {
    **{form: partial(_single_free, form=form) for form in _SINGLE},
    "llama3_json": _llama_free,
    "mistral": _mistral_free,
    "llama_nemotron_json": _nemotron_free,
    JSON: _list_free,
    **{form: partial(_marked_free, form=form) for form in _MARKS},
    **{form: partial(tagged_free, tags=tags) for form, tags in _TAGS.items()},
}


def harmony_messages(lark: Lark, wanted: Wanted) -> str:
    """Messages: thoughts and words to the user, each followed by another one; then calls, or the answer. Thoughts that
    are not ended go on with the head of a call."""
    channel, message = lark.mark(harmony.CHANNEL), lark.mark(harmony.MESSAGE)
    heads = (harmony.CHANNEL,) if wanted.tools else ()
    again = f'{lark.until(harmony.ENDS[0], *heads)} {lark.mark(harmony.START)} "assistant"'
    lark.put("before", f'{channel} ("analysis" | "commentary") {message} {again}')
    final = lark.put("final", f'{channel} "final" {message} {wanted.other or "TEXT"}')
    if not wanted.tools:
        return f"before* {final}"
    rules = []
    for number, tool in enumerate(wanted.tools):
        arguments = _arguments(lark, number, tool, wanted.must_call)
        head = json.dumps(f"commentary to=functions.{tool.name} ", ensure_ascii=False)
        constrain = f'{lark.mark(harmony.CONSTRAIN)} "json"'
        rules.append(lark.put(f"call_{number}", f"{head} {constrain} {message} {arguments}"))
    call = lark.put("call", " | ".join(rules))
    cut = lark.put("cut", f'{channel} "analysis" {message} {lark.until(harmony.CHANNEL, harmony.ENDS[0])}')
    called = f"({channel} | {cut}) {call}"
    return f"before* ({called if wanted.must_call else f'{called} | {final}'})"


def write_grammar(tools: str, reasoning: str, is_thinking: bool, wanted: Wanted, special: Mapping[str, int]) -> str:
    """The grammar of an answer.

    Args:
        tools, reasoning: forms, by their names; empty for none.
        is_thinking: thoughts have begun in the prompt.
        wanted: of it.
        special: marks that are special tokens, with their ids.
    """
    lark = Lark(special)
    if wanted.other is not None:
        # A terminal for texts: of a rule each would be an item of its own to the parser, whose bound many would pass.
        wanted = replace(wanted, other=lark.put("CHOICE" if wanted.other.startswith('"') else "other", wanted.other))
    if "gpt-oss" in (tools, reasoning):
        return lark.whole(harmony_messages(lark, wanted))
    form = REASONING_FORMATS[reasoning] if reasoning else None
    call_marks = TOOL_FORMATS[tools].call_marks if wanted.tools else ()
    thoughts = "" if form is None else _thoughts(lark, form, is_thinking, call_marks)
    if not wanted.tools:
        return lark.whole(f"{thoughts} {wanted.other}")
    if form is not None and not is_thinking:
        wanted = replace(wanted, open_mark=form.open_mark)
    answer = lark.put("answer", _answer(lark, tools, wanted))
    if form is None or not call_marks:
        return lark.whole(f"{thoughts} {answer}")
    cut = lark.put("cut", _cut_thoughts(lark, form, is_thinking, call_marks))
    return lark.whole(f"{thoughts} {answer} | {cut} {BEHIND[tools](lark, wanted)}")


def _answer(lark: Lark, tools: str, wanted: Wanted) -> str:
    """What follows thoughts that were ended."""
    calls = lark.put("calls", CALLS[tools](lark, wanted))
    if wanted.must_call:
        return calls
    if wanted.other is not None and wanted.other_schema is not None and tools == "llama3_json":
        return call_or_object(wanted, wanted.other_schema)
    if wanted.other is not None:
        return f"{calls} | {wanted.other}"
    return FREE[tools](lark, wanted)


def is_free(tools: str) -> bool:
    """Whether there is a grammar of text with calls in a form."""
    return tools in FREE or tools == "gpt-oss"


def as_lark(guide: Guide) -> str | None:
    """What a guide allows as a part of a rule; None of one that is a grammar itself."""
    if guide.kind == "json":
        schema = json.loads(guide.text)
        return as_part({} if schema is True else without_notes(schema))
    if guide.kind == "choice":
        return " | ".join(map(json.dumps, json.loads(guide.text)))
    if guide.kind == "regex":
        return (
            "/" + re.sub(r"(\\.)|/|\n", lambda found: found[1] or {"/": r"\/", "\n": r"\n"}[found[0]], guide.text) + "/"
        )
    return None


def _thoughts(lark: Lark, form: ReasoningFormat, is_thinking: bool, call_marks: Sequence[str]) -> str:
    """Thoughts up to the mark behind them; without marks of calls, which end them, too."""
    end = f"{lark.until(form.close_mark, *call_marks)} BLANKS"
    return (
        lark.put("thoughts", end) if is_thinking else f"{lark.put('thoughts', f'{lark.mark(form.open_mark)} {end}')}?"
    )


def _cut_thoughts(lark: Lark, form: ReasoningFormat, is_thinking: bool, call_marks: Sequence[str]) -> str:
    """Thoughts that are not ended, up to the mark of a call: the first of a form's, behind which calls are guided."""
    first, *others = call_marks
    begin = "" if is_thinking else lark.mark(form.open_mark)
    return f"{begin} {lark.until(first, form.close_mark, *others)}"
