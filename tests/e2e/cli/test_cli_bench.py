"""`trtrun bench` and the demo through the real commands."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from commands import FOUR_RANKS, ONE_PROCESS, ROOT, THREE_RANKS, Configs, Run

from launch.commands.demo import CORES, choose_config
from trtrun.configuration.config import load_config
from trtrun.kernels.cpu.machine import processor_kind
from trtrun.threads import count_cores
from trtrun.timing.telemetry import ROUND_PARTS


def assert_parts_add_up(case: dict[str, Any]) -> None:
    """The parts of a round are its wall time, no more and no less; and all rounds are all of the timed runs."""
    parts = case["round_ms"]
    assert list(parts) == list(ROUND_PARTS)
    assert min(parts.values()) >= 0 and parts["verifying"] > 0
    assert sum(parts.values()) == pytest.approx(case["round_wall_ms"], abs=1e-4)


def test_bench_beside_transformers(config: Configs, trtrun: Run) -> None:
    done = trtrun(
        *("bench", "--config", config(ONE_PROCESS), "--rows", "1,2", "--repeats", 2, "--max-tokens", 8),
        *("--prompt-tokens", 5, "--peer", "transformers", "--seed", 7),
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["seed"] == 7
    assert report["total_threads"] == 1
    assert report["identical_to_plain"] is True
    assert report["kernels"] == [processor_kind() or "torch"]
    assert [entry["rows"] for entry in report["results"]] == [1, 2]
    one, two = report["results"]
    assert set(one["ratios"]) == {
        "speculative_over_plain", "plain_over_peer_plain", "speculative_over_peer_assisted"
    }  # fmt: skip
    assert set(two["ratios"]) == {"speculative_over_plain", "plain_over_peer_plain"}
    assert one["plain"]["num_draft_tokens"] == 0
    assert one["speculative"]["num_draft_tokens"] > 0
    assert 1 <= one["speculative"]["mean_acceptance_length"] <= 5
    assert len(one["speculative"]["tokens_per_s_runs"]) == 2
    for case in (one["plain"], one["speculative"], two["plain"], two["speculative"]):
        assert_parts_add_up(case)
    assert "milliseconds of a round" in done.stdout and "runs, in order" not in done.stdout
    ratio = one["plain"]["tokens_per_s"] / one["transformers"]["plain_tokens_per_s"]
    assert one["ratios"]["plain_over_peer_plain"] == pytest.approx(ratio, rel=0.01)


def test_bench_counts_the_texts_of_each_workload_that_speculation_leaves_alone(config: Configs, trtrun: Run) -> None:
    rows = ("--rows", "2,3x9@0.8,2", "--top-p", 0.9, "--prompt-tokens", 5, "--repeats", 1, "--max-tokens", 8)
    done = trtrun("bench", "--config", config(ONE_PROCESS), *rows, "--exact")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    names = ("rows", "prompt_tokens", "temperature", "equal_rows")
    assert [tuple(entry[name] for name in names) for entry in report["results"]] == [(2, 5, 0, 2), (3, 9, 0.8, 3)]
    assert report["identical_to_plain"] is True and report["top_p"] == 0.9
    assert "3x9@0.8: 3 of 3 texts equal plain ones" in done.stdout
    (rank,) = report["memory"]
    assert rank["shard_bytes"] == rank["planned_shard_bytes"] > 0
    assert rank["kv_bytes"] > 0 and rank["device"] == "cpu:0"
    assert report["start_s"] > 0


def test_bench_of_prompt_lookup_compares_it_with_plain_decoding(config: Configs, trtrun: Run) -> None:
    options = ("--rows", "2", "--repeats", 1, "--max-tokens", 24, "--json", "--speculation", "ngram")
    file = config(ONE_PROCESS, speculation={"prompt_lookup_min": 1, "method": "ngram"})
    done = trtrun("bench", "--config", file, *options)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["method"], report["draft"], report["draft_len"]) == ("ngram", None, 4)
    assert len(report["ranks"]) == 1 and report["identical_to_plain"] is True
    (entry,) = report["results"]
    assert entry["plain"]["num_draft_tokens"] == 0 and entry["speculative"]["num_rounds"] > 0
    assert "speculative_over_plain" in entry["ratios"]


def test_bench_over_ranks_draws_a_seed_and_prints_json_alone(config: Configs, trtrun: Run) -> None:
    done = trtrun("bench", "--config", config(THREE_RANKS), "--rows", "2", "--repeats", 1, "--max-tokens", 4, "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert isinstance(report["seed"], int)
    assert len(report["ranks"]) == 3
    assert_parts_add_up(report["results"][0]["speculative"])
    assert report["total_threads"] == 2 and report["cold"] is False
    assert report["identical_to_plain"] is True
    assert report["kernels"] == [processor_kind() or "torch"]


def test_bench_says_what_bfloat16_was_computed_with(config: Configs, trtrun: Run) -> None:
    values = ("target.dtype=bfloat16", "draft.dtype=bfloat16", "draft.quantization=int8", "target.quantization=fp8")
    words = [word for value in values for word in ("--set", value)]
    done = trtrun(
        "bench", "--config", config(ONE_PROCESS), *words, "--rows", "1", "--repeats", 1, "--max-tokens", 4, "--json"
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["kernels"] == [processor_kind() or "torch"]
    assert (report["target_quantization"], report["draft_quantization"]) == ("fp8", "int8")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--rows", "1,x"), "write numbers with commas between"),
        (("--rows", "0"), "write numbers with commas between"),
        (("--rows", "8x0"), "write numbers with commas between"),
        (("--rows", "8@1e9"), "write numbers with commas between"),
        (("--max-tokens", "70000"), "but a request may have 65536"),
        (("--rows", "1,1x70000"), "prompts of 70000 tokens and --max-tokens 64 make 70064"),
        (("--exact", "--speculation", "none"), "--exact compares speculative with plain decoding"),
        (("--exact", "--set", "speculation.forced_acceptance=2"), "they are nobody's"),
    ],
)
def test_bench_refuses_nonsense(config: Configs, trtrun: Run, arguments: tuple[str, ...], said: str) -> None:
    done = trtrun("bench", "--config", config(ONE_PROCESS), *arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


def read_trace(path: Path) -> tuple[dict[str, Any], dict[tuple[int, int], list[dict[str, Any]]], dict[Any, str]]:
    """A trace's summary, its complete events by row (process, thread), and the rows' names, processes' too."""
    trace = json.loads(path.read_text(encoding="utf-8"))
    assert trace["displayTimeUnit"] == "ms"
    spans = sorted((e for e in trace["traceEvents"] if e["ph"] == "X"), key=lambda e: (e["pid"], e["tid"]))
    rows = {place: list(events) for place, events in groupby(spans, lambda e: (e["pid"], e["tid"]))}
    names: dict[Any, str] = {}
    for event in trace["traceEvents"]:
        assert event["ph"] in ("X", "M") and isinstance(event["pid"], int) and isinstance(event["tid"], int)
        if event["name"] == "process_name":
            names[event["pid"]] = event["args"]["name"]
        if event["name"] == "thread_name":
            names[event["pid"], event["tid"]] = event["args"]["name"]
    assert set(rows) == {place for place in names if isinstance(place, tuple)}
    return trace["otherData"], rows, names


def ends(event: dict[str, Any]) -> tuple[int, int]:
    """Start and end of an event in whole nanoseconds."""
    return round(1e3 * event["ts"]), round(1e3 * (event["ts"] + event["dur"]))


def assert_row_is_whole(events: list[dict[str, Any]], num_rounds: dict[int, int]) -> None:
    """A row's events are in order and do not overlap, and cover as many rounds of each run as the run had."""
    assert all(0 <= start <= end for start, end in map(ends, events))
    assert all(ends(before)[1] <= ends(after)[0] + 1 for before, after in pairwise(events))
    for run, count in num_rounds.items():
        assert len({e["args"]["round"] for e in events if e["args"]["run"] == run}) == count


def test_bench_traces_the_rounds_of_all_ranks(config: Configs, trtrun: Run, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    done = trtrun(
        *("bench", "--config", config(FOUR_RANKS), "--rows", "2", "--repeats", 1, "--max-tokens", 12, "--json"),
        *("--trace", file, "--set", "speculation.ahead=on"),
    )
    assert done.returncode == 0, done.stderr
    (entry,) = json.loads(done.stdout)["results"]
    summary, rows, names = read_trace(file)
    assert [names[rank] for rank in range(4)] == [
        "orchestrator rank 0 (host)", "draft rank 1 (cpu:0)", "target rank 2 (cpu:1)", "target rank 3 (cpu:2)"
    ]  # fmt: skip
    assert [event["name"] for event in rows.pop((0, 0))] == [
        "run 0: plain, 2 rows of 32 tokens", "run 1: speculative, 2 rows of 32 tokens"
    ]  # fmt: skip
    assert [names[place] for place in rows] == ["orchestrator", "draft", "target", "target"]
    num_rounds = {run: entry[mode]["num_rounds"] for run, mode in enumerate(("plain", "speculative"))}
    for events in rows.values():
        assert_row_is_whole(events, num_rounds)
    orchestrator, draft, target, _ = rows.values()
    assert {event["name"] for event in orchestrator} == {"planning", "waiting", "committing"}
    assert {event["name"] for event in draft} == {"drafting", "anticipating", "waiting"}
    assert {event["name"] for event in target} == {"transferring", "verifying"}
    planned, drafted, verified = (
        {event["args"]["round"]: ends(event) for event in events if event["name"] == name}
        for events, name in ((orchestrator, "planning"), (draft, "drafting"), (target, "verifying"))
    )
    for number, (start, end) in verified.items():
        assert planned[number][0] <= start, "a round is planned before it is verified"
        assert number + 1 not in drafted or start <= drafted[number + 1][0], "a verdict is heard before the next draft"
        assert number + 2 not in planned or end <= planned[number + 2][0], "one plan is sent ahead"
    shares = {(idle["mode"], idle["rank"]): idle["idle_share"] for idle in summary["idle"]}
    assert len(shares) == 8
    assert 0.5 < shares.pop(("plain", 1)) <= 1, "nothing is drafted there"
    assert all(0 < share < 1 for share in shares.values()), shares
    for mode in ("plain", "speculative"):
        assert entry[mode]["target_idle_share"] == shares[mode, 2]
    assert summary["num_dropped_rounds"] == 0
    assert {(clock["rank"], clock["offset_us"]) for clock in summary["clocks"]} == {(1, 0.0), (2, 0.0), (3, 0.0)}


def test_a_trace_of_one_process_has_its_two_roles_and_can_be_drawn(
    config: Configs, trtrun: Run, tmp_path: Path
) -> None:
    file, drawing = tmp_path / "trace.json", tmp_path / "rounds.svg"
    file.write_text("an older file")
    done = trtrun(
        *("bench", "--config", config(ONE_PROCESS), "--rows", "1", "--repeats", 2, "--max-tokens", 24, "--json"),
        *("--trace", file),
    )
    assert done.returncode == 0, done.stderr
    assert [path.name for path in tmp_path.iterdir() if "trace" in path.name] == ["trace.json"]
    summary, rows, names = read_trace(file)
    assert names[0] == "orchestrator+draft+target rank 0 (cpu:0)"
    assert [names[place] for place in rows] == ["timed runs", "orchestrator", "draft+target"]
    assert len(summary["runs"]) == 4
    (case,) = json.loads(done.stdout)["results"]
    assert_row_is_whole(rows[0, 1], {})
    assert_row_is_whole(rows[0, 2], {})
    both = [len({e["args"]["round"] for e in rows[0, 2] if e["args"]["run"] in runs}) for runs in ((0, 2), (1, 3))]
    assert both == [case[mode]["num_rounds"] for mode in ("plain", "speculative")]
    waiting = {e["args"]["round"]: ends(e) for e in rows[0, 1] if e["name"] == "waiting"}
    for event in rows[0, 2]:
        start, end = waiting[event["args"]["round"]]
        assert start <= ends(event)[0] and ends(event)[1] <= end, "one process does a round when it waits for it"

    words = [sys.executable, str(ROOT / "scripts" / "bench" / "draw_trace.py"), str(file), str(drawing), "--run", "0"]
    done = subprocess.run([*words, "--rounds", "3"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    said = [title.text or "" for title in ElementTree.parse(drawing).iter("{http://www.w3.org/2000/svg}title")]
    assert said[0] == summary["runs"][0]
    first = rows[0, 2][0]["args"]["round"] + 3
    verified = [title.split(", ")[1] for title in said if title.startswith("verifying")]
    assert verified == [f"round {number}" for number in range(first, first + 3)]
    done = subprocess.run([*words, "--first", "999"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and "so none with number 999" in done.stderr


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("missing/trace.json", "missing does not exist"),
        (".", "it is a directory"),
        ("/dev/null", "a trace needs a file"),
        ("-", "a trace needs a file"),
    ],
)
def test_bench_refuses_a_trace_that_cannot_be_written_before_it_runs(
    config: Configs, trtrun: Run, tmp_path: Path, path: str, said: str
) -> None:
    where = path if path == "-" else tmp_path / path
    done = trtrun("bench", "--config", config(FOUR_RANKS), "--trace", where)
    assert done.returncode == 2
    assert done.stdout == "" and said in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_the_demo_is_placed_by_the_cores_that_are_there() -> None:
    names = [choose_config(cores).stem for cores in (1, CORES - 1, CORES, 64)]
    assert names == ["cpu_pair_on_two_cores"] * 2 + ["cpu_pair"] * 2
    assert len(load_config(choose_config(CORES)).target.devices) + 1 == CORES


def test_the_demo_shows_text_ranks_and_figures(trtrun: Run) -> None:
    # Whether drafts pay here and now is another question.
    done = trtrun("demo", "--prompts", 2, "--max-tokens", 24, "--set", "speculation.pacing=fixed")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert len(report["ranks"]) == (4 if count_cores() >= CORES else 3)
    assert report["identical"] is True
    assert report["speculative_rounds"] < report["plain_rounds"]
    assert report["mean_acceptance_length"] > 1.5


def test_bench_of_a_model_without_weights(config: Configs, trtrun: Run, tmp_path: Path, pair: Path) -> None:
    """Every result says that weights are made up and acceptance is forced; run refuses to write such texts."""
    models = {}
    for name in ("target", "draft"):
        models[name] = tmp_path / name
        models[name].mkdir()
        values = json.loads((pair / name / "config.json").read_text())
        (models[name] / "config.json").write_text(json.dumps(values | {"dtype": "bfloat16"}))
    settings = [
        f"{name}.{key}={value}" for name in models for key, value in (("model", models[name]), ("load_format", "dummy"))
    ]
    settings += ["speculation.forced_acceptance=3", "speculation.draft_len=4"]
    words = [word for setting in settings for word in ("--set", setting)]
    done = trtrun("bench", "--config", config(ONE_PROCESS), *words, "--rows", "2", "--repeats", 1, "--max-tokens", 24)
    assert done.returncode == 0, done.stderr
    assert "forced acceptance: 3 tokens a round" in done.stdout
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["load_format"] == {"target": "dummy", "draft": "dummy"}
    assert (report["forced_acceptance"], report["identical_to_plain"]) == (3, None)
    assert report["results"][0]["speculative"]["mean_acceptance_length"] > 2.5
    refused = trtrun("run", "--config", config(ONE_PROCESS), *words, "--prompt", "x")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "speculation.forced_acceptance: texts would be nobody's" in refused.stderr
    refused = trtrun("bench", "--config", config(ONE_PROCESS), *words, "--peer", "transformers")
    assert refused.returncode == 2 and "--peer transformers reads the models' weights" in refused.stderr
