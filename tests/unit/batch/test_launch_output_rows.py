"""Rows out: what an output row holds, outputs in the order of the input, and refusals in a few lines."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from launch.batch.complete import MOST_REFUSALS, Refusals
from launch.batch.input import InputRows
from launch.batch.ordered import RowStream, TextPrinter, open_writer
from launch.batch.rows import PromptRow, output_row, refused_row
from trtrun.core.nouns import TokenLogprobs
from trtrun.core.outputs import CompletionOutput, RequestOutput
from trtrun.core.request_statistics import RequestStatistics
from trtrun.core.sampling_params import SamplingParams


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
        "draft_hit_rate": None,
        "time_to_first_token_s": 0.5,
        "time_s": 2.0,
        "error": None,
        "input_hash": "0123456789abcdef",
    }


def test_a_row_of_training_data_holds_the_prompt_and_how_it_was_sampled() -> None:
    prompt = PromptRow(5, "p", SamplingParams(temperature=0.5, seed=9), "00", is_data=True, num_input_rows=6)
    row = output_row(prompt, RequestOutput(0, "p", (1, 4), (completion(0, (7, 8)),)))
    assert (row["prompt_token_ids"], row["token_ids"]) == ([1, 4], [7, 8])
    assert (row["temperature"], row["seed"]) == (0.5, 9)
    assert list(row)[-1] == "num_input_rows", "where `trtrun merge` cuts it off"


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


def test_log_probabilities_of_prompts_are_in_rows_and_on_terminals(capsys: pytest.CaptureFixture[str]) -> None:
    prompt = next(iter(InputRows(["p"]).read()))
    entries = [None, TokenLogprobs(9, -0.25, ((9, -0.25), (4, -2.0)))]
    row = output_row(prompt, RequestOutput(0, "p", (1, 9), (completion(0, (7,)),), prompt_logprobs=entries))
    entry = {"token_id": 9, "logprob": -0.25, "alternatives": [[9, -0.25], [4, -2.0]]}
    assert row["prompt_logprobs"] == [None, entry]
    TextPrinter(InputRows(["p"]), has_text=True).write(0, row)
    assert capsys.readouterr().out.splitlines()[2:] == ["    prompt token 9: logprob -0.2500, 9: -0.2500, 4: -2.0000"]


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
    rows = InputRows(["p"] * 3)
    prompts = list(rows.read())
    writer = open_writer(str(pipe), rows, resume=False)
    assert isinstance(writer, RowStream)
    assert not any(index in writer.done for index in rows.indexes)
    writer.write(1, refused_row(prompts[1], "b"))
    with pytest.raises(BlockingIOError):
        os.read(reader, 1)
    writer.write(0, refused_row(prompts[0], "a"))
    writer.write(2, refused_row(prompts[2], "\u00e4"))
    lines = os.read(reader, 65536).decode().splitlines()
    assert [json.loads(line)["error"] for line in lines] == ["a", "b", "\u00e4"]
    writer.close()
    os.close(reader)


def test_texts_are_printed_in_input_order_as_soon_as_possible(capsys: pytest.CaptureFixture[str]) -> None:
    rows = InputRows(["p"] * 4)
    prompts = list(rows.read())
    writer = open_writer(None, rows, resume=False)
    assert isinstance(writer, TextPrinter)
    with_logprobs = CompletionOutput(
        1, "b", (9,), "length", RequestStatistics(), [TokenLogprobs(9, -0.25, [(9, -0.25), (4, -2.0)])]
    )
    both = RequestOutput(0, "p", (1,), (completion(0, (7,)), with_logprobs))
    writer.write(2, output_row(prompts[2], both))
    writer.write(1, refused_row(prompts[1], "no"))
    assert capsys.readouterr().out == ""
    writer.write(0, output_row(prompts[0], RequestOutput(0, "p", (1,), (completion(0, (7,)),))))
    lines = "--- 0 (stop)\ntext\n--- 2.0 (stop)\ntext\n--- 2.1 (length)\nb\n"
    logprobs = "    token 9: logprob -0.2500, 9: -0.2500, 4: -2.0000\n"
    assert capsys.readouterr().out == lines + logprobs
    TextPrinter(rows, has_text=False).write(0, output_row(prompts[0], RequestOutput(0, None, (1,), both.completions)))
    assert capsys.readouterr().out.splitlines()[:2] == ["--- 0.0 (stop)", "7"]


def test_a_million_refusals_are_a_few_lines_and_a_count(capsys: pytest.CaptureFixture[str]) -> None:
    refusals = Refusals()
    for index in reversed(range(1000)):
        refusals.add(PromptRow(index, None, None, "00", "bad", index + 1), "bad")
    refusals.tell(has_rows=True)
    lines = capsys.readouterr().err.splitlines()
    assert lines[:-1] == [f"trtrun: row {index} (line {index + 1}) refused: bad" for index in range(MOST_REFUSALS)]
    assert (
        lines[-1] == f"trtrun: {1000 - MOST_REFUSALS} more rows were refused: the `error` of each output row says why"
    )
    assert len(refusals) == 1000
