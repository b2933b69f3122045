"""Guides that are nested deep, along their references too: the grammar engine recurses, and a stack that ends takes the
process along, or all rows of a job."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest

from trtrun.core.guide import Guide
from trtrun.errors import InvalidRequestError
from trtrun.guiding import bounds
from trtrun.guiding.grammars import Grammars

SMALL_STACK = 256 << 10


def chain(wrap: Callable[[Any, int], Any], length: int, nested: int) -> Guide:
    """Definitions that refer to each other in turn, each within others."""
    parts: dict[str, Any] = {f"d{length}": {"type": "null"}}
    for number in range(length):
        part: Any = {"$ref": f"#/$defs/d{number + 1}"}
        for _ in range(nested):
            part = wrap(part, number)
        parts[f"d{number}"] = part
    return Guide("json", json.dumps({"$defs": parts, "$ref": "#/$defs/d0"}))


def rules(name: str, length: int, nested: int) -> Guide:
    """Rules or terminals in Lark that do."""
    begin, end = '("x" ' * nested, ")" * nested
    lines = [f"{name}{number}: {begin}{name}{number + 1}{end}" for number in range(length)]
    return Guide("grammar", "\n".join([f"start: {name}0", *lines, f'{name}{length}: "y"']))


def of_any(part: Any, number: int) -> Any:
    return {"anyOf": [part, {"const": number}]}


def items(part: Any, number: int) -> Any:
    return {"type": "array", "items": part}


def properties(part: Any, number: int) -> Any:
    return {"type": "object", "properties": {"a": part}, "required": ["a"]}


@pytest.mark.parametrize(
    ("guide", "said"),
    [
        (chain(of_any, 312, 5), "JSON schema is nested 1874 deep"),
        (chain(items, 335, 5), "JSON schema is nested 2012 deep"),
        (chain(properties, 100, 5), "JSON schema is nested"),
        (rules("r", 394, 9), "grammar is nested 3942 deep"),
        (rules("T", 396, 9), "grammar is nested 3962 deep"),
        (Guide("grammar", "root ::= " + "(" * 600 + '"a"' + ")" * 600), "grammar is nested 601 deep"),
        (Guide("grammar", "root ::= " + "[" * 100_000), "grammar is nested 100001 deep"),
        (Guide("regex", "(" * 5000 + "a" + ")" * 5000), "cannot be followed"),
        (Guide("grammar", f"start: %json {chain(of_any, 312, 5).text}"), "JSON schema in the grammar is nested 1874"),
    ],
)
def test_what_is_nested_too_deep_is_refused(grammars: Grammars, guide: Guide, said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said) as refused:
        grammars.check(guide)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 500


def test_what_is_as_deep_as_may_be_takes_no_more_stack_than_there_is(grammars: Grammars) -> None:
    """In a thread with a small one, as `ulimit -s` may make them: in a process of its own, which would end by it."""
    guides = [
        chain(of_any, 83, 5),
        chain(items, 83, 5),
        chain(properties, 45, 5),
        rules("r", 249, 1),
        rules("r", 49, 9),
        rules("T", 249, 1),
    ]

    def compile_all() -> None:
        for guide in guides:
            matcher = grammars.matcher(guide)
            matcher.compute_bitmask()
            matcher.compute_ff_tokens()
        os._exit(0)

    child = os.fork()
    if not child:
        try:
            threading.stack_size(SMALL_STACK)
            thread = threading.Thread(target=compile_all)
            thread.start()
            thread.join(60)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def test_references_are_followed_wherever_they_lead() -> None:
    named = {"$id": "https://x/y", "$defs": {"a": {"$anchor": "b", "items": {"items": {}}}}}
    for reference in ("#/$defs/a", "#b", "https://x/y#/$defs/a"):
        assert bounds.depth_of_schema({**named, "items": {"$ref": reference}}) == 5, reference
    for nowhere in ("#/$defs/none", "#none", "https://z#/$defs/a/0", "#/$defs/a/~2"):
        assert bounds.depth_of_schema({**named, "items": {"$ref": nowhere}}) >= 4, nowhere
    assert bounds.depth_of_schema({"items": {"$ref": "#"}}) == 2, "a circle"
    wide = {
        "$defs": {f"d{n}": {"type": "null"} for n in range(599)},
        "anyOf": [{"$ref": f"#/$defs/d{n}"} for n in range(599)],
    }
    assert bounds.depth_of_schema(wide) == 3


def test_rules_are_followed_however_they_are_written() -> None:
    lark = 'start: a\na: (b "x")+ | c\nb: "y" -> z\nc: "(((" /[((]/ [d]\n?d{p}: A~3..4\nA.2: /x/ // ((((\n'
    assert bounds.depth_of_rules(lark) == 6
    assert bounds.depth_of_rules('root ::= item*\nitem ::= "[" [^(\\]"]+ "]" | "(" root ")"') == 2
    assert bounds.depth_of_rules("start: " + " | ".join(f"r{n}" for n in range(500)) + "\nr1: /a/") == 2
