"""Grammars in Lark of what a model must write: calls in its family's form, thoughts before them, text beside them.

Marks that are special tokens cannot be spelled, and stand as their ids. It knows forms, tools and llguidance's Lark,
and no tokenizer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from launch.serve.api.openai.output.call_rules import BEHIND, CALLS, FREE, Wanted, call_or_object, harmony_messages
from launch.serve.api.openai.output.formats import REASONING_FORMATS, TOOL_FORMATS, ReasoningFormat
from launch.serve.api.openai.output.lark import Lark
from launch.serve.api.openai.output.schemas import as_part, without_notes
from trtrun.core.guide import Guide


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
