"""Rows of JSON lines in and out."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from launch.batch.journal import RowJournal, RowStream, check_output, finished_rows, open_writer
from launch.batch.rows import PromptRow, output_row, refused_row, rows_from_file, rows_from_prompts
from trtrun.core import RequestStatistics, TokenLogprobs
from trtrun.errors import ConfigError, InvalidRequestError
from trtrun.outputs import CompletionOutput, RequestOutput


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "rows.jsonl"
    file.write_text(text, encoding="utf-8")
    return file


def test_defaults_are_overridden_by_the_row(tmp_path: Path) -> None:
    file = write(tmp_path, '{"prompt": "a", "temperature": 0.5}\n\n{"prompt_token_ids": [1, 2]}\n')
    first, second = rows_from_file(file, {"temperature": 1.0, "max_tokens": 7}, start=3)
    assert (first.index, first.prompt, second.index, second.prompt) == (3, "a", 4, (1, 2))
    assert first.sampling is not None and second.sampling is not None
    assert (first.sampling.temperature, first.sampling.max_tokens) == (0.5, 7)
    assert second.sampling.temperature == 1.0


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "not a valid row"),
        ("[1]", "must be an object"),
        ('{"prompt": 3}', '"prompt" must be a text'),
        ('{"prompt_token_ids": [1, true]}', "list of whole numbers"),
        ('{"prompt_token_ids": "12"}', "list of whole numbers"),
        ("{}", 'one of "prompt" and "prompt_token_ids"'),
        ('{"prompt": "a", "max_token": 3}', "did you mean 'max_tokens'?"),
        ('{"prompt": "a", "stop_token_ids": 3}', "not a valid row"),
        ('{"prompt": "a", "logit_bias": {"x": 1}}', "logit_bias"),
    ],
)
def test_a_bad_row_is_refused_with_its_reason(tmp_path: Path, line: str, said: str) -> None:
    good, bad = rows_from_file(write(tmp_path, '{"prompt": "good"}\n' + line), {})
    assert good.error is None
    assert (bad.prompt, bad.sampling) == (None, None)
    assert said in str(bad.error)
    assert "\n" not in str(bad.error)


def test_line_ends_inside_a_text_do_not_end_the_row(tmp_path: Path) -> None:
    prompt = "one\u2028two\x0b\x85three"
    (row,) = rows_from_file(write(tmp_path, json.dumps({"prompt": prompt}, ensure_ascii=False) + "\r\n"), {})
    assert row.prompt == prompt


def test_a_file_without_rows_and_a_bad_default_are_errors_of_the_whole(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no rows"):
        rows_from_file(write(tmp_path, "\n \n"), {})
    with pytest.raises(InvalidRequestError, match="top_p"):
        rows_from_prompts(["a"], {"top_p": 2.0})
    with pytest.raises(InvalidRequestError, match="top_p"):
        rows_from_file(write(tmp_path, '{"prompt": "a"}'), {"top_p": 2.0})


def completion(index: int, tokens: tuple[int, ...]) -> CompletionOutput:
    statistics = RequestStatistics(arrival=1.0, first_token=1.5, finished=3.0)
    statistics.record_round(4, 2)
    return CompletionOutput(index, "text", tokens, "stop", statistics)


def test_an_output_row_holds_the_figures() -> None:
    prompt = PromptRow(5, "p", None, "0123456789abcdef")
    row = output_row(prompt, RequestOutput(0, "p", (1,), (completion(0, (7, 8)),)))
    assert row == {
        "index": 5,
        "text": "text",
        "token_ids": [7, 8],
        "finish_reason": "stop",
        "num_rounds": 1,
        "num_draft_tokens": 4,
        "num_accepted_draft_tokens": 2,
        "mean_acceptance_length": 3.0,
        "time_to_first_token_s": 0.5,
        "time_s": 2.0,
        "error": None,
        "input_hash": "0123456789abcdef",
    }


def test_several_completions_and_log_probabilities_are_added() -> None:
    with_logprobs = CompletionOutput(
        1, "t", (9,), "length", RequestStatistics(), [TokenLogprobs(9, -0.25, [(9, -0.25), (4, -2.0)])]
    )
    prompt = PromptRow(0, "p", None, "00")
    row = output_row(prompt, RequestOutput(0, "p", (1,), (completion(0, (7,)), with_logprobs)))
    assert row["token_ids"] == [7]
    completions = row["completions"]
    assert isinstance(completions, list)
    assert completions[1]["logprobs"] == [{"token_id": 9, "logprob": -0.25, "alternatives": [[9, -0.25], [4, -2.0]]}]


def test_a_refused_row_has_the_same_columns() -> None:
    prompt = PromptRow(0, "p", None, "00")
    good = output_row(prompt, RequestOutput(0, "p", (1,), (completion(0, (7,)),)))
    refused = output_row(prompt, RequestOutput(0, "p", (1,), (), "too long"))
    assert list(refused) == list(good)
    assert refused["error"] == "too long"


def test_a_stream_gets_rows_in_input_order_as_soon_as_possible(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    prompts = rows_from_prompts(["p"] * 3, {})
    writer = open_writer(str(pipe), prompts, resume=False)
    assert isinstance(writer, RowStream)
    assert writer.pending == prompts
    writer.write(1, refused_row(prompts[1], "b"))
    with pytest.raises(BlockingIOError):
        os.read(reader, 1)
    writer.write(0, refused_row(prompts[0], "a"))
    writer.write(2, refused_row(prompts[2], "\u00e4"))
    lines = os.read(reader, 65536).decode().splitlines()
    assert [json.loads(line)["error"] for line in lines] == ["a", "b", "\u00e4"]
    writer.close()
    os.close(reader)


def test_an_output_that_cannot_be_written_is_told_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a directory"):
        check_output(str(tmp_path))
    with pytest.raises(ConfigError, match="does not exist"):
        check_output(str(tmp_path / "nowhere" / "out.jsonl"))
    check_output(str(tmp_path / "out.jsonl"))
    assert not (tmp_path / "out.jsonl").exists()
    check_output("-")


PROMPTS = ["one", "two \u00e4", "three", "four"]


def result(prompt: PromptRow, text: str = "") -> dict[str, object]:
    """A finished row that tells which prompt it is of; its text has bytes above 127, quotes and a line end."""
    tokens = tuple(range(prompt.index + 1))
    output = CompletionOutput(0, text or f'\u4f60 "{prompt.prompt}"\n}}', tokens, "stop", RequestStatistics())
    return output_row(prompt, RequestOutput(0, None, (1,), (output,)))


def killed_run(output: Path, prompts: Sequence[PromptRow], finished: Sequence[int]) -> bytes:
    """Leave behind what a run leaves that is killed after these rows; returns the working file."""
    journal = RowJournal(str(output), prompts, resume=False)
    for index in finished:
        journal.write(index, result(prompts[index]))
    journal.close()
    return output.with_name(output.name + ".partial").read_bytes()


def complete(output: Path, prompts: Sequence[PromptRow], resume: bool, text: str = "") -> list[int]:
    """A run to the end; returns the rows that it ran."""
    journal = RowJournal(str(output), prompts, resume)
    ran = [prompt.index for prompt in journal.pending]
    for prompt in reversed(journal.pending):
        journal.write(prompt.index, result(prompt, text))
    journal.finish()
    journal.close()
    return ran


def written(output: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in output.read_bytes().split(b"\n")[:-1]]


def test_a_row_is_in_the_working_file_at_once_and_in_the_output_at_the_end(tmp_path: Path) -> None:
    prompts, output = rows_from_prompts(PROMPTS, {}), tmp_path / "out.jsonl"
    output.write_text("an earlier output of anything\n")
    journal = RowJournal(str(output), prompts, resume=False)
    for count, index in enumerate((2, 0, 3, 1), start=1):
        journal.write(index, result(prompts[index]))
        # A second reader sees whole rows now: nothing waits in this process.
        assert len(written(tmp_path / "out.jsonl.partial")) == count
    assert [row["index"] for row in written(tmp_path / "out.jsonl.partial")] == [2, 0, 3, 1]
    assert output.read_text() == "an earlier output of anything\n"
    journal.finish()
    journal.close()
    assert written(output) == [result(prompt) for prompt in prompts]
    assert os.listdir(tmp_path) == ["out.jsonl"]


def test_a_last_row_torn_at_any_byte_is_dropped_and_run_again(tmp_path: Path) -> None:
    prompts, output = rows_from_prompts(PROMPTS, {}), tmp_path / "out.jsonl"
    whole = killed_run(output, prompts, [3, 0, 1])
    last = whole.rindex(b"\n", 0, -1) + 1
    for length in range(last, len(whole) + 1):
        (tmp_path / "out.jsonl.partial").write_bytes(whole[:length])
        assert complete(output, prompts, resume=True) == ([2] if length == len(whole) else [1, 2])
        assert written(output) == [result(prompt) for prompt in prompts], length
        assert os.listdir(tmp_path) == ["out.jsonl"]


@pytest.mark.parametrize(
    "line", [b"", b"{}", b'{"index": 1, "te', b"\xff", b"null", b'"index"', b'{"index": 1}', b"[" * 9999]
)
def test_a_damaged_line_before_the_last_is_named_and_nothing_is_touched(tmp_path: Path, line: bytes) -> None:
    prompts, output = rows_from_prompts(PROMPTS, {}), tmp_path / "out.jsonl"
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
        RowJournal(str(tmp_path / "out.jsonl"), rows_from_prompts(PROMPTS, {}), resume=True)
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
    earlier, output = rows_from_prompts(PROMPTS, {}), tmp_path / "out.jsonl"
    killed_run(output, earlier, [2, 1, 0])
    if ended:
        complete(output, earlier, resume=True)
    with pytest.raises(ConfigError, match=said):
        finished_rows(str(output), rows_from_prompts(prompts, defaults), resume=True)
    with pytest.raises(ConfigError, match=said):
        RowJournal(str(output), rows_from_prompts(prompts, defaults), resume=True)
    assert complete(output, earlier, resume=True) == ([] if ended else [3])


def test_the_hash_is_of_the_row_and_the_defaults_that_it_takes(tmp_path: Path) -> None:
    def hashes(text: str, defaults: dict[str, object]) -> list[str]:
        return [row.input_hash for row in rows_from_file(write(tmp_path, text), defaults)]

    plain = '{"prompt": "a", "max_tokens": 5}\n{"prompt": "a"}\n{bad'
    assert hashes(plain, {}) == hashes('{"max_tokens":5,"prompt":"\\u0061"}\n\n {"prompt":"a"}\n{bad', {})
    assert hashes(plain, {})[:2] != hashes(plain, {"max_tokens": 9})[:2]
    assert hashes(plain, {})[0] == hashes(plain, {"max_tokens": 9})[0]  # the row names its own
    assert len(set(hashes(plain, {}))) == 3
    assert hashes(plain, {})[1] == rows_from_prompts(["a"], {})[0].input_hash


def test_refused_rows_run_again_and_may_have_been_corrected(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    prompts = rows_from_file(write(tmp_path, '{"prompt": "a"}\n{"promt": "b"}\n{"prompt": "c"}'), {})
    journal = RowJournal(str(output), prompts, resume=False)
    journal.write(1, refused_row(prompts[1], str(prompts[1].error)))
    journal.write(2, result(prompts[2]))
    journal.write(0, refused_row(prompts[0], "too long"))
    journal.finish()
    journal.close()
    assert complete(output, prompts, resume=True, text="x") == [0, 1]
    corrected = rows_from_file(write(tmp_path, '{"prompt": "a"}\n{"prompt": "b"}\n{"prompt": "c"}'), {})
    killed_run(tmp_path / "other.jsonl", prompts, [0])
    journal = RowJournal(str(tmp_path / "other.jsonl"), prompts, resume=True)
    journal.write(1, refused_row(prompts[1], str(prompts[1].error)))
    journal.close()
    assert complete(tmp_path / "other.jsonl", corrected, resume=True) == [1, 2]
    assert written(tmp_path / "other.jsonl") == [result(prompt) for prompt in corrected]


def test_an_ended_output_is_gone_on_with_and_never_lost(tmp_path: Path) -> None:
    prompts, output = rows_from_prompts(PROMPTS, {}), tmp_path / "out.jsonl"
    assert complete(output, prompts[:2], resume=True) == [0, 1]  # nothing there: all rows run
    before = output.read_bytes()
    journal = RowJournal(str(output), prompts, resume=True)
    assert [prompt.index for prompt in journal.pending] == [2, 3]
    journal.write(3, result(prompts[3]))
    journal.close()  # killed: the earlier rows are in both files now
    assert output.read_bytes() == before
    output.unlink()
    assert complete(output, prompts, resume=True) == [2]
    assert written(output) == [result(prompt) for prompt in prompts]


def test_a_run_without_resume_does_not_lose_rows_of_a_killed_one(tmp_path: Path) -> None:
    prompts, output = rows_from_prompts(PROMPTS, {}), tmp_path / "out.jsonl"
    before = killed_run(output, prompts, [3, 0])
    with pytest.raises(ConfigError, match="holds 2 finished rows of a run that did not end: go on with --resume"):
        RowJournal(str(output), prompts, resume=False)
    assert (tmp_path / "out.jsonl.partial").read_bytes() == before
    assert complete(output, prompts, resume=True) == [1, 2]
    assert complete(output, prompts[:1], resume=False, text="new") == [0]  # an ended output is simply replaced
    assert written(output) == [result(prompts[0], "new")]


def test_one_run_at_a_time_writes_an_output(tmp_path: Path) -> None:
    prompts, output = rows_from_prompts(PROMPTS, {}), tmp_path / "out.jsonl"
    journal = RowJournal(str(output), prompts, resume=False)
    with pytest.raises(ConfigError, match="another run is writing"):
        RowJournal(str(output), prompts, resume=True)
    journal.close()
    assert os.listdir(tmp_path) == []  # nothing was finished: nothing stays


def test_a_link_to_the_output_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    (tmp_path / "out.jsonl").symlink_to(tmp_path / "scratch" / "rows.jsonl")
    complete(tmp_path / "out.jsonl", rows_from_prompts(PROMPTS, {}), resume=False)
    assert (tmp_path / "out.jsonl").is_symlink()
    assert os.listdir(tmp_path / "scratch") == ["rows.jsonl"]


@pytest.mark.parametrize("replaced", [False, True], ids=["before-the-step", "after-the-step"])
def test_a_kill_around_the_last_step_leaves_a_run_that_resume_ends(tmp_path: Path, replaced: bool) -> None:
    prompts, output = rows_from_prompts(PROMPTS, {}), tmp_path / "out.jsonl"
    working = killed_run(output, prompts, [2, 0, 3, 1])
    if replaced:
        complete(output, prompts, resume=True)
        (tmp_path / "out.jsonl.partial").write_bytes(working)
    else:
        (tmp_path / "out.jsonl.partial.new").write_bytes(working[:50])
    assert complete(output, prompts, resume=True) == []
    assert written(output) == [result(prompt) for prompt in prompts]
    assert os.listdir(tmp_path) == ["out.jsonl"]
