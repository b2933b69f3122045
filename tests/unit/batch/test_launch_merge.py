"""Parts of a run become one output; what is missing, unfinished or contradictory is named and nothing is written."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import launch.batch.merge
from launch.batch.input import InputRows
from launch.batch.journal import RowJournal
from launch.batch.merge import Merged, merge_parts, part_path
from launch.batch.options import Part
from launch.exit_codes import FailedError
from trtrun.errors import ConfigError

TEXTS = [f"prompt {index}" for index in range(10)]
PROMPTS = InputRows(TEXTS)
HASHES = [row.input_hash for row in PROMPTS.read()]


def output_line(index: int, text: str = "", error: str | None = None, time_s: float = 0.5) -> dict[str, Any]:
    """An output row; its text has bytes above 127 and a line end."""
    text = text or f'\u4f60 "{index}"\n}}'
    row = {"index": index, "text": text, "time_s": time_s, "error": error, "input_hash": HASHES[index]}
    return {**row, "completions": [{"text": text, "time_s": time_s}]}


def write_part(path: Path, indexes: Sequence[int], num_input_rows: int | None = None, **values: Any) -> Path:
    last = {} if num_input_rows is None else {"num_input_rows": num_input_rows}
    lines = [json.dumps({**output_line(index, **values), **last}, ensure_ascii=False) + "\n" for index in indexes]
    path.write_text("".join(lines), encoding="utf-8")
    return path


def three_parts(folder: Path) -> list[Path]:
    return [
        write_part(part_path(folder / "out.jsonl", number, 3), Part(number, 3).of(len(PROMPTS))) for number in (1, 2, 3)
    ]


def counts(merged: Merged) -> tuple[int, int]:
    return merged.num_rows, merged.num_refused


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]


def refusal(output: Path, parts: Sequence[Path], rows: InputRows | None = None) -> str:
    """What merging says; fails the test when something was written."""
    before = sorted(os.listdir(output.parent))
    with pytest.raises(ConfigError) as raised:
        merge_parts(str(output), parts, rows)
    assert sorted(os.listdir(output.parent)) == before
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize(("num_rows", "count"), [(10, 3), (10, 1), (3, 5), (0, 2), (12, 4), (7, 7)])
def test_parts_are_contiguous_even_and_complete(num_rows: int, count: int) -> None:
    shares = [Part(number, count).of(num_rows) for number in range(1, count + 1)]
    assert [index for share in shares for index in share] == list(range(num_rows))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_rows_come_out_in_input_order_whatever_the_order_of_the_parts(tmp_path: Path, order: Sequence[int]) -> None:
    parts, output = three_parts(tmp_path), tmp_path / "out.jsonl"
    assert [part.name for part in parts][:2] == ["out.part-1-of-3.jsonl", "out.part-2-of-3.jsonl"]
    output.write_text("an earlier output\n")
    assert counts(merge_parts(str(output), [parts[place] for place in order], PROMPTS)) == (10, 0)
    assert read(output) == [output_line(index) for index in range(10)]
    assert sorted(os.listdir(tmp_path)) == sorted(["out.jsonl", *(part.name for part in parts)])


def test_rows_of_a_part_need_not_be_in_order_nor_its_neighbours(tmp_path: Path) -> None:
    parts = [write_part(tmp_path / "a", [7, 1, 3, 9, 5]), write_part(tmp_path / "b", [0, 2, 4, 6, 8])]
    merge_parts(str(tmp_path / "out.jsonl"), parts, None)
    assert read(tmp_path / "out.jsonl") == [output_line(index) for index in range(10)]


def test_refused_rows_stay_and_are_counted(tmp_path: Path) -> None:
    parts = [write_part(tmp_path / "a", [0, 1]), write_part(tmp_path / "b", [2, 3], error="too long")]
    assert counts(merge_parts(str(tmp_path / "out.jsonl"), parts, InputRows(TEXTS[:4]))) == (4, 2)
    assert [row["error"] for row in read(tmp_path / "out.jsonl")] == [None, None, "too long", "too long"]


def test_standard_output_gets_the_rows(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    merge_parts("-", three_parts(tmp_path), None)
    expected = [json.dumps(output_line(index), ensure_ascii=False).encode() for index in range(10)]
    assert capfdbinary.readouterr().out.split(b"\n") == [*expected, b""]


def test_empty_parts_are_parts(tmp_path: Path) -> None:
    parts = [write_part(part_path(tmp_path / "out.jsonl", n, 4), Part(n, 4).of(2)) for n in (1, 2, 3, 4)]
    assert [part.stat().st_size > 0 for part in parts].count(False) == 2
    assert counts(merge_parts(str(tmp_path / "out.jsonl"), parts, InputRows(TEXTS[:2]))) == (2, 0)


def test_what_is_not_there_as_a_whole_is_named_all_at_once(tmp_path: Path) -> None:
    parts, output = three_parts(tmp_path), tmp_path / "out.jsonl"
    parts[0].rename(tmp_path / "out.part-1-of-3.jsonl.partial")
    parts[2].unlink()
    said = refusal(output, parts)
    assert f"{parts[0]} is not finished: out.part-1-of-3.jsonl.partial is there" in said
    assert f"{parts[2]} does not exist" in said
    assert str(parts[1]) not in said


def test_a_part_that_is_running_again_is_not_finished(tmp_path: Path) -> None:
    parts = [write_part(tmp_path / "a.jsonl", range(5)), write_part(tmp_path / "b.jsonl", range(5, 10))]
    journal = RowJournal(str(parts[0]), PROMPTS, resume=True)
    assert "a.jsonl is not finished" in refusal(tmp_path / "out.jsonl", parts)
    journal.close()
    assert "a.jsonl is not finished" in refusal(tmp_path / "out.jsonl", parts)


def test_names_tell_which_part_was_forgotten(tmp_path: Path) -> None:
    parts, output = three_parts(tmp_path), tmp_path / "out.jsonl"
    # Without the last part no row is missing between the others: nothing but the names can tell.
    assert f"{parts[2]} is not among the parts" in refusal(output, parts[:2])
    assert f"{parts[0]} is not among the parts" in refusal(output, parts[1:])


def test_rows_tell_that_the_last_part_is_missing_whatever_the_parts_are_called(tmp_path: Path) -> None:
    shares = [Part(number, 3).of(10) for number in (1, 2, 3)]
    parts = [write_part(tmp_path / name, share, 10) for name, share in zip("abc", shares, strict=True)]
    output = tmp_path / "out.jsonl"
    assert "rows 6 to 9 are missing in all parts" in refusal(output, parts[:2])
    assert "rows 0 to 5 are missing in all parts" in refusal(output, parts[2:])
    # A row of a part equals that of a whole run, and the output is that of a whole run.
    parts.append(write_part(tmp_path / "whole", [9]))
    assert merge_parts(str(output), parts, None) == Merged(10, 0, is_end_known=True)
    assert read(output) == [output_line(index) for index in range(10)]
    # An input that has grown since the first part ran has as many rows as the last one says.
    write_part(parts[1], [3, 4, 5], 12)
    assert "rows 10 to 11 are missing" in refusal(tmp_path / "other.jsonl", parts)


def test_where_nothing_tells_the_end_merging_says_so(tmp_path: Path) -> None:
    output, part = str(tmp_path / "out.jsonl"), write_part(tmp_path / "a", range(10))
    assert not merge_parts(output, [part], None).is_end_known
    assert merge_parts(output, [part], PROMPTS).is_end_known
    assert merge_parts(output, three_parts(tmp_path), None).is_end_known  # by the names, of which none is absent


@pytest.mark.parametrize("number", ["-1", "1.5", "true", "null", str(2**64)])
def test_a_number_of_input_rows_that_is_none_is_damage(tmp_path: Path, number: str) -> None:
    part = tmp_path / "a"
    part.write_text(json.dumps(output_line(0))[:-1] + f', "num_input_rows": {number}}}\n', encoding="utf-8")
    assert "line 1 is not a whole output row" in refusal(tmp_path / "out.jsonl", [part])


def test_missing_rows_are_named(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    assert "row 4 is missing" in refusal(output, [write_part(tmp_path / "a", [0, 1, 2, 3, 5])])
    part = write_part(tmp_path / "a", [1, 2, 5, 8])
    assert "rows 0, 3 to 4 and 6 to 7 are missing" in refusal(output, [part])
    assert "rows 0, 3 to 4, 6 to 7 and 9 are missing" in refusal(output, [part], PROMPTS)
    assert "row 9 is missing" in refusal(output, [write_part(tmp_path / "a", range(9))], PROMPTS)


def test_rows_of_another_input_are_named(tmp_path: Path) -> None:
    part, output = write_part(tmp_path / "a", range(10)), tmp_path / "out.jsonl"
    assert f"row 9 of {part} is not in the input" in refusal(output, [part], InputRows(TEXTS[:9]))
    assert f"row 0 of {part} is not in the input" in refusal(output, [part], PROMPTS.of_part(Part(2, 2)))
    # The first difference is told, whatever it is.
    assert f"row 3 of {part} is of another" in refusal(output, [part], InputRows([*TEXTS[:3], "other"]))
    other = InputRows(TEXTS, None, {"seed": 3})
    assert f"row 0 of {part} is of another input row or sampling options" in refusal(output, [part], other)


def test_rows_that_stand_twice_must_be_equal_but_for_their_times(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    parts = [write_part(tmp_path / "a", [0, 1, 2]), write_part(tmp_path / "b", [2, 3], time_s=7.0)]
    assert counts(merge_parts(str(output), [*parts, parts[0]], InputRows(TEXTS[:4]))) == (4, 0)
    assert read(output)[2] == output_line(2)
    output.unlink()
    write_part(parts[1], [2, 3], text="other")
    said = refusal(output, parts)
    assert f"row 2 stands in {parts[0]} and in {parts[1]}, and the two differ" in said
    part = tmp_path / "c"
    part.write_bytes(b"".join(path.read_bytes() for path in parts))
    assert f"row 2 stands twice in {part}" in refusal(output, [part])


def test_damage_is_named(tmp_path: Path) -> None:
    parts, output = three_parts(tmp_path), tmp_path / "out.jsonl"
    whole = parts[1].read_bytes()
    parts[1].write_bytes(whole[:-9])
    assert f"the last line of {parts[1]} is torn" in refusal(output, parts)
    parts[1].write_bytes(whole.replace(b'"input_hash"', b'"inputhash"', 1))
    assert f"{parts[1]}: line 1 is not a whole output row" in refusal(output, parts)


def test_an_index_far_away_is_a_gap_and_takes_no_memory(tmp_path: Path) -> None:
    part, line = tmp_path / "a", output_line(0)
    lines = [json.dumps({**line, "index": index}) + "\n" for index in (0, 2**62)]
    part.write_text("".join(lines), encoding="utf-8")
    assert f"rows 1 to {2**62 - 1} are missing" in refusal(tmp_path / "out.jsonl", [part])
    assert f"row {2**62} of {part} is not in the input" in refusal(tmp_path / "out.jsonl", [part], PROMPTS)
    part.write_text(json.dumps({**line, "index": 2**64}) + "\n", encoding="utf-8")
    assert "line 1 is not a whole output row" in refusal(tmp_path / "out.jsonl", [part])


def test_the_output_is_not_the_input(tmp_path: Path) -> None:
    parts, prompts = three_parts(tmp_path), tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a"}\n')
    (tmp_path / "link.jsonl").symlink_to(prompts)
    for name in ("prompts.jsonl", "link.jsonl"):
        with pytest.raises(ConfigError, match="it is the input; name another output"):
            merge_parts(str(tmp_path / name), parts, None, prompts)
    assert prompts.read_text() == '{"prompt": "a"}\n'


def test_the_output_is_no_part_and_no_running_job_s(tmp_path: Path) -> None:
    parts = three_parts(tmp_path)
    assert f"{parts[1]} is the output itself" in refusal(parts[1], parts)
    (tmp_path / "out.jsonl.partial").write_bytes(b"")
    assert "out.jsonl.partial belongs to a run" in refusal(tmp_path / "out.jsonl", parts)
    assert "is a directory" in refusal(tmp_path, parts)


def test_a_part_that_changes_meanwhile_leaves_the_earlier_output_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, output = three_parts(tmp_path), tmp_path / "out.jsonl"
    output.write_text("earlier\n")
    read_parts = launch.batch.merge._read_parts

    def read_then_change(files: Sequence[Path]) -> Any:
        places = read_parts(files)
        write_part(parts[2], [6, 7, 8, 9], text="another run's")
        return places

    monkeypatch.setattr(launch.batch.merge, "_read_parts", read_then_change)
    with pytest.raises(FailedError, match="changed while it was merged"):
        merge_parts(str(output), parts, None)
    assert output.read_text() == "earlier\n"
    assert "out.jsonl.merging" not in os.listdir(tmp_path)
