"""scripts/bench/bench_gpu.py with tiny models on CPU slots: parts, refusals, what fails, and what is left out."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bench_runs import GPUS, rows_of, states_of, summary_of
from commands import ROOT, Run
from drains import wait_for_end_of, wait_until
from forked_bench import fork_commands
from forked_commands import ForkedCommands, ranks_below
from test_cli_peer import peer_python

sys.path.append(str(ROOT))
from scripts.bench.gpu_bench import workbench
from scripts.bench.gpu_bench.parts import list_parts
from scripts.bench.gpu_bench.placement_parts import _add_sums
from scripts.bench.gpu_bench.placements import PLACEMENTS, find_apart
from scripts.bench.gpu_bench.rank_loss import play_seed_command
from scripts.bench.gpu_bench.start_parts import PROCESSES
from scripts.bench.gpu_bench.tables import Table, show
from scripts.bench.gpu_bench.workbench import Options, Workbench
from scripts.seed_table import main as make_seed_table

WORDS = [sys.executable, str(ROOT / "scripts" / "bench" / "bench_gpu.py")]
PARTS = (
    "card", "check:draft1-target1", "8b:target2-draft-beside", "8b:draft1-target1", "kill-draft", "kill-target",
    "vllm:target2-draft-beside",
)  # fmt: skip
"""Of two devices: each kind that the tests of one device have not."""


def check_placement(printed: str, output: Path) -> None:
    """A placement has its speed, phases, memory and texts."""
    part = "8b:target2-draft-beside"
    title = "8b-shaped pair, target TP 2, draft beside its first rank"
    speeds = rows_of(printed, f"{title}**")
    assert [(row["rows"], row["mode"]) for row in speeds] == [
        (rows, mode) for rows in ("1", "2") for mode in ("plain", "speculative")
    ]
    assert [row["equal texts"] for row in speeds] == ["", "1 of 1", "", "2 of 2"]
    for row in speeds:
        assert float(row["tokens/s"]) == pytest.approx(2 * float(row["per device"]), rel=0.02)
        assert 0 <= float(row["target idle"]) <= 1 and float(row["verifying ms"]) > 0
    memory = rows_of(printed, f"{title}: start and memory")
    assert [row["rank"] for row in memory] == ["1 (draft+target)", "2 (target)"]
    assert all(row["weights"] == row["planned"] for row in memory)
    about = title.partition(", ")[2]
    summaries = rows_of(printed, "8b-shaped pair, tokens/s")
    (summary,) = [row for row in summaries if (row["placement"], row["rows"]) == (about, "2")]
    assert summary["plain"] == speeds[2]["tokens/s"] and summary["ahead"] == ""
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    job, end = (line for line in lines if line["part"] == part)
    assert job["report"]["results"][1]["speculative"]["tokens_per_s"] > 0
    assert title in end["tables"][0]


SIDE_BY_SIDE = """
import pathlib, sys, time
config = pathlib.Path(sys.argv[sys.argv.index("--config") + 1])
config.with_suffix(".started").touch()
while len(list(config.parent.glob("*.started"))) < 2:
    time.sleep(0.01)
print(config.with_name("report").read_text())
"""
"""A job that does not end before another has begun."""


def check_two_jobs(report: dict[str, Any], tmp_path: Path) -> None:
    """A part of four devices, whose two jobs are played: each says `report`, which is of a draft and a target."""
    folder = tmp_path / "four"
    folder.mkdir()
    (folder / "report").write_text(json.dumps(report))
    bench = Workbench(Options("cpu", 4), folder, deadline=time.monotonic() + 60)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workbench, "TRTRUN", [sys.executable, "-c", SIDE_BY_SIDE])
        list_parts(bench.options)["8b:two-draft1-target1"].play(bench)
    configs = [json.loads(path.read_text()) for path in sorted(folder.glob("*.yaml"))]
    devices = [device for config in configs for role in ("draft", "target") for device in config[role]["devices"]]
    assert devices == [f"cpu:{number}" for number in range(4)]
    speeds, memory = bench.tables
    assert [row[:2] for row in speeds.rows] == [[f"2 x {rows}", mode] for rows in (1, 2) for mode in ("plain", "ahead")]
    for entry, (plain, ahead) in zip(report["results"], (speeds.rows[:2], speeds.rows[2:]), strict=True):
        for mode, row in (("plain", plain), ("speculative", ahead)):
            assert float(row[2]) == pytest.approx(2 * entry[mode]["tokens_per_s"], rel=0.01)
            assert float(row[3]) == pytest.approx(entry[mode]["tokens_per_s"] / 2, rel=0.01)
        assert ahead[speeds.columns.index("equal texts")] == f"{2 * entry['equal_rows']} of {2 * entry['rows']}"
    assert len(memory.rows) == 2 * len(report["memory"])


def test_texts_are_compared_greedy_and_sampled_and_a_failing_part_costs_no_other(bench: Run) -> None:
    wrong = ("--draft-quantization", "int4", "--parts", "70b,exactness")
    done = bench(*GPUS[1], *wrong)
    assert done.returncode == 1
    states = states_of(done)
    assert states["exactness"] == "done"
    assert states["70b"].startswith("failed: no JSON in the last line; status 2: trtrun: ") and "int4" in states["70b"]
    assert f"70b: {states['70b']}" in done.stdout, "told in its place"
    rows = rows_of(done.stdout, "Texts equal to plain decoding's")
    assert [list(row.values()) for row in rows] == [["0", "1 of 1", "2 of 2"], ["0.8", "1 of 1", "2 of 2"]]


def test_first_runs_are_shown_beside_later_ones(bench: Run, tmp_path: Path) -> None:
    output = tmp_path / "figures.jsonl"
    done = bench(*GPUS[1], "--parts", "cold", "--output", output)
    assert done.returncode == 0, done.stdout + done.stderr
    where = "draft and target on one device, in one process (tokens/s); ready after"
    rows, later = (rows_of(done.stdout, f"First runs: 8b-shaped pair, {one} process, {where}") for one in PROCESSES)
    modes = ("plain", "speculative")
    assert [row["mode"] for row in later] == [row["mode"] for row in rows]
    assert [(row["rows"], row["mode"]) for row in rows] == [
        (rows, mode) for rows in ("1", "2 of 48 tokens") for mode in modes
    ]
    report = json.loads(output.read_text().splitlines()[0])["report"]
    for row, case in zip(rows, (entry[mode] for entry in report["results"] for mode in modes), strict=True):
        first, *following = case["tokens_per_s_runs"]
        assert float(row["first"]) == pytest.approx(first, rel=0.01)
        assert row["next five"] == ", ".join(f"{rate:.0f}" for rate in following) and len(following) == 5
        assert float(row["first ÷ median of next"]) == pytest.approx(case["first_over_next"], abs=0.01)
        assert (row["captures"], row["compilations"]) == ("0", "0")


@pytest.mark.parametrize(
    ("part", "kind", "title"),
    [
        ("guided", "guided", "8B-shaped pair, a JSON schema each row"),
        ("adapters", "adapted", "8B-shaped pair, 16 adapters of rank 16"),
    ],
)
def test_rows_of_a_kind_are_shown_beside_free_ones(part: str, kind: str, title: str, bench: Run) -> None:
    done = bench(*GPUS[1], "--parts", part)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = rows_of(done.stdout, title)
    modes = ("plain", "speculative")
    assert [(row["rows"], row["mode"]) for row in rows] == [(rows, mode) for rows in ("1", "2") for mode in modes]
    (played,) = summary_of(done)["parts"]
    (job,) = played["jobs"]
    for entry, (plain, speculative) in zip(job["report"]["results"], (rows[:2], rows[2:]), strict=True):
        assert float(plain["ratio"]) == pytest.approx(entry[f"plain_{kind}_over_free"], abs=0.01)
        assert float(speculative[f"÷ plain {kind}"]) == pytest.approx(entry[f"{kind}_speculative_over_plain"], abs=0.01)
        assert entry[f"speculative_{kind}"]["mean_acceptance_length"] > 1
        assert speculative["equal texts"] == f"{entry['rows']} of {entry['rows']}"


def test_drafts_in_parallel_are_shown_beside_those_step_by_step(bench: Run) -> None:
    done = bench(*GPUS[1], "--parts", "parallel", "--draft-quantization", "none", "--target-quantization", "none")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = rows_of(done.stdout, "8B-shaped target, 1B-shaped draft, draft_len 4")
    assert [(row["rows"], row["drafts"]) for row in rows] == [
        (rows, how) for how in ("step by step", "in parallel") for rows in ("1", "2")
    ]
    assert all(float(row["round ÷ plain step"]) > 0 for row in rows)


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
@pytest.mark.parametrize("count", PLACEMENTS)
def test_first_runs_are_at_the_settings_that_a_user_finds(tmp_path: Path, kind: str, count: int) -> None:
    """bench() is played, the configuration is written."""
    asked: list[tuple[dict[str, Any], tuple[str, ...]]] = []
    caches: list[str] = []

    class Asked(Workbench):
        def bench(self, config: Path, rows: Any, *extra: object, variables: Any = None) -> dict[str, Any]:
            assert extra == ("--cold",)
            asked.append((json.loads(config.read_text()), rows))
            caches.append(variables["XDG_CACHE_HOME"])
            return {"start_s": 1.0, "results": []}

    options = Options(kind, count)
    list_parts(options)["cold"].play(Asked(options, tmp_path, deadline=0.0))
    (values, rows), again = asked
    assert again == (values, rows) and len(set(caches)) == 1, "the second process finds what the first has left"
    assert values["speculation"] == {} and len(rows) == len(set(rows)) > 1
    assert values["scheduler"]["max_batch_size"] >= max(int(re.split("[x@]", workload)[0]) for workload in rows)


def test_what_would_not_be_done_in_time_is_left_out_and_named(trtrun: Run) -> None:
    done = trtrun("--devices", "cpu", "--gpus", 4, "--time-limit", 18, "--parts", "card,kill-draft", words=WORDS)
    summary = summary_of(done)
    assert summary["left_out"][-1] == "kill-draft"
    assert f"left out, as the time was over: --parts {','.join(summary['left_out'])}" in done.stdout
    assert "kill-draft" not in states_of(done)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--parts", "exactnes"), "unknown part 'exactnes' (did you mean 'exactness'?)"),
        (("--parts", "70*,x*"), "unknown part 'x*'"),
        (("--parts", "8b:draft1-target4"), "unknown part '8b:draft1-target4' (it is a part of --gpus 8)"),
        (("--acceptances", "0"), "is not a list of numbers from 1 on"),
        (("--gpus", "3"), "invalid choice: 3"),
        (("--output", "/missing/figures"), "--output /missing/figures cannot be written: No such file or directory"),
    ],
)
def test_nonsense_is_refused(trtrun: Run, arguments: tuple[str, ...], said: str) -> None:
    done = trtrun(*arguments, words=WORDS)
    assert done.returncode != 0 and said in done.stderr
    assert done.stdout == "" and "Traceback" not in done.stderr


def test_a_signal_ends_what_runs_and_prints_what_there_is(
    start_trtrun: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    output = tmp_path / "figures.jsonl"
    words = (*GPUS[2], "--parts", "card,check:draft1-target1", "--output", output)
    process = start_trtrun(*words, words=WORDS)
    wait_until(lambda: len(ranks_below(process.pid)) == 3, process, "the ranks", pause=0.05)
    ranks = ranks_below(process.pid).values()
    os.kill(process.pid, signal.SIGTERM)
    printed, _ = process.communicate(timeout=60)
    wait_for_end_of(ranks)
    summary = json.loads(printed.splitlines()[-1])
    assert summary["stopped"] and [part["state"] for part in summary["parts"]] == ["done", "stopped"]
    assert process.returncode == 1
    assert json.loads(output.read_text().splitlines()[0])["part"] == "card"


def test_placements_fit_their_hosts() -> None:
    for count, places in PLACEMENTS.items():
        assert len({place.name for place in places}) == len(places)
        for place in places:
            used = [device for job in range(place.num_jobs) for role in place.devices("cpu", job) for device in role]
            assert {int(device.removeprefix("cpu:")) for device in used} == set(range(place.num_devices))
            assert place.num_devices <= count
    assert {count: find_apart(count).name for count in (2, 4, 8)} == {
        2: "draft1-target1", 4: "draft2-target2", 8: "draft4-target4"
    }  # fmt: skip


def test_tables_are_markdown() -> None:
    table = Table("Title", ("a", "b"))
    table.add(1234.5678, None)
    table.add(True, "x|y")
    assert table.markdown() == "**Title**\n\n| a | b |\n|---|---|\n| 1235 |  |\n| yes | x\\|y |"
    assert [show(number) for number in (123.456, 1.25, 7)] == ["123.5", "1.25", "7"]
    with pytest.raises(ValueError, match="Title: 1 cells for 2 columns"):
        table.add(1)


def test_a_group_that_has_chosen_how_it_sums_has_a_table(tmp_path: Path) -> None:
    bench = Workbench(Options("cuda", 2), tmp_path, deadline=0.0)
    sums = [
        {"nbytes": 8192, "microseconds": {"NCCL": 12.3, "one-shot": 6.2}, "way": "one-shot"},
        {"nbytes": 1 << 20, "microseconds": {"NCCL": 20.9}, "way": "NCCL"},
    ]
    _add_sums(bench, PLACEMENTS[2][0], {"ranks": [1, 2], "sums": sums})
    _add_sums(bench, PLACEMENTS[2][0], {"ranks": [1, 2]})
    (table,) = bench.tables
    assert (list(table.columns), table.rows) == (
        ["KiB", "NCCL", "one-shot", "used"], [["8", "12.30", "6.20", "one-shot"], ["1024", "20.90", "", "NCCL"]]
    )  # fmt: skip


@pytest.mark.timeout(900)
def test_a_part_of_every_kind_on_two_devices(bench: Run, tmp_path: Path) -> None:
    output, peer = tmp_path / "figures.jsonl", ("--vllm-python", peer_python(tmp_path))
    done = bench(*GPUS[2], "--parts", ",".join(PARTS), *peer, "--output", output, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert states_of(done) == dict.fromkeys(PARTS, "done")
    check_placement(done.stdout, output)
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    *_, of_ahead = [line["report"] for line in lines if line["part"] == "8b:draft1-target1" and "report" in line]
    check_two_jobs(of_ahead, tmp_path)
    (killed,) = rows_of(done.stdout, "A draft rank is killed")
    assert (killed["exit status"], killed["equal texts"]) == ("0", "40 of 40")
    (killed,) = rows_of(done.stdout, "A target rank is killed")
    assert killed["exit status"] == "137" and "target rank 2 (cpu:1) was killed by signal 9" in killed["what it said"]
    assert {row["mode"] for row in rows_of(done.stdout, "8b-shaped pair, draft and target on a device each**")} == {
        "plain", "speculative", "ahead"
    }  # fmt: skip
    beside = rows_of(done.stdout, "8B-shaped pair beside vLLM")
    assert [row["mode"] for row in beside] == ["plain", "speculative"] * 2
    assert [row["vLLM acceptance"] for row in beside] == ["", "4.00"] * 2


@pytest.mark.timeout(900)
def test_parts_of_one_device(bench: Run) -> None:
    parts = "8b,8b-long,8b-sampled,1b,70b,quantized,engine,quantized-kv,kernels:8b,text-drafts:30b-a3b"
    done = bench(*GPUS[1], "--parts", parts, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert states_of(done) == dict.fromkeys(parts.split(","), "done")
    kernels = rows_of(done.stdout, "8b-shaped pair, speculative, rows: 1; a round takes")
    assert sum(float(row["in all"]) for row in kernels) > 0 and len(kernels) > 10
    rows = rows_of(done.stdout, "30b-a3b-shaped target, 4 tokens out of a corpus")
    assert [row["tokens a round"] for row in rows] == ["3.50", "3.50"]


def test_the_example_of_another_runtime_runs_as_a_part(
    tmp_path: Path, forked_commands: ForkedCommands, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part of eight devices, played on two."""
    fork_commands(forked_commands.descriptor, monkeypatch.setattr)
    bench = Workbench(Options("cpu", 2), tmp_path, deadline=time.monotonic() + 300)
    play_seed_command(bench)
    (table,) = bench.tables
    ((status, _, tokens),) = table.rows
    assert (status, tokens) == ("0", "64")


def test_heads_are_read_as_they_are_where_weights_have_fewer_bits(tmp_path: Path) -> None:
    bench = Workbench(Options("cuda", 1), tmp_path, deadline=0)
    config = bench.config("70b", PLACEMENTS[1][0], heads=tmp_path / "heads", method="medusa")
    values = json.loads(config.read_text(encoding="utf-8"))
    assert values["target"]["quantization"] == "fp8"
    assert values["draft"] == {"model": str(tmp_path / "heads")}


def test_a_published_table_is_measured_beside_its_figures(
    forked_commands: ForkedCommands, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fork_commands(forked_commands.descriptor, monkeypatch.setattr)
    words = ["seed_table.py", "--tiny", "--cases", "1b,medusa", "--acceptance", "1b=3"]
    monkeypatch.setattr(sys, "argv", words)
    assert make_seed_table() == 0
    printed = capsys.readouterr().out
    drafts, heads = rows_of(printed, "70B in FP8 on 1 of cpu, one row")
    assert (drafts["theirs"], drafts["their ratio"], heads["theirs"]) == ("181.7", "3.55", "268.0")
    cases = json.loads(printed.splitlines()[-1])["cases"]
    assert 2 < cases["1b"]["tokens_a_round"] <= 3 and 1 < cases["medusa"]["tokens_a_round"] < 2
    for row, case in ((drafts, cases["1b"]), (heads, cases["medusa"])):
        assert float(row["ratio"]) == pytest.approx(case["tokens_per_s"] / case["plain_tokens_per_s"], abs=0.01)
        needed = float(row["theirs"]) * case["round_ms"] / 1e3
        assert float(row["tokens a round for theirs"]) == pytest.approx(needed, abs=0.01)
    monkeypatch.setattr(sys, "argv", [*words[:2], "--cases", "2b"])
    with pytest.raises(SystemExit):
        make_seed_table()
    assert "'2b' has others than 1b, 3b, 8b, medusa" in capsys.readouterr().err
