"""The table of fields: what is taken, at which values, what is refused by name, and that the docs show it.

`python tests/unit/serve/openai/test_openai_fields.py` writes the table into docs/serve.md.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from launch.serve.admission.refusals import Refusal
from launch.serve.api.openai.fields import BY_NAME, FIELDS, Endpoint, Field, Treatment, fields_of
from launch.serve.api.openai.taking import take_fields as take
from launch.serve.api.openai.types import SAMPLING_FIELDS

DOCS = Path(__file__).resolve().parents[4] / "docs" / "serve.md"
BEGINNING, END = "<!-- fields: tests/unit/serve/openai/test_openai_fields.py -->\n", "<!-- end of fields -->\n"
NEUTRAL = [field for field in FIELDS if field.treatment is Treatment.NEUTRAL]


def take_fields(values: object, endpoint: Endpoint) -> dict[str, Any]:
    return take(values, fields_of(endpoint), endpoint.value)


def of_owners(treatment: Treatment) -> Iterator[tuple[str, list[Field]]]:
    found = [field for field in FIELDS if field.treatment is treatment]
    for owner in dict.fromkeys(field.owner for field in found):
        yield owner, [field for field in found if field.owner == owner]


def describe_fields() -> str:
    """The table as Markdown."""
    lines = ["| field | whose | |", "|---|---|---|"]
    for owner, found in of_owners(Treatment.EFFECT):
        for (says, endpoint), group in groupby(found, lambda field: (field.says, field.endpoint)):
            names = ", ".join(f"`{field.name}`" for field in group)
            told = "; ".join(part for part in (endpoint.value if endpoint else "", says) if part)
            lines.append(f"| {names} | {owner} | {told} |")
    lines += ["", "| accepted without effect: they change no text | |", "|---|---|"]
    for owner, found in of_owners(Treatment.IGNORED):
        lines.append(f"| {owner} | {', '.join(f'`{field.name}`' for field in found)} |")
    lines += ["", "| refused, unless they ask for nothing (with null, or as said) | |", "|---|---|"]
    for owner, found in of_owners(Treatment.NEUTRAL):
        lines.append(f"| {owner} | {', '.join(map(describe_neutral, found))} |")
    return "\n".join(lines) + "\n"


def describe_neutral(field: Field) -> str:
    values = [f"`{json.dumps(value)}`" for value in field.neutral]
    said = values + ([f"give {field.says}"] if field.says else [])
    return f"`{field.name}`" + (f" ({', '.join(said)})" if said else "")


def test_the_docs_show_the_table() -> None:
    assert BEGINNING + describe_fields() + END in DOCS.read_text(encoding="utf-8"), "run this file as a program"


def test_each_name_stands_once_and_each_parameter_has_its_own() -> None:
    assert len(BY_NAME) == len(FIELDS)
    assert {field.name for field in FIELDS if field.treatment is Treatment.EFFECT} >= SAMPLING_FIELDS


@pytest.mark.parametrize(
    ("module", "endpoint"),
    [("openai.types.completion_create_params", Endpoint.COMPLETIONS),
     ("openai.types.chat.completion_create_params", Endpoint.CHATS)],
)  # fmt: skip
def test_every_parameter_of_openais_own_client_is_known(module: str, endpoint: Endpoint) -> None:
    parameters = pytest.importorskip(module)
    names = {*parameters.CompletionCreateParamsBase.__annotations__, "stream"}
    assert len(names) > 15 and names <= fields_of(endpoint).keys()


@pytest.mark.parametrize("endpoint", list(Endpoint))
def test_null_is_nothing_whatever_the_name(endpoint: Endpoint) -> None:
    assert take_fields({name: None for name in [*BY_NAME, "reasoning_tokens", "temprature"]}, endpoint) == {}


@pytest.mark.parametrize("field", NEUTRAL, ids=lambda field: field.name)
def test_what_would_change_the_answer_is_taken_where_it_does_not(field: Field) -> None:
    for value in field.neutral:
        assert take_fields({field.name: value}, Endpoint.CHATS) == {}
        if type(value) is int:
            take_fields({field.name: float(value)}, Endpoint.CHATS)
    for value in ("something", 17, [1], {"a": 1}, True, False):
        if value not in field.neutral or type(value) not in map(type, field.neutral):
            with pytest.raises(Refusal, match=f"^{field.name} is not supported here: ") as caught:
                take_fields({field.name: value}, Endpoint.COMPLETIONS)
            assert caught.value.code == "unsupported_field" and caught.value.field == field.name


def test_functions_are_taken_where_none_may_be_called() -> None:
    functions = [{"name": "f"}]
    assert take_fields({"functions": functions, "function_call": "none"}, Endpoint.CHATS) == {}
    with pytest.raises(Refusal, match="functions is not supported here: give tools"):
        take_fields({"functions": functions, "tool_choice": "none"}, Endpoint.CHATS)


def test_what_is_ignored_is_not_looked_at() -> None:
    ignored = {field.name: {"any": ["value"]} for field in FIELDS if field.treatment is Treatment.IGNORED}
    assert take_fields({**ignored, "n": 2, "best_of": 2}, Endpoint.CHATS) == {"n": 2}


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("temprature", "'temperature'?"),
        ("zzz", "leave it out"),
        ("messages", "chats have it"),
        ("\ud800", ""),
    ],
)
def test_what_nobody_knows_is_refused_with_the_nearest_name(name: str, hint: str) -> None:
    with pytest.raises(Refusal, match="unknown field") as caught:
        take_fields({name: 1}, Endpoint.COMPLETIONS)
    assert hint in str(caught.value) and caught.value.code == "unknown_field"
    str(caught.value.field).encode()


if __name__ == "__main__":
    before, _, rest = DOCS.read_text(encoding="utf-8").partition(BEGINNING)
    DOCS.write_text(before + BEGINNING + describe_fields() + END + rest.partition(END)[2], encoding="utf-8")
