"""What scripts/soak/check_guided.py asks for, and which texts it takes for valid."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from scripts.soak import check_guided
from scripts.soak.check_guided import judge
from scripts.soak.guided_schemas import schemas_of
from scripts.soak.text_formats import FORMATS


def test_schemas_of_a_directory_are_drawn_by_the_seed(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    for number in range(20):
        (tmp_path / "below" / f"{number}.json").write_text(json.dumps({"const": number}))
    (tmp_path / "case.json").write_text(json.dumps({"schema": {"const": "case"}, "tests": []}))
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "none.json").write_text("{")
    drawn = [[*schemas_of(tmp_path, seed)] for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2] and sorted(drawn[0]) == sorted(drawn[2])
    assert {name: schema["const"] for name, schema in drawn[0]} == {
        "case.json": "case",
        **{f"below/{number}.json": number for number in range(20)},
    }


def test_a_directory_without_schemas_is_refused_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text("[1]")
    for directory in (tmp_path, tmp_path / "none"):
        with pytest.raises(SystemExit, match="no JSON schema lies there") as raised:
            list(schemas_of(directory, 1))
        assert str(directory) in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("kind", "valid", "invalid"),
    [
        ("date", "0000-02-29", "2023-02-29"),
        ("date-time", "2024-02-29t23:59:60.1234567z", "2023-02-29T00:00:00Z"),
        ("time", "10:11:12-13:24", "10:11:12"),
        ("duration", "P1Y2M3DT4H", "P"),
        ("hostname", "a-b.c", "-a"),
        ("uri", "http://a/b?x#y", "a"),
        ("uuid", "12345678-1234-1234-1234-123456789abc", "1"),
        ("ipv4", "1.2.3.4", "1.2.3.256"),
    ],
)
def test_formats_are_checked(kind: str, valid: str, invalid: str) -> None:
    assert FORMATS.conforms(valid, kind) and FORMATS.conforms(1, kind) and not FORMATS.conforms(invalid, kind)
    schema = {"items": {"format": kind}}
    assert judge(schema, json.dumps([valid]), "stop")[0] == "valid"
    assert judge(schema, json.dumps([invalid]), "stop")[0] == "invalid"


def test_what_an_answer_is_depends_on_its_end() -> None:
    drafts = {"$schema": "http://json-schema.org/draft-04/schema#", "maximum": 3, "exclusiveMaximum": True}
    assert judge(drafts, "2", "stop")[0] == "valid" and judge(drafts, "3", "stop")[0] == "invalid"
    assert judge({}, "{", "stop")[0] == "invalid" and judge({}, "{", "length")[0] == "cut short"
    assert judge({}, None, "error")[0] == "failed"


@pytest.mark.parametrize(
    ("drafted", "plain", "kind", "status"),
    [
        (("1", "stop", None), ("1", "stop", None), "valid", 0),
        (("1", "length", None), ("1", "length", None), "cut short", 0),
        (("1", "stop", None), ("2", "stop", None), "unequal", 1),
        (("x", "stop", None), ("x", "stop", None), "invalid", 1),
        ((None, "error", "no"), (None, "error", "no"), "failed", 1),
    ],
)
def test_what_must_not_be_shows_in_the_status(
    drafted: tuple[Any, ...], plain: tuple[Any, ...], kind: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes: list[bool] = []
    llm = SimpleNamespace(set_speculation=modes.append)
    monkeypatch.setattr(check_guided, "answers_of", lambda llm, asked: [drafted if modes[-1] else plain])
    arguments = argparse.Namespace(max_tokens=5, temperature=1.0, answers=1)
    counts = Counter[str]()
    check_guided.ask(llm, "a", {}, arguments, 1, counts)  # type: ignore[arg-type]
    assert counts[kind] == 1 and modes == [True, False] and check_guided.status_of(counts) == status
