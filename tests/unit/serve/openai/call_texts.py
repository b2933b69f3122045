"""Texts with calls in each family's form, or what nearly is one, and what is found in them."""

from __future__ import annotations

import json
from collections.abc import Sequence

from launch.serve.api.openai.output import marked_calls as marked
from launch.serve.api.openai.output.machine import Arguments, CallBegin, Event, Reasoning, Text, joined
from launch.serve.api.openai.output.parsing import ChoiceParser, Parsing


def parse(parsing: Parsing, parts: Sequence[str]) -> list[Event]:
    parser = ChoiceParser(parsing)
    found = [event for part in parts for event in parser.feed(part, False)]
    return joined([*found, *parser.feed("", True)])


def call(name: str, arguments: str = "{}") -> list[Event]:
    return [CallBegin(name), Arguments(arguments)]


OBJECT = '{"city": "a \\"}] <b>\\\\", "list": [1, {"x": null}], "empty": {}}'
HERMES: list[tuple[str, list[Event]]] = [
    ("hello  \n", [Text("hello  \n")]),
    (
        f'Let me see.\n<tool_call>\n{{"name": "f", "arguments": {OBJECT}}}\n</tool_call>\n<tool_call>{{"arguments": '
        '{"a": 1}, "id": [1], "name": "g"}</tool_call>\n',
        [Text("Let me see."), *call("f", OBJECT), *call("g", '{"a": 1}')],
    ),
    ('<tool_call>{"name": "f"}</tool_call> tail <tool', [*call("f"), Text("tail <tool")]),
    ("<tool_call>none</tool_call> x", [Text("<tool_call>none</tool_call> x")]),
    ("<tool_call>{'a': 1}</tool_call>", [Text("<tool_call>{'a': 1}</tool_call>")]),
    ('<tool_call>{"a": 1}</tool_call>', [Text('<tool_call>{"a": 1}</tool_call>')]),
    ('<tool_call>{"name": 5, "arguments": {}}', [Text('<tool_call>{"name": 5, "arguments": {}}')]),
    ('<tool_call>{"name": "f", "arguments": [1]}', [Text('<tool_call>{"name": "f", "arguments": [1]}')]),
    ('<tool_call>{"name": "f", "arguments": {a', [Text('<tool_call>{"name": "f", "arguments": {a')]),
    ('<tool_call>{"name": "f", "argu', [Text('<tool_call>{"name": "f", "argu')]),
    ('<tool_call>\n{"name": "f", "arguments": {"a": "b', call("f", '{"a": "b')),
    ('<tool_call>{"x"<tool_call>{"name": "f"}</tool_call>', [Text('<tool_call>{"x"'), *call("f")]),
    ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', call("f", '{"a": 1}')),
    ('<tool_call>{"name": "f", "arguments": null}}</tool_call>', call("f")),
    ('<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>more', [*call("f", '{"a": 1}'), Text("more")]),
    ('<tool_call>{"name": "f", "arguments": {"a": [1}</tool_call> b', [*call("f", '{"a": [1}'), Text("b")]),
    (
        '<tool_call>{"name": "f", "arguments": {"a": 1 < 2, <"b": "</tool_call>"',
        call("f", '{"a": 1 < 2, <"b": "</tool_call>"'),
    ),
    ('<tool_call>{"name": "f", "arguments": {"a": 1 </tool_', call("f", '{"a": 1 </tool_')),
    ('<tool_call>{"arguments": {"a": 1 </tool_call>', [Text('<tool_call>{"arguments": {"a": 1 </tool_call>')]),
    ('<tool_call>{"name": "f"}\n{"name": "g"}</tool_call>', [*call("f"), *call("g")]),
    ('<tool_call>\n{"name": "f"}\n</tool_c', call("f")),
    (f'<tool_call>{{"{"n" * 600}": 1, "name": "f"}}', [Text(f'<tool_call>{{"{"n" * 600}": 1, "name": "f"}}')]),
    (f'<tool_call>{{"name": "{"n" * 600}"}}', [Text(f'<tool_call>{{"name": "{"n" * 600}"}}')]),
]
LLAMA: list[tuple[str, list[Event]]] = [
    (f'{{"name": "f", "parameters": {OBJECT}}}', call("f", OBJECT)),
    (' {"type": "function", "name": "f", "parameters": {}};\n{"name": "g"}', [*call("f"), *call("g")]),
    ('{"name": "Bob", "parameters": {}}', [Text('{"name": "Bob", "parameters": {}}')]),
    ('{"a": {"name": "f"}}', [Text('{"a": {"name": "f"}}')]),
    ('<|python_tag|>{"name": "other", "parameters": {"a": 1}}', call("other", '{"a": 1}')),
    ('Well: <|python_tag|>{"name": "f"} so', [Text("Well:"), *call("f"), Text("so")]),
    ("<|python_tag|>search.call()", [Text("<|python_tag|>search.call()")]),
    ("the set {1, 2} <|py", [Text("the set {1, 2} <|py")]),
    ('{"name": "f"}; and', [*call("f"), Text("; and")]),
]
MISTRAL: list[tuple[str, list[Event]]] = [
    (
        f'Yes. [TOOL_CALLS] [{{"name": "f", "arguments": {OBJECT}}}, {{"name": "g", "arguments": {{}}, "id": "1"}}]',
        [Text("Yes."), *call("f", OBJECT), *call("g")],
    ),
    (f"[TOOL_CALLS]f[ARGS]{OBJECT}[TOOL_CALLS]g[CALL_ID]a1[ARGS]{{}}", [*call("f", OBJECT), *call("g")]),
    ('[TOOL_CALLS]f{"a": 2}', call("f", '{"a": 2}')),
    (
        '[TOOL_CALLS]f{"a": "[TOOL_CALLS]g"}[TOOL_CALLS]g.x-1[ARGS] {} so',
        [*call("f", '{"a": "[TOOL_CALLS]g"}'), *call("g.x-1"), Text("so")],
    ),
    ('[TOOL_CALLS] [{"arguments": {"name": "Bob"}, "name": "f"}]', call("f", '{"name": "Bob"}')),
    ('[TOOL_CALLS]f[ARGS]{"a": "b', call("f", '{"a": "b')),
    ('[TOOL_CALLS]{"name": "f"}', call("f")),
    ('[TOOL_CALLS][{"bad": 1}] x', [Text('[TOOL_CALLS][{"bad": 1}] x')]),
    ("[TOOL_CALLS][]", [Text("[TOOL_CALLS][]")]),
    ("[TOOL_CALLS]f [ARGS]", [Text("[TOOL_CALLS]f [ARGS]")]),
    ("[TOOL_CALLS]f[ARGS]{bad}", [Text("[TOOL_CALLS]f[ARGS]{bad}")]),
    ("[TOOL_CALLS]f[CALL_ID]" + "x" * 80, [Text("[TOOL_CALLS]f[CALL_ID]" + "x" * 80)]),
    ("a list [1] and [TOOL", [Text("a list [1] and [TOOL")]),
]
NEMOTRON: list[tuple[str, list[Event]]] = [
    (
        f'Yes. <TOOLCALL>[{{"name": "f", "arguments": {OBJECT}}}, {{"name": "g", "arguments": {{}}}}]</TOOLCALL>\nand',
        [Text("Yes."), *call("f", OBJECT), *call("g"), Text("and")],
    ),
    ('<TOOLCALL>{"name": "f"} </TOOLCALL>', call("f")),
    ('<TOOLCALL>[{"name": "f"}]</TOOLC', call("f")),
    ('<TOOLCALL>[{"name": "f", "arguments": {"a": 1}]</TOOLCALL> b', [*call("f", '{"a": 1}'), Text("b")]),
    ('<TOOLCALL>[{"name": "f", "arguments": {"a": [1</TOOLCALL> b', [*call("f", '{"a": [1'), Text("b")]),
    ('<TOOLCALL>[{"name": "f", "arguments": {"a": 1 </TOOL', call("f", '{"a": 1 </TOOL')),
    ('<TOOLCALL>[{"name": "f"}]<TOOLCALL>[{"name": "g"}] x', [*call("f"), *call("g"), Text("x")]),
    ("<TOOLCALL>f[ARGS]{}</TOOLCALL>", [Text("<TOOLCALL>f[ARGS]{}</TOOLCALL>")]),
    ('<TOOLCALL>[{"bad": 1}]</TOOLCALL>', [Text('<TOOLCALL>[{"bad": 1}]</TOOLCALL>')]),
    ("<TOOLCALL>[]</TOOLCALL>", [Text("<TOOLCALL>[]</TOOLCALL>")]),
]
LISTS: list[tuple[str, list[Event]]] = [
    (
        f'[{{"name": "f", "parameters": {OBJECT}}}, {{"name": "g", "parameters": {{}}}}]',
        [*call("f", OBJECT), *call("g")],
    ),
    ("[1, 2]", [Text("[1, 2]")]),
    ('[{"name": "Bob", "parameters": {}}]', [Text('[{"name": "Bob", "parameters": {}}]')]),
    ('[{"name": "f", "age": 1}]', [Text('[{"name": "f", "age": 1}]')]),
    ("[]", [Text("[]")]),
    ("none", [Text("none")]),
]
ANALYSIS = "<|channel|>analysis<|message|>"
HARMONY: list[tuple[str, list[Event]]] = [
    (
        f"{ANALYSIS}Hm <x>.<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
        '{"a": 1}<|call|>',
        [Reasoning("Hm <x>."), *call("f", '{"a": 1}')],
    ),
    (' to=functions.f<|channel|>commentary json<|message|>{"a"', call("f", '{"a"')),
    (
        f"{ANALYSIS}Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hello  \n<|return|>",
        [Reasoning("Hm."), Text("Hello  \n")],
    ),
    (
        "<|channel|>commentary<|message|>First: <|end|><|start|>assistant to=functions.g<|channel|>commentary"
        "<|message|> ",
        [Text("First:"), *call("g")],
    ),
    (
        f"{ANALYSIS}By <|channel|> I <|channel|>commentary to=functions.f <|constrain|>json<|message|>"
        '{"a": 1}<|call|>',
        [Reasoning("By <|channel|> I "), *call("f", '{"a": 1}')],
    ),
    (f"{ANALYSIS}So<|channel|>final<|message|>x", [Reasoning("So<|channel|>final<|message|>x")]),
    # As OpenAI's page on the format has them: words before a call, several calls, kinds of bodies, built-in tools.
    (
        "<|channel|>commentary<|message|>**Plan**:\n1. f<|end|><|start|>assistant<|channel|>commentary to=functions.f"
        ' <|constrain|>json<|message|>{"a": 1}<|call|><|start|>assistant to=functions.a.g<|channel|>commentary code'
        "<|message|>{}<|call|>",
        [Text("**Plan**:\n1. f"), *call("f", '{"a": 1}'), *call("a.g")],
    ),
    (f"{ANALYSIS.replace('<|m', ' to=functions.f<|m')}{{}}<|call|>", call("f")),
    ('<|channel|>final <|constrain|>json<|message|>{"a": 1}<|return|>', [Text('{"a": 1}')]),
    (f"{ANALYSIS.replace('<|m', ' to=python code<|m')}print(1)<|call|>", [Reasoning("print(1)")]),
    ("plain <| text", [Text("plain <| text")]),
    ("<|channel|>analysis", [Text("<|channel|>analysis")]),
    ("<|channel|>" + "x" * 2000, [Text("<|channel|>" + "x" * 2000)]),
]
SCHEMAS: dict[str, dict[str, object]] = {
    "f": {
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "on": {"type": ["boolean", "null"]}},
    },
    "g": {},
}
SCHEMAS_AS_JSON = {name: json.dumps(schema) for name, schema in SCHEMAS.items()}
CITY = '<parameter=city>\nA "b"\n<c>\n</parameter>'
CITY_JSON = '"city": "A \\"b\\"\\n<c>"'
QWEN3_CODER: list[tuple[str, list[Event]]] = [
    ("hello <b> \n", [Text("hello <b> \n")]),
    (
        f"I look.\n<tool_call>\n<function=f>\n{CITY}\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=g>\n</function>\n</tool_call> tail <tool",
        [Text("I look."), *call("f", f'{{{CITY_JSON}, "days": 3}}'), *call("g"), Text("tail <tool")],
    ),
    ("<tool_call><function=h><parameter=x>[1, 2]</parameter></function></tool_call>", call("h", '{"x": [1, 2]}')),
    ("<function=f>\n<parameter=on>True</parameter>\n</function>\n</tool_call>", call("f", '{"on": true}')),
    ("<function=h>\n<parameter=on>True</parameter>", [Text("<function=h>\n<parameter=on>True</parameter>")]),
    (
        "<tool_call><function=f><parameter=days>many</parameter></tool_call> so",
        [*call("f", '{"days": "many"}'), Text("so")],
    ),
    ("<tool_call>\n<function=f>\n</function>\n<function=g>\n</function></tool_call>", [*call("f"), *call("g")]),
    ('<tool_call>{"name": "f"}</tool_call>', [Text('<tool_call>{"name": "f"}</tool_call>')]),
    ("<tool_call>\n<function=f>\nno", [Text("<tool_call>\n<function=f>\nno")]),
    ("<tool_call><function=a b\n>", [Text("<tool_call><function=a b\n>")]),
    (f"<tool_call><function={'n' * 300}>", [Text(f"<tool_call><function={'n' * 300}>")]),
    ("<tool_call><tool_call><function=f></function>", [Text("<tool_call>"), *call("f")]),
    ("<function=<function=g></function>", [Text("<function="), *call("g")]),
    ("<tool_call><function=f>", [Text("<tool_call><function=f>")]),
    ("<tool_call><function=f><parameter=city>\nRo", call("f", '{"city": "Ro')),
    ("<tool_call><function=f><parameter=city>\nRo\n</para", call("f", '{"city": "Ro\\n</para')),
    ("<tool_call><function=f><parameter=days>\n3", call("f", '{"days": 3')),
    ("<tool_call><function=f><parameter=days>3</parameter>\n<parameter=ci", call("f", '{"days": 3')),
    ("<tool_call><function=f><parameter=days>3</parameter>\n</", call("f", '{"days": 3')),
    ("<tool_call><function=f></function>\n</tool", call("f")),
    ("<tool_call><function=f></function><function=<x", [*call("f"), Text("<function=<x")]),
    ("<tool_call><function=f></function><function=g>x", [*call("f"), Text("<function=g>x")]),
    (f"<tool_call><function=f>{CITY}", call("f", f"{{{CITY_JSON}")),
    (f"<tool_call><function=f>{CITY} and so", [*call("f", f"{{{CITY_JSON}}}"), Text("and so")]),
    (f"<tool_call><function=f>{CITY}<parameter=<x>", [*call("f", f"{{{CITY_JSON}}}"), Text("<parameter=<x>")]),
    ("<tool_call><function=f><parameter=city>\n\n</parameter></function>", call("f", '{"city": ""}')),
    ("<tool_call><function=f><parameter=city></parameter></function>", call("f", '{"city": ""}')),
]
BEGIN_F, END_F = "<tool_call>\n<function=f>\n", "\n</function>\n</tool_call>"
ROME = f"{BEGIN_F}<parameter=city>\nRome\n</parameter>{END_F}"
# Values whose own mark is missing; and texts that hold other marks.
QWEN3_CODER += [
    (
        f"{BEGIN_F}<parameter=city>\nDallas\n<parameter=days>\n3\n<parameter=on>\ntrue\n</parameter>{END_F}",
        call("f", '{"city": "Dallas", "days": 3, "on": true}'),
    ),
    (
        f"{BEGIN_F}<parameter=city>\nDallas{END_F}\n{ROME}",
        [*call("f", '{"city": "Dallas"}'), *call("f", '{"city": "Rome"}')],
    ),
    (
        f"{BEGIN_F}<parameter=city>\nDallas\n</tool_call>\n{ROME}",
        [*call("f", '{"city": "Dallas"}'), *call("f", '{"city": "Rome"}')],
    ),
    (f"{BEGIN_F}<parameter=days>\n3{END_F} so", [*call("f", '{"days": 3}'), Text("so")]),
    (f"{BEGIN_F}<parameter=city>\nDallas\n</function>", call("f", '{"city": "Dallas"}')),
    *(
        (f"{BEGIN_F}<parameter=city>\n{text}\n</parameter>{END_F}", call("f", json.dumps({"city": text})))
        for text in (
            "a\n<parameter=other>\nb",
            "a <parameter=days> b",
            "a\n<parameter=city>\nb",
            f"a{END_F}\nb{END_F}",
            "a </function> </tool_call>\n</tool_call> b </function>",
        )
    ),
    (f"{BEGIN_F}<parameter=city>\na\n<parameter=days>", call("f", '{"city": "a\\n<parameter=days>')),
    (f"{BEGIN_F}<parameter=city>\na </function>", call("f", '{"city": "a </function>')),
]
CALLS, CALL, SEP, END, END_CALLS = marked.DEEPSEEK
DEEPSEEK: list[tuple[str, list[Event]]] = [
    ("hello <｜  \n", [Text("hello <｜  \n")]),
    (
        f"I look.\n{CALLS}{CALL}function{SEP}f\n```json\n{OBJECT}\n```{END}\n{CALL}function{SEP}g\n```json\n{{}}\n```"
        f"{END}{END_CALLS} ```x```",
        [Text("I look."), *call("f", OBJECT), *call("g"), Text("```x```")],
    ),
    (f"{CALLS}{CALL}f{SEP}{OBJECT}{END}{CALL}g{SEP}{{}}{END}{END_CALLS}", [*call("f", OBJECT), *call("g")]),
    (f"{CALLS}{CALL}function{SEP}{{}}{END}{END_CALLS}", call("function")),
    (f"so {CALL} f {SEP} {{}} ``` x", [Text("so"), *call("f"), Text("``` x")]),
    (f"{CALL}function{SEP}f\n```json\n{{}}\n``` ``` x", [*call("f"), Text("``` x")]),
    (
        f"{CALL}function{SEP}f\n```json\n{{}} so {CALL}g{SEP}{{}} ```",
        [*call("f"), Text("so"), *call("g"), Text("```")],
    ),
    (f'{CALL}f{SEP}{{"a": [1{END} b', [*call("f", '{"a": [1'), Text("b")]),
    (f'{CALL}f{SEP}{{"a": 1 <｜tool▁c', call("f", '{"a": 1 <｜tool▁c')),
    (f"{CALL}f{SEP}{{}}<｜tool▁calls▁e", call("f")),
    (f"{CALLS}{CALLS}{CALL}f{SEP}{{}}", [Text(CALLS), *call("f")]),
    (f"{CALLS}none", [Text(f"{CALLS}none")]),
    (f"{CALL}f{SEP}none", [Text(f"{CALL}f{SEP}none")]),
    (f"{CALL}function{SEP}f\n```python\nx", [Text(f"{CALL}function{SEP}f\n```python\nx")]),
    (f"{CALL}function{SEP}f\n```json\n[1]", [Text(f"{CALL}function{SEP}f\n```json\n[1]")]),
    (f"{CALL}{'n' * 300}{SEP}{{}}", [Text(f"{CALL}{'n' * 300}{SEP}{{}}")]),
    (f"{CALL}f", [Text(f"{CALL}f")]),
]
TEXTS = [
    *(("llama_nemotron_json", "", text, found) for text, found in NEMOTRON),
    *(("deepseek_v3", "", text, found) for text, found in DEEPSEEK),
    *(("qwen3_coder", "", text, found) for text, found in QWEN3_CODER),
    *(("hermes", "", text, found) for text, found in HERMES),
    *(("llama3_json", "", text, found) for text, found in LLAMA),
    *(("mistral", "", text, found) for text, found in MISTRAL),
    *(("json", "", text, found) for text, found in LISTS),
    *(("gpt-oss", "gpt-oss", text, found) for text, found in HARMONY),
]
