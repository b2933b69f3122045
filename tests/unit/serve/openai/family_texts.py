"""Texts with calls as GLM, MiniMax, Kimi and DeepSeek V3.2 write them, or what nearly is one, and what is found in
them: the same cases in each form.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from call_texts import OBJECT, call

from launch.serve.api.openai.output.machine import Arguments, CallBegin, Event, Text

Cases = list[tuple[str, list[Event]]]


@dataclass(frozen=True)
class Form:
    """How one form writes calls whose arguments are texts."""

    opening: str
    closing: str
    head: str
    end: str
    argument: Callable[[str, str, bool], str]
    end_argument: str
    between: str = ""

    def one(self, name: str, *arguments: str) -> str:
        """A call, without what may be around all of them."""
        return self.head.format(name) + "".join(arguments) + self.end

    def calls(self, *calls: str) -> str:
        """Calls of one answer."""
        return self.opening + self.between.join(calls) + self.closing


def _glm(line: str) -> Form:
    return Form(
        opening="",
        closing="",
        head=f"<tool_call>{{}}{line}",
        end="</tool_call>",
        argument=lambda key, value, _: f"<arg_key>{key}</arg_key>{line}<arg_value>{value}</arg_value>{line}",
        end_argument=f"</arg_value>{line}",
        between="\n",
    )


def _invoked(prefix: str, block: str, has_kind: bool) -> Form:
    def argument(key: str, value: str, is_text: bool) -> str:
        kind = f' string="{"true" if is_text else "false"}"' if has_kind else ""
        return f'<{prefix}parameter name="{key}"{kind}>{value}</{prefix}parameter>\n'

    return Form(
        opening=f"<{block}>\n",
        closing=f"</{block}>",
        head=f'<{prefix}invoke name="{{}}">\n',
        end=f"</{prefix}invoke>\n",
        argument=argument,
        end_argument=f"</{prefix}parameter>\n",
    )


FORMS = {
    "glm45": _glm("\n"),
    "glm47": _glm(""),
    "minimax_m2": _invoked("", "minimax:tool_call", False),
    "deepseek_v32": _invoked("｜DSML｜", "｜DSML｜function_calls", True),
    "deepseek_v4": _invoked("｜DSML｜", "｜DSML｜tool_calls", True),
}


def tagged_cases(name: str) -> Cases:
    """Cases of a form whose arguments are texts."""
    form = FORMS[name]
    city, days = form.argument("city", "Rome", True), form.argument("days", "3", False)
    text = ' A "b"\n</tool> <c>\n\n'
    rest = {"list": [1, {"x": None}], "truth": True, "none": None, "real": -1.5e3, "words": "[no", "more": {"a": "é"}}
    others = [
        form.argument(key, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False), key == "words")
        for key, value in rest.items()
    ]
    cases: Cases = [
        ("hello <b> \n", [Text("hello <b> \n")]),
        (
            f"I look.\n{form.calls(form.one('f', city, days), form.one('g'))}\ntail <too",
            [Text("I look."), *call("f", '{"city": "Rome", "days": 3}'), *call("g"), Text("tail <too")],
        ),
        (
            form.calls(form.one("f", form.argument("city", text, True))),
            call("f", f'{{"city": {json.dumps(text)}}}'),
        ),
        (form.calls(form.one("h", *others)), call("h", json.dumps(rest, ensure_ascii=False))),
        (form.calls(form.one("f", form.argument("city", "5", True))), call("f", '{"city": "5"}')),
        (form.calls(form.one("f", form.argument("city", "", True))), call("f", '{"city": ""}')),
        (form.calls(form.one("f", form.argument("days", "many", False))), call("f", '{"days": "many"}')),
        (form.calls(form.one("f", form.argument("on", "null", False))), call("f", '{"on": null}')),
        # What breaks off.
        (_until(form, city, "Ro"), call("f", '{"city": "Ro')),
        (_until(form, days, "3"), call("f", '{"days": 3')),
        (_until(form, city, "</"), call("f", '{"city": "Rome</')),
        (_until(form, city, form.end_argument), call("f", '{"city": "Rome"')),
        (f"{_until(form, days, form.end_argument)}<", call("f", '{"days": 3')),
        (f"{_until(form, days, form.end_argument)}{city[:8]}", call("f", '{"days": 3')),
        (f"{_until(form, days, form.end_argument)} and", [*call("f", '{"days": 3}'), Text("and")]),
        (form.calls(form.one("f", city)).removesuffix(form.closing).rstrip()[:-3], call("f", '{"city": "Rome"')),
        # Values without their own mark.
        (
            form.calls(form.one("f", city.replace(form.end_argument, ""), days)),
            call("f", '{"city": "Rome", "days": 3}'),
        ),
        (
            f"{form.calls(form.one('f', city.replace(form.end_argument, '')))} so",
            [*call("f", '{"city": "Rome"}'), Text("so")],
        ),
        # What is no call.
        *((no_call, [Text(no_call)]) for no_call in _no_calls(form)),
    ]
    if form.opening:
        cases += [
            (f"So: {form.one('f', city)}x", [Text("So:"), *call("f", '{"city": "Rome"}'), Text("x")]),
            (form.one("h", city), [Text(form.one("h", city))]),
            (f"{form.calls(form.one('f'))}{form.calls(form.one('g'))}", [*call("f"), *call("g")]),
        ]
    return cases


def _until(form: Form, argument: str, last: str) -> str:
    """A call up to some text of its argument, which is its last."""
    return form.opening + form.head.format("f") + argument[: argument.rindex(last) + len(last)]


def _no_calls(form: Form) -> list[str]:
    head = form.head.format("f")
    opening = form.opening.strip() or "<tool_call>"
    return [
        f"The mark `{opening}` begins a call.",
        f"{opening}none{opening.replace('<', '</')} x",
        f"{form.opening}{head.rstrip()}",
        f"{form.opening}{form.head.format('n' * 300)}",
        f"{form.opening}{form.head.format('a b')}{form.end}" if not form.opening else f"{form.opening}x",
        f'{opening}{{"name": "f"}}',
    ]


BEGIN, END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"


def kimi_call(call_id: str, arguments: str) -> str:
    return f"<|tool_call_begin|>{call_id}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


def with_id(call_id: str, name: str, arguments: str = "{}") -> list[Event]:
    return [CallBegin(name, call_id), Arguments(arguments)]


F0, G1, CUT = "functions.f:0", "functions.g:1", '{"a": [1'
KIMI: Cases = [
    (
        f"I look. {BEGIN}{kimi_call(F0, OBJECT)}{kimi_call(G1, '{}')}{END} tail <|tool",
        [Text("I look."), *with_id(F0, "f", OBJECT), *with_id(G1, "g"), Text("tail <|tool")],
    ),
    (f"{BEGIN}\n{kimi_call(f'{F0} ', ' {} ')}\n{END}", with_id(F0, "f")),
    (kimi_call("f:12", "{}"), with_id("f:12", "f")),
    (f"{BEGIN}{kimi_call('a.b-c', '{}')}", call("a.b-c")),
    (f"{BEGIN}{kimi_call(F0, '{}')}{kimi_call(F0, '{}')}", [*with_id(F0, "f"), *call("f")]),
    (BEGIN + kimi_call(F0, CUT).removesuffix("<|tool_call_end|>"), with_id(F0, "f", CUT)),
    (f"{BEGIN}{kimi_call(F0, CUT)}{END}x", [*with_id(F0, "f", CUT), Text("x")]),
    (f"{BEGIN}{kimi_call(F0, '{}')[:-3]}", with_id(F0, "f")),
    *(
        (no_call, [Text(no_call)])
        for no_call in (
            f"{BEGIN}{END}",
            f"{BEGIN}none",
            kimi_call("0", "{}"),
            kimi_call(F0, "none"),
            f"<|tool_call_begin|>{F0}",
            f"<|tool_call_begin|>{'n' * 300}<|tool_call_argument_begin|>{{}}",
        )
    ),
]
_DSML = FORMS["deepseek_v32"]
# What a parameter says of itself, where its schema leaves both open.
DSML_KINDS: Cases = [
    (_DSML.calls(_DSML.one("g", _DSML.argument("x", value, is_text))), call("g", f'{{"x": {told}}}'))
    for value, is_text, told in (
        *(("5", True, '"5"'), ("5", False, "5"), ('"a"', True, '"\\"a\\""'), ('"a"', False, '"a"')),
        *(("null", True, '"null"'), ("null", False, "null"), ("word", False, '"word"')),
    )
]
_GEMMA_CALL = "<|tool_call>call:"
GEMMA: list[tuple[str, list[Event]]] = [
    (
        f'Yes. {_GEMMA_CALL}f{{city:<|"|>a "b"\n{{}}\\<|"|>,days:[1,-2.5e3,true],in:{{x:null,y:{{}}}}}}<tool_call|>'
        f"{_GEMMA_CALL}g{{}}<tool_call|> so",
        [
            Text("Yes."),
            *call("f", '{"city": "a \\"b\\"\\n{}\\\\", "days": [1, -2.5e3, true], "in": {"x": null, "y": {}}}'),
            *call("g"),
            Text("so"),
        ],
    ),
    (
        f'{_GEMMA_CALL}f{{"a": {{"b": "c\\"}}"}}, "d": [1, 2]}}<tool_call|>',
        call("f", '{"a": {"b": "c\\"}"}, "d": [1, 2]}'),
    ),
    (
        f'{_GEMMA_CALL} f {{<|"|>a b<|"|> : True , c:[ ] ,}}',
        [Text(f'{_GEMMA_CALL} f {{<|"|>a b<|"|> : True , c:[ ] ,}}')],
    ),
    (f'{_GEMMA_CALL}f {{<|"|>a b<|"|> : True , c:[ ] ,}} x', [*call("f", '{"a b": true, "c": []}'), Text("x")]),
    (f"{_GEMMA_CALL}f{{city:New York,n:01}}<tool_call|>", call("f", '{"city": "New York", "n": "01"}')),
    (f'{_GEMMA_CALL}f{{a:<|"|>b', call("f", '{"a": "b')),
    (f'{_GEMMA_CALL}f{{a:<|"|>b<tool_call|><|', call("f", '{"a": "b<tool_call|><|')),
    (f"{_GEMMA_CALL}f{{a:tr", call("f", '{"a": tr')),
    (f"{_GEMMA_CALL}f{{a:[1}}, <tool_call|>x", [*call("f", '{"a": [1}, '), Text("x")]),
    (f"{_GEMMA_CALL}f{{a:1 <tool_call|>x", [*call("f", '{"a": 1'), Text("x")]),
    (f"{_GEMMA_CALL}f{{a:1}}<tool_", call("f", '{"a": 1}')),
    (f"{_GEMMA_CALL}f", [Text(f"{_GEMMA_CALL}f")]),
    (f"{_GEMMA_CALL}f(1) {_GEMMA_CALL}g{{}}", [Text(f"{_GEMMA_CALL}f(1)"), *call("g")]),
    ("<|tool_call>names{}", [Text("<|tool_call>names{}")]),
]
FAMILY_TEXTS = [
    *(("deepseek_v32", "", text, found) for text, found in DSML_KINDS),
    *((name, "", text, found) for name in FORMS for text, found in tagged_cases(name)),
    *(("kimi_k2", "", text, found) for text, found in KIMI),
    *(("gemma4", "", text, found) for text, found in GEMMA),
]
