"""The journal of output rows: what a kill at any byte leaves, and what --resume makes of it."""

from __future__ import annotations

import errno
import json
import os
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import pytest

from launch.batch.input import InputRows
from launch.batch.journal import RowJournal, check_output, finished_rows
from launch.batch.rows import PromptRow, output_row, refused_row
from launch.batch.written import IndexSet, RowTable, WrittenRow
from trtrun.core.outputs import CompletionOutput, RequestOutput
from trtrun.core.request_statistics import RequestStatistics
from trtrun.errors import ConfigError


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "rows.jsonl"
    file.write_text(text, encoding="utf-8")
    return file


def test_an_output_that_cannot_be_written_is_told_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a directory"):
        check_output(str(tmp_path))
    with pytest.raises(ConfigError, match="does not exist"):
        check_output(str(tmp_path / "nowhere" / "out.jsonl"))
    check_output(str(tmp_path / "out.jsonl"))
    assert not (tmp_path / "out.jsonl").exists()
    check_output("-")


@pytest.mark.parametrize("kind", ["itself", "link", "hard link", "working file"])
def test_an_output_never_takes_the_place_of_its_input(tmp_path: Path, kind: str) -> None:
    prompts = write(tmp_path, '{"prompt": "a"}\n')
    output = tmp_path / "out.jsonl"
    if kind == "itself":
        output = tmp_path / "." / "rows.jsonl"
    elif kind == "link":
        output.symlink_to(prompts)
    elif kind == "hard link":
        output.hardlink_to(prompts)
    else:
        prompts = prompts.rename(tmp_path / "out.jsonl.partial")
    with pytest.raises(ConfigError, match="the input; name another output"):
        check_output(str(output), prompts)
    check_output(str(tmp_path / "other.jsonl"), prompts)


def test_a_name_that_no_file_can_have_is_told_before_the_run() -> None:
    with pytest.raises(ConfigError, match="File name too long"):
        check_output("o" * 300)


PROMPTS = ["one", "two \u00e4", "three", "four"]


def result(prompt: PromptRow, text: str = "") -> dict[str, object]:
    """A finished row that tells which prompt it is of; its text has bytes above 127, quotes and a line end."""
    tokens = tuple(range(prompt.index + 1))
    output = CompletionOutput(0, text or f'\u4f60 "{prompt.prompt}"\n}}', tokens, "stop", RequestStatistics())
    return output_row(prompt, RequestOutput(0, None, (1,), (output,)))


def rows_of(prompts: InputRows) -> list[PromptRow]:
    """All rows of an input at once."""
    return list(prompts.read())


def killed_run(output: Path, prompts: InputRows, finished: Sequence[int]) -> bytes:
    """Leave behind what a run leaves that is killed after these rows; returns the working file."""
    journal = RowJournal(str(output), prompts, resume=False)
    for index in finished:
        journal.write(index, result(rows_of(prompts)[index]))
    journal.close()
    return output.with_name(output.name + ".partial").read_bytes()


def complete(output: Path, prompts: InputRows, resume: bool, text: str = "") -> list[int]:
    """A run to the end; returns the rows that it ran."""
    journal = RowJournal(str(output), prompts, resume)
    pending = list(prompts.read(lambda index: index not in journal.done))
    for prompt in reversed(pending):
        journal.write(prompt.index, result(prompt, text))
    journal.finish()
    journal.close()
    return [prompt.index for prompt in pending]


def written(output: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in output.read_bytes().split(b"\n")[:-1]]


def test_a_row_is_in_the_working_file_at_once_and_in_the_output_at_the_end(tmp_path: Path) -> None:
    prompts, output = InputRows(PROMPTS), tmp_path / "out.jsonl"
    output.write_text("an earlier output of anything\n")
    journal = RowJournal(str(output), prompts, resume=False)
    for count, index in enumerate((2, 0, 3, 1), start=1):
        journal.write(index, result(rows_of(prompts)[index]))
        # A second reader sees whole rows now: nothing waits in this process.
        assert len(written(tmp_path / "out.jsonl.partial")) == count
    assert [row["index"] for row in written(tmp_path / "out.jsonl.partial")] == [2, 0, 3, 1]
    assert output.read_text() == "an earlier output of anything\n"
    journal.finish()
    journal.close()
    assert written(output) == [result(prompt) for prompt in rows_of(prompts)]
    assert os.listdir(tmp_path) == ["out.jsonl"]


def test_a_last_row_torn_at_any_byte_is_dropped_and_run_again(tmp_path: Path) -> None:
    prompts, output = InputRows(PROMPTS), tmp_path / "out.jsonl"
    whole = killed_run(output, prompts, [3, 0, 1])
    last = whole.rindex(b"\n", 0, -1) + 1
    for length in range(last, len(whole) + 1):
        (tmp_path / "out.jsonl.partial").write_bytes(whole[:length])
        assert complete(output, prompts, resume=True) == ([2] if length == len(whole) else [1, 2])
        assert written(output) == [result(prompt) for prompt in rows_of(prompts)], length
        assert os.listdir(tmp_path) == ["out.jsonl"]


@pytest.mark.parametrize(
    "line", [b"", b"{}", b'{"index": 1, "te', b"\xff", b"null", b'"index"', b'{"index": 1}', b"[" * 9999]
)
def test_a_damaged_line_before_the_last_is_named_and_nothing_is_touched(tmp_path: Path, line: bytes) -> None:
    prompts, output = InputRows(PROMPTS), tmp_path / "out.jsonl"
    first, second, _ = killed_run(output, prompts, [3, 0]).split(b"\n")
    damaged = first + b"\n" + line + b"\n" + second + b"\n"
    (tmp_path / "out.jsonl.partial").write_bytes(damaged)
    with pytest.raises(ConfigError, match=r"out.jsonl.partial: line 2 is not a whole output row"):
        RowJournal(str(output), prompts, resume=True)
    assert (tmp_path / "out.jsonl.partial").read_bytes() == damaged
    assert os.listdir(tmp_path) == ["out.jsonl.partial"]


def test_a_file_of_something_else_is_not_taken_for_a_torn_row(tmp_path: Path) -> None:
    (tmp_path / "out.jsonl").write_text("my notes, without a line end")
    with pytest.raises(ConfigError, match="line 1 is not a whole output row"):
        RowJournal(str(tmp_path / "out.jsonl"), InputRows(PROMPTS), resume=True)
    assert (tmp_path / "out.jsonl").read_text() == "my notes, without a line end"


@pytest.mark.parametrize(
    ("prompts", "defaults", "said"),
    [
        (["one", "zwei", "3", "four"], {}, "row 1 is of another input row"),
        (["one", "two \u00e4"], {}, "row 2 is not in the input"),
        (PROMPTS, {"max_tokens": 3}, "row 0 is of another input row or sampling options"),
    ],
)
@pytest.mark.parametrize("ended", [False, True], ids=["killed", "ended"])
def test_rows_of_another_input_are_refused(
    tmp_path: Path, prompts: list[str], defaults: dict[str, object], said: str, ended: bool
) -> None:
    earlier, output = InputRows(PROMPTS), tmp_path / "out.jsonl"
    killed_run(output, earlier, [2, 1, 0])
    if ended:
        complete(output, earlier, resume=True)
    with pytest.raises(ConfigError, match=said):
        finished_rows(str(output), InputRows(prompts, None, defaults), resume=True)
    with pytest.raises(ConfigError, match=said):
        RowJournal(str(output), InputRows(prompts, None, defaults), resume=True)
    assert complete(output, earlier, resume=True) == ([] if ended else [3])


def test_refused_rows_run_again_and_may_have_been_corrected(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    prompts = InputRows((), write(tmp_path, '{"prompt": "a"}\n{"promt": "b"}\n{"prompt": "c"}'))
    journal = RowJournal(str(output), prompts, resume=False)
    journal.write(1, refused_row(rows_of(prompts)[1], str(rows_of(prompts)[1].error)))
    journal.write(2, result(rows_of(prompts)[2]))
    journal.write(0, refused_row(rows_of(prompts)[0], "too long"))
    journal.finish()
    journal.close()
    assert complete(output, prompts, resume=True, text="x") == [0, 1]
    corrected = InputRows((), write(tmp_path, '{"prompt": "a"}\n{"prompt": "b"}\n{"prompt": "c"}'))
    killed_run(tmp_path / "other.jsonl", prompts, [0])
    journal = RowJournal(str(tmp_path / "other.jsonl"), prompts, resume=True)
    journal.write(1, refused_row(rows_of(prompts)[1], str(rows_of(prompts)[1].error)))
    journal.close()
    assert complete(tmp_path / "other.jsonl", corrected, resume=True) == [1, 2]
    assert written(tmp_path / "other.jsonl") == [result(prompt) for prompt in rows_of(corrected)]


def test_an_ended_output_is_gone_on_with_and_never_lost(tmp_path: Path) -> None:
    prompts, output = InputRows(PROMPTS), tmp_path / "out.jsonl"
    assert complete(output, InputRows(PROMPTS[:2]), resume=True) == [0, 1]  # nothing there: all rows run
    before = output.read_bytes()
    journal = RowJournal(str(output), prompts, resume=True)
    assert [index for index in range(4) if index not in journal.done] == [2, 3]
    journal.write(3, result(rows_of(prompts)[3]))
    journal.close()  # killed: the earlier rows are in both files now
    assert output.read_bytes() == before
    output.unlink()
    assert complete(output, prompts, resume=True) == [2]
    assert written(output) == [result(prompt) for prompt in rows_of(prompts)]


def test_a_run_without_resume_does_not_lose_rows_of_a_killed_one(tmp_path: Path) -> None:
    prompts, output = InputRows(PROMPTS), tmp_path / "out.jsonl"
    before = killed_run(output, prompts, [3, 0])
    with pytest.raises(ConfigError, match="holds 2 finished rows of a run that did not end: go on with --resume"):
        RowJournal(str(output), prompts, resume=False)
    assert (tmp_path / "out.jsonl.partial").read_bytes() == before
    assert complete(output, prompts, resume=True) == [1, 2]
    assert complete(output, InputRows(PROMPTS[:1]), resume=False, text="new") == [
        0
    ]  # an ended output is simply replaced
    assert written(output) == [result(rows_of(prompts)[0], "new")]


def test_one_run_at_a_time_writes_an_output(tmp_path: Path) -> None:
    prompts, output = InputRows(PROMPTS), tmp_path / "out.jsonl"
    journal = RowJournal(str(output), prompts, resume=False)
    with pytest.raises(ConfigError, match="another run is writing"):
        RowJournal(str(output), prompts, resume=True)
    journal.close()
    assert os.listdir(tmp_path) == []  # nothing was finished: nothing stays


def test_a_link_to_the_output_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    (tmp_path / "out.jsonl").symlink_to(tmp_path / "scratch" / "rows.jsonl")
    complete(tmp_path / "out.jsonl", InputRows(PROMPTS), resume=False)
    assert (tmp_path / "out.jsonl").is_symlink()
    assert os.listdir(tmp_path / "scratch") == ["rows.jsonl"]


@pytest.mark.parametrize("replaced", [False, True], ids=["before-the-step", "after-the-step"])
def test_a_kill_around_the_last_step_leaves_a_run_that_resume_ends(tmp_path: Path, replaced: bool) -> None:
    prompts, output = InputRows(PROMPTS), tmp_path / "out.jsonl"
    working = killed_run(output, prompts, [2, 0, 3, 1])
    if replaced:
        complete(output, prompts, resume=True)
        (tmp_path / "out.jsonl.partial").write_bytes(working)
    else:
        (tmp_path / "out.jsonl.partial.new").write_bytes(working[:50])
    assert complete(output, prompts, resume=True) == []
    assert written(output) == [result(prompt) for prompt in rows_of(prompts)]
    assert os.listdir(tmp_path) == ["out.jsonl"]


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_last_step_that_fails_leaves_the_working_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """As on a full disk, whose room the half of a file would take until the next run."""
    prompts, output = InputRows(PROMPTS), tmp_path / "out.jsonl"
    output.write_text("an earlier output\n", encoding="utf-8")

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    journal = RowJournal(str(output), prompts, resume=False)
    for row in rows_of(prompts):
        journal.write(row.index, result(row))
    with monkeypatch.context() as patched:
        patched.setattr(os, failing, fail)
        with pytest.raises(ConfigError, match="No space left on device"):
            journal.finish()
    journal.close()
    assert sorted(os.listdir(tmp_path)) == ["out.jsonl", "out.jsonl.partial"]
    assert output.read_text(encoding="utf-8") == "an earlier output\n"
    assert complete(output, prompts, resume=True) == []
    assert os.listdir(tmp_path) == ["out.jsonl"]


def test_rows_with_numbers_that_are_not_finite_are_written_as_json(tmp_path: Path) -> None:
    prompts, output = InputRows(["one"]), tmp_path / "out.jsonl"
    row = {**result(rows_of(prompts)[0]), "logprobs": [{"logprob": float("nan"), "alternatives": [[1, float("-inf")]]}]}
    row["error"] = "half a pair \ud800"
    journal = RowJournal(str(output), prompts, resume=False)
    journal.write(0, row)
    journal.finish()
    journal.close()

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    (line,) = output.read_text(encoding="utf-8").splitlines()
    values = json.loads(line, parse_constant=refuse)
    assert values["logprobs"] == [{"logprob": None, "alternatives": [[1, None]]}]
    assert values["error"] == "half a pair \ud800"


def test_a_run_that_lacks_rows_does_not_finish(tmp_path: Path) -> None:
    journal = RowJournal(str(tmp_path / "out.jsonl"), InputRows(PROMPTS), resume=False)
    journal.write(2, result(rows_of(InputRows(PROMPTS))[2]))
    with pytest.raises(RuntimeError, match="1 of 4 rows"):
        journal.finish()
    journal.close()
    assert not (tmp_path / "out.jsonl").exists()


def test_places_of_rows_take_a_few_bytes_each() -> None:
    count = 20_000
    tracemalloc.start()
    try:
        table, done = RowTable(), IndexSet(range(count))
        for index in reversed(range(count)):
            table.append(WrittenRow(index, 1000 * index, 1000, 2**64 - 1 - index))
            done.add(index)
        in_use, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert in_use < 60 * count
    assert [row.row_index for row in table.in_order()] == list(range(count))
    assert table[0] == WrittenRow(count - 1, 1000 * (count - 1), 1000, 2**64 - count)
    assert len(done) == count and 5 in done


def test_of_an_index_that_stands_twice_the_first_counts(tmp_path: Path) -> None:
    prompts, output = InputRows(PROMPTS[:2]), tmp_path / "out.jsonl"
    working = killed_run(output, prompts, [1, 0])
    (tmp_path / "out.jsonl.partial").write_bytes(working + working.replace(b"two", b"TWO"))
    assert complete(output, prompts, resume=True) == []
    assert written(output) == [result(prompt) for prompt in rows_of(prompts)]
