"""Rows of any number run through an LLM: few are read ahead, each is written as it finishes; what a drain leaves."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

import launch.batch.input
from launch.batch.complete import Outcome, complete_rows
from launch.batch.input import InputRows
from launch.batch.journal import RowJournal
from launch.batch.rows import PromptRow
from trtrun import LLM, SamplingParams

NUM_ROWS = 200
BATCH_SIZE = 8  # of the shared LLM


class Recorder:
    """A writer that notes for each row how many rows were read when it came."""

    def __init__(self, num_read: Callable[[], int]) -> None:
        self.done: frozenset[int] = frozenset()
        self.num_done_before = 0
        self.rows: dict[int, Mapping[str, object]] = {}
        self.read_at: list[int] = []
        self.is_finished = False
        self._num_read = num_read

    def write(self, index: int, row: Mapping[str, object]) -> None:
        assert index not in self.rows
        self.rows[index] = row
        self.read_at.append(self._num_read())

    def finish(self) -> None:
        self.is_finished = True

    def close(self) -> None:
        pass


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """A recorder of rows of a file, whose reading it sees."""
    read: list[int] = []
    read_line = launch.batch.input.read_line

    def note(
        index: int, number: int, line: bytes, defaults: Mapping[str, object], of_model: Mapping[str, object]
    ) -> PromptRow:
        read.append(index)
        return read_line(index, number, line, defaults, of_model)

    monkeypatch.setattr(launch.batch.input, "read_line", note)
    return Recorder(lambda: len(read))


def rows_of(folder: Path, lines: list[object]) -> InputRows:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return InputRows((), file)


def go_on() -> float | None:
    return None


def test_few_rows_are_read_ahead_of_those_that_are_written(llm: LLM, tmp_path: Path, recorder: Recorder) -> None:
    lines = [{"prompt_token_ids": [3 + index % 50], "max_tokens": 1 + index % 4} for index in range(NUM_ROWS)]
    outcome = complete_rows(llm, rows_of(tmp_path, list(lines)), recorder, go_on)
    assert sorted(recorder.rows) == list(range(NUM_ROWS))
    ahead = [read - written for written, read in enumerate(recorder.read_at)]
    assert max(ahead) <= 2 * BATCH_SIZE + 1
    assert recorder.is_finished
    assert (outcome.num_settled, outcome.num_left, len(outcome.refused)) == (NUM_ROWS, 0, 0)
    for index in (0, 7, NUM_ROWS - 1):
        expected = llm.generate([[3 + index % 50]], SamplingParams(max_tokens=1 + index % 4))
        assert recorder.rows[index]["token_ids"] == list(expected[0].completions[0].token_ids)


def test_refused_rows_take_their_turn_among_the_others(llm: LLM, tmp_path: Path, recorder: Recorder) -> None:
    lines: list[object] = [{"promt": "x"} if index % 3 else {"prompt": "a", "max_tokens": 2} for index in range(60)]
    lines[30] = {"prompt_token_ids": [10**6]}  # found by the LLM
    outcome = complete_rows(llm, rows_of(tmp_path, lines), recorder, go_on)
    refused = {index for index, row in recorder.rows.items() if row["error"] is not None}
    assert refused == {index for index in range(60) if index % 3 or index == 30}
    assert (len(outcome.refused), outcome.num_settled, outcome.num_left) == (len(refused), 60, 0)


@pytest.mark.parametrize("bad_behind", [0, 5])
def test_a_drain_leaves_what_was_not_begun(llm: LLM, tmp_path: Path, recorder: Recorder, bad_behind: int) -> None:
    lines: list[object] = [{"prompt": "a", "max_tokens": 2 + index % 3} for index in range(100)]
    rows = rows_of(tmp_path, lines + [{"promt": "x"}] * bad_behind)
    outcome = complete_rows(llm, rows, recorder, lambda: 1000.0 if recorder.rows else None)
    assert BATCH_SIZE <= len(recorder.rows) == outcome.num_settled <= 2 * BATCH_SIZE
    assert outcome.num_left == 100 + bad_behind - outcome.num_settled
    assert not recorder.is_finished


def test_a_drain_that_leaves_only_rows_that_cannot_run_is_an_end(llm: LLM, tmp_path: Path, recorder: Recorder) -> None:
    rows = rows_of(tmp_path, [{"prompt": "a", "max_tokens": 2}] * 4 + [{"promt": "x"}] * 50)
    outcome = complete_rows(llm, rows, recorder, lambda: 1000.0 if recorder.rows else None)
    assert (outcome.num_settled, outcome.num_left, len(outcome.refused)) == (54, 0, 50)
    assert recorder.is_finished


def test_what_an_earlier_run_finished_is_not_run_again(llm: LLM, tmp_path: Path) -> None:
    rows = rows_of(tmp_path, [{"prompt": "a", "max_tokens": 1 + index % 3} for index in range(30)])
    output = tmp_path / "out.jsonl"

    def run(seconds_left: Callable[[], float | None], resume: bool) -> Outcome:
        journal = RowJournal(str(output), rows, resume)
        try:
            return complete_rows(llm, rows, journal, seconds_left)
        finally:
            journal.close()

    working = tmp_path / "out.jsonl.partial"
    first = run(lambda: 0.0 if working.stat().st_size else None, resume=False)
    assert 0 < first.num_settled < 30 and first.num_left == 30 - first.num_settled
    kept = working.read_bytes().splitlines()
    last = run(go_on, resume=True)
    assert last.num_settled == first.num_left
    lines = output.read_bytes().splitlines()
    assert [json.loads(line)["index"] for line in lines] == list(range(30))
    assert set(kept) <= set(lines)


def test_rows_of_a_batch_have_answers_of_the_server(llm: LLM, tmp_path: Path) -> None:
    def line(custom_id: str, method: str = "POST", **body: object) -> object:
        return {"custom_id": custom_id, "method": method, "url": "/v1/completions", "body": body}

    good = {"prompt": "a", "max_tokens": 3, "temperature": 0, "n": 2, "logprobs": 1, "prompt_logprobs": 0}
    lines = [
        line("good", **good), line("wrong", prompt="a", temprature=0), line("method", "GET", prompt="a"),
        line("streamed", prompt="a", stream=True), line("long", prompt=[5] * 5000), line("two", prompt=["a", "b"]),
        {"prompt": "a", "max_tokens": 3},
    ]  # fmt: skip
    rows, output = rows_of(tmp_path, lines), tmp_path / "out.jsonl"
    for resume in (False, True):  # the second time those that were refused run again, and no other
        journal = RowJournal(str(output), rows, resume)
        outcome = complete_rows(llm, rows, journal, go_on)
        journal.close()
        assert (outcome.num_settled, len(outcome.refused)) == ((5, 5) if resume else (7, 5))
    found = [json.loads(text) for text in output.read_text().splitlines()]
    answer = found[0]["response"]["body"]
    assert found[0]["custom_id"] == "good" and answer["object"] == "text_completion"
    assert [choice["text"] for choice in answer["choices"]] == [found[6]["text"]] * 2
    assert answer["usage"]["completion_tokens"] == 6 and len(answer["choices"][1]["logprobs"]["tokens"]) == 3
    assert all(len(choice["prompt_logprobs"]) == answer["usage"]["prompt_tokens"] for choice in answer["choices"])
    assert found[2]["error"] == 'method must be POST, not "GET"'
    for index, told in ((1, "did you mean 'temperature'"), (3, "leave it out"), (4, "5000"), (5, "one prompt")):
        assert found[index]["error"] is None and found[index]["response"]["status_code"] == 400
        assert told in found[index]["response"]["body"]["error"]["message"]
