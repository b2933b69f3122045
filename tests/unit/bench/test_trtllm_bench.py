"""trtllm-bench's datasets, read and made, and its load on an engine."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from launch.compat.tensorrt_llm.bench import command_line
from launch.compat.tensorrt_llm.bench.dataset import BenchRequest, read_dataset
from launch.compat.tensorrt_llm.bench.load import Demand, play_load
from launch.compat.tensorrt_llm.bench.report import percentiles, request_rows
from trtrun import LLM, SamplingParams
from trtrun.errors import ConfigError

REQUESTS = [BenchRequest(0, "a text", 4), BenchRequest(7, (5, 6), 2)]


@pytest.mark.parametrize(
    "text",
    [
        '{"task_id": 0, "prompt": "a text", "output_tokens": 4}\n\n{"task_id":7,"input_ids":[5,6],"output_tokens":2}\n',
        '{"task_id": 0, "prompt": "a text", "output_tokens": 4}\n{"task_id": 7, "logits": [5, 6], "output_tokens": 2}',
        json.dumps(
            {
                "metadata": {"workload_name": "x"},
                "samples": [
                    {"task_id": 0, "input": "a text", "output_len": 4},
                    {"task_id": 7, "input_ids": [5, 6], "input_len": 2, "output_len": 2},
                ],
            }
        ),
    ],
)
def test_both_kinds_of_files_hold_the_same_requests(text: str, tmp_path: Path) -> None:
    file = tmp_path / "requests"
    file.write_text(text, encoding="utf-8")
    assert read_dataset(file) == REQUESTS
    assert read_dataset(file, 1) == REQUESTS[:1]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no request"),
        ("{", "request 1 of .* is no JSON"),
        ('{"prompt": "x", "output_tokens": 1}\n[]', "request 2 of .* is no object"),
        ('{"prompt": "x"}', "needs output_tokens, 1 or more"),
        ('{"output_tokens": 3}', "needs input_ids or prompt"),
        ('{"input_ids": [1, "x"], "output_tokens": 3}', "needs token ids"),
        ('{"input_ids": [1], "output_tokens": 3, "lora_request": {"lora_name": "a"}}', "has a lora_request"),
    ],
)
def test_a_request_that_is_none_is_named(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "requests"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=said):
        read_dataset(file)


def test_lines_end_where_json_lines_do(tmp_path: Path) -> None:
    (tmp_path / "requests").write_text('{"prompt": "a\u2028b\x85c", "output_tokens": 1}\r\n\n', encoding="utf-8")
    assert [request.prompt for request in read_dataset(tmp_path / "requests")] == ["a\u2028b\x85c"]
    with pytest.raises(ConfigError, match=r"cannot read .*nowhere: No such file or directory$"):
        read_dataset(tmp_path / "nowhere")


def prepare(capsys: pytest.CaptureFixture[str], *words: str) -> list[BenchRequest]:
    """The requests that prepare-dataset prints."""
    command_line.cli.main(["-m", "asset:target", "prepare-dataset", "--stdout", *words], standalone_mode=False)
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return [BenchRequest(row["task_id"], tuple(row["input_ids"]), row["output_tokens"]) for row in rows]


def test_prepared_lengths_are_as_asked_for_and_as_nvidia_draws_them(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["token-norm-dist", "--num-requests", "3", "--input-mean", "20", "--input-stdev", "4"]
    words += ["--output-mean", "12", "--output-stdev", "0"]
    made = prepare(capsys, *words)
    assert [len(request.prompt) for request in made] == [19, 13, 18]  # numpy.random.seed(420), then normal
    assert [request.output_tokens for request in made] == [12] * 3
    assert made == prepare(capsys, *words)
    words = ["token-unif-dist", "--num-requests", "40", "--input-min", "2", "--input-max", "4", "--output-min", "1"]
    made = prepare(capsys, *words, "--output-max", "1")
    assert {len(request.prompt) for request in made} == {2, 3, 4}


@pytest.mark.parametrize("demand", [Demand(), Demand(concurrency=2), Demand(request_rate=200.0)])
def test_a_load_comes_as_asked_for_and_texts_stay(llm: LLM, demand: Demand) -> None:
    sampling = [SamplingParams(max_tokens=length, temperature=0.0, ignore_eos=True) for length in (9, 3, 6, 5)]
    prompts = [((7 + number, 9, 11), each) for number, each in enumerate(sampling)]
    expected = llm.generate([list(tokens) for tokens, _ in prompts], sampling)
    log, ended = io.StringIO(), list[int]()
    records = play_load(llm.engine, prompts, demand, ended.append, log)
    assert [tuple(record.tokens) for record in records] == [output.completions[0].token_ids for output in expected]
    assert [record.text for record in records] == [output.completions[0].text for output in expected]
    rounds = [json.loads(line) for line in log.getvalue().splitlines()]
    assert sum(row["numGeneratedTokens"] for row in rounds) == 23 and ended[-1] == 4
    most = max(row["numActiveRequests"] for row in rounds)
    assert most == (2 if demand.concurrency > 0 else most)
    if demand.request_rate > 0:
        gaps = [later.started - records[0].started for later in records[1:]]
        assert all(gap >= 0.9 * number / 200 for number, gap in enumerate(gaps, 1))
    accepted = sum(record.statistics.num_accepted_draft_tokens for record in records)
    assert accepted == sum(row["specDecodingStats"]["numAcceptedTokens"] for row in rounds) > 0
    assert 23 - accepted == sum(record.num_rounds for record in records)
    for record, row in zip(records, request_rows(records), strict=True):
        assert row["end_timestamp"] - row["start_timestamp"] == pytest.approx(row["end_to_end_latency"], abs=2)
        assert 0 < record.first_token_latency <= record.latency


def test_percentiles_are_values_that_occurred() -> None:
    assert percentiles([4, 1, 3, 2]) == {
        **{"p50": 3, "p90": 4, "p95": 4, "p99": 4, "minimum": 1, "maximum": 4, "average": 2.5}
    }


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("throughput", "--dataset", "x", "--pp", "2"), "^--pp 2: layers are not split"),
        (("latency", "--dataset", "x", "--beam_width", "3"), "^--beam_width 3: beam search"),
        (("throughput", "--dataset", "x", "--engine_dir", "e"), "No such option"),
        (("throughput", "--dataset", "nowhere"), "--dataset: cannot read nowhere"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(words: tuple[str, ...], said: str) -> None:
    with pytest.raises(Exception, match=said):
        command_line.cli.main(["-m", "asset:target", *words], standalone_mode=False)
