"""How a chat's answer is made and read: what guides it, which special tokens its text has, and how thoughts and calls
are told apart.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from launch.serve.admission.refusals import Kind, Refusal, wrap_errors
from launch.serve.api.openai.calls import Answering, ChatCall
from launch.serve.api.openai.output.formats import JSON, REASONING_FORMATS, TOOL_FORMATS
from launch.serve.api.openai.output.grammar_parts import Wanted, arguments_schema
from launch.serve.api.openai.output.grammars import as_lark, is_free, write_grammar
from launch.serve.api.openai.output.named_calls import ARGS
from launch.serve.api.openai.output.parsing import Parsing
from trtrun.api.prompts import PromptReader
from trtrun.chats.tools import Choice, Tool, ToolUse
from trtrun.core.guide import Guide
from trtrun.core.sampling_params import SamplingParams
from trtrun.core.values import show_value
from trtrun.errors import InvalidRequestError
from trtrun.tokens.text import Tokenizer

_ONE_CALL = "only supports single tool-calls"
"""What Llama 3's templates say to conversations with several calls in one answer: there must not be one."""

_BARE_NAME = re.compile(r"[^\s\[\]{}<>`\"]+")

_BUDGET = "thinking_budget"
"""A value for a template: Qwen's word for a budget for thoughts."""


class AnswerPlanner:
    """Plans the answers of one model."""

    def __init__(
        self, tools: str, reasoning: str, template: str | None, tokenizer: Tokenizer | None, prompts: PromptReader
    ) -> None:
        """Plan.

        Args:
            tools, reasoning: the checkpoint's forms, by their names; empty for none.
            template: the source of its chat template, or of that for tools.
            tokenizer: of it.
            prompts: checks what guides.
        """
        self._tools = tools
        self._reasoning = reasoning
        self._template = template or ""
        self._has_arguments_in_brackets = ARGS in (template or "")
        self._calls_one = _ONE_CALL in (template or "")
        self._tokenizer = tokenizer
        self._prompts = prompts

    def plan(self, call: ChatCall, prompt: Sequence[int]) -> Answering:
        """How a chat is answered, whose prompt is known.

        Raises:
            Refusal: a tool's schema cannot be followed.
        """
        try:
            return self._plan(call, prompt)
        except RecursionError:
            line = "a JSON schema is nested too deeply: make it simpler"
            raise Refusal(Kind.INVALID, line, None if call.tools is None else "tools") from None

    def _plan(self, call: ChatCall, prompt: Sequence[int]) -> Answering:
        sampling, use = call.answering.sampling, call.tools
        if use is not None and self._calls_one:
            use = replace(use, in_parallel=False)
        parsing = self._parsing(use, self._is_thinking(call, prompt))
        if use is not None and parsing.tools:
            self._check_names(parsing.tools, use.callable)
        if sampling.guided is not None and as_lark(sampling.guided) is None:
            # A grammar of the request's own is all of the text.
            if use is not None and _must_call(use):
                line = "a grammar and tool_choice both say what the text must be: leave one of them out"
                raise Refusal(Kind.INVALID, line, "tool_choice")
            parsing, wanted = replace(parsing, reasoning=""), None
        else:
            wanted = self._wanted(sampling, use, parsing)
        if wanted is not None:
            own, sampling = sampling.guided, self._guide(sampling, wanted, parsing)
            followed = [tool for tool in wanted.tools if tool.is_strict or wanted.must_call]
            self._check(sampling, followed, own)
        if parsing.is_needed and self._hides_marks(parsing):
            sampling = replace(sampling, skip_special_tokens=False)
        reasoning = parsing.reasoning if call.parts_thoughts else ""
        sampling = self._with_thoughts(call, sampling, parsing, has_no_stops=bool(reasoning))
        parsing = replace(parsing, reasoning=reasoning, tells_thoughts=call.tells_thoughts)
        return replace(call.answering, sampling=sampling, parsing=parsing)

    def _with_thoughts(
        self, call: ChatCall, sampling: SamplingParams, parsing: Parsing, *, has_no_stops: bool
    ) -> SamplingParams:
        """What the engine has to know of thoughts: what bounds them, and that stop strings count behind them."""
        form = REASONING_FORMATS[self._reasoning] if self._reasoning else None
        can_end = form is not None and not form.is_harmony
        budget = sampling.thinking_token_budget
        if budget is not None and not can_end:
            line = "thinking_token_budget: this model's thoughts have no mark that could be forced: leave it out"
            raise Refusal(Kind.INVALID, line, "thinking_token_budget", "unsupported_field")
        if budget is None and can_end:
            budget = self._asked_beside(call)
        has_no_stops = has_no_stops and bool(sampling.stop) and not call.stops_in_thoughts
        if form is None or (budget is None and not has_no_stops):
            return sampling
        calls = TOOL_FORMATS[parsing.tools].call_beginnings if parsing.tools else ()
        begin, end = form.marks_of_all
        marks = ("" if parsing.is_thinking else begin, end, *calls)
        return replace(sampling, thinking_token_budget=budget, thinking_marks=marks, stop_in_thoughts=not has_no_stops)

    def _asked_beside(self, call: ChatCall) -> int | None:
        """A budget for thoughts that is asked for in words of other servers, and changes nothing where there is none:
        a template that has the word itself is told it."""
        if call.thinking_budget is not None:
            return call.thinking_budget
        value = call.rendering.values.get(_BUDGET)
        is_number = type(value) is int and value >= 0 and _BUDGET not in self._template
        return value if is_number else None

    def _parsing(self, use: ToolUse | None, is_thinking: bool) -> Parsing:
        reasoning = self._reasoning
        if use is None or use.choice is Choice.NONE:
            return Parsing(reasoning=reasoning, is_thinking=is_thinking)
        tools = self._tools or (JSON if _must_call(use) else "")
        names = tuple(tool.name for tool in use.tools)
        reads_schemas = bool(tools) and TOOL_FORMATS[tools].tags is not None
        schemas = {tool.name: json.dumps(tool.parameters) for tool in use.tools} if reads_schemas else {}
        return Parsing(tools, reasoning, is_thinking, names, keeps_one=not use.in_parallel, schemas=schemas)

    def _check_names(self, form: str, tools: Sequence[Tool]) -> None:
        """Refuse names that cannot be told from what stands beside them in calls."""
        if not (TOOL_FORMATS[form].has_bare_names or self._has_arguments_in_brackets):
            return
        for tool in tools:
            if not _BARE_NAME.fullmatch(tool.name):
                line = f"{tool.place}.function.name: this model's calls have names without blanks, brackets and quotes"
                raise Refusal(Kind.INVALID, f"{line}, not {show_value(tool.name)}", "tools")

    def _wanted(self, sampling: SamplingParams, use: ToolUse | None, parsing: Parsing) -> Wanted | None:
        """What is to be guided; None where nothing more is than the request's own guide."""
        other = None if sampling.guided is None else as_lark(sampling.guided)
        if use is None or not parsing.tools:
            return Wanted(other=other) if other is not None and parsing.reasoning else None
        is_guided = _must_call(use) or other is not None
        is_bound = any(tool.is_strict for tool in use.callable) or len(use.callable) < len(use.tools)
        if not is_guided and not (is_bound and use.callable and is_free(parsing.tools)):
            return None
        schema = json.loads(sampling.guided.text) if sampling.guided and sampling.guided.kind == "json" else None
        return Wanted(use.callable, _must_call(use), use.in_parallel, other, schema, self._has_arguments_in_brackets)

    def _guide(self, sampling: SamplingParams, wanted: Wanted, parsing: Parsing) -> SamplingParams:
        with wrap_errors():
            special = self._prompts.ids_in_guides(_marks(parsing))
        try:
            grammar = write_grammar(parsing.tools, parsing.reasoning, parsing.is_thinking, wanted, special)
        except InvalidRequestError as error:
            raise Refusal(Kind.INVALID, str(error), "tools") from None
        try:
            return replace(sampling, guided={"grammar": grammar})  # type: ignore[arg-type]
        except InvalidRequestError as error:
            line = str(error).removeprefix("guided.grammar ")
            raise Refusal(Kind.INVALID, f"tools: what guides the answer {line}", "tools") from None

    def _check(self, sampling: SamplingParams, tools: Sequence[Tool], own: Guide | None) -> None:
        """Refuse what guides an answer and cannot be followed, by the name of what it is made of: a tool, or the guide
        of the request's own."""
        try:
            self._prompts.check(sampling)
        except InvalidRequestError as error:
            if not str(error).startswith("guided"):
                raise Refusal(Kind.INVALID, str(error)) from None
            for tool in tools:
                self._check_tool(tool)
            if own is not None:
                with wrap_errors():
                    self._prompts.check(replace(sampling, guided=own))
            line = f"what guides the answer cannot be followed: {str(error).removeprefix('guided: ')}"
            if len(tools) > 1:  # each of which can be followed alone
                line = f"{line}; give fewer than {len(tools)} tools"
            raise Refusal(Kind.INVALID, f"tools: {line}", "tools") from None

    def _check_tool(self, tool: Tool) -> None:
        schema: Mapping[str, Any] = {"json": arguments_schema(tool)}
        try:
            self._prompts.check(SamplingParams(guided=schema))  # type: ignore[arg-type]
        except InvalidRequestError as error:
            line = str(error).removeprefix("guided: ")
            raise Refusal(Kind.INVALID, f"{tool.place}.function.parameters: {line}", "tools") from None

    def _is_thinking(self, call: ChatCall, prompt: Sequence[int]) -> bool:
        """Whether the answer begins within thoughts."""
        if not self._reasoning or self._tokenizer is None:
            return False
        form = REASONING_FORMATS[self._reasoning]
        if call.rendering.continue_final_message:
            text = str(call.messages[-1]["content"])
            return text.rfind(form.open_mark) > text.rfind(form.close_mark)
        if form.always_thinks:
            return not self._prompts.ends_with(prompt, form.close_mark)
        return self._prompts.ends_with(prompt, form.open_mark)

    def _hides_marks(self, parsing: Parsing) -> bool:
        """Whether texts lack marks, as special tokens are left out."""
        return self._tokenizer is not None and not self._tokenizer.special_tokens.isdisjoint(_marks(parsing))


def _must_call(use: ToolUse) -> bool:
    return use.choice is Choice.REQUIRED


def _marks(parsing: Parsing) -> list[str]:
    tools = TOOL_FORMATS[parsing.tools].marks if parsing.tools else ()
    reasoning = REASONING_FORMATS[parsing.reasoning].marks if parsing.reasoning else ()
    return list(dict.fromkeys([*tools, *reasoning]))
