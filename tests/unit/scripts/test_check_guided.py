"""What scripts/check_guided.py asks for, and which texts it takes for valid."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "scripts"))

from check_guided import judge
from guided_schemas import schemas_of
from text_formats import FORMATS


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
