"""`trtrun bench --cold`: what the first to send a workload gets, beside those who come next."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
from commands import ONE_PROCESS, Configs, Run, error_line
from test_cli_bench import read_trace

TITLE = "tokens/s of the runs, in order"
BFLOAT16 = ("--set", "target.dtype=bfloat16", "--set", "draft.dtype=bfloat16")
"""Which has kernels that are compiled."""


def cold_rows(printed: str) -> list[list[str]]:
    """The cells of the table of first runs, below its head."""
    table = printed[printed.index(TITLE) : printed.index("milliseconds of a round")]
    lines = [line for line in table.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]


def runs_of_trace(path: Path) -> list[set[int]]:
    """Rounds of each timed run."""
    summary, rows, _ = read_trace(path)
    runs: list[set[int]] = [set() for _ in summary["runs"]]
    for event in rows[0, 1]:
        runs[event["args"]["run"]].add(event["args"]["round"])
    return runs


def test_each_workload_is_timed_from_its_first_run_on(config: Configs, trtrun: Run, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    done = trtrun(
        *("bench", "--config", config(ONE_PROCESS), *BFLOAT16, "--cold", "--rows", "1,2x9", "--prompt-tokens", 5),
        *("--max-tokens", 6, "--seed", 7, "--trace", trace),
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert (report["cold"], report["repeats"], report["identical_to_plain"]) == (True, 6, True)
    shown: list[tuple[str, str, dict[str, Any]]] = [
        (name, mode, entry[mode])
        for name, entry in zip(("1", "2x9"), report["results"], strict=True)
        for mode in ("plain", "speculative")
    ]
    for (name, mode, case), cells in zip(shown, cold_rows(done.stdout), strict=True):
        first, *following = case["tokens_per_s_runs"]
        assert len(following) == 5
        ratio = case["first_over_next"]
        assert ratio == pytest.approx(first / statistics.median(following), abs=0.002)
        assert (case["num_captures"], case["num_compilations"]) == (0, 0), "the start has made them ready"
        later = " ".join(f"{rate:.0f}" for rate in following)
        assert cells == [name, mode, f"{first:.0f}", later, f"{ratio:.2f}", "0", "0"]
        assert len(case["round_wall_ms_runs"]) == 6
        assert statistics.mean(case["round_wall_ms_runs"]) == pytest.approx(case["round_wall_ms"], rel=0.5)
    runs = runs_of_trace(trace)
    assert len(runs) == 2 * 2 * 6
    assert sorted(set().union(*runs)) == list(range(sum(map(len, runs)))), "no round was before them or between them"


def test_both_a_first_run_and_exact_texts_are_refused(config: Configs, trtrun: Run) -> None:
    done = trtrun("bench", "--config", config(ONE_PROCESS), "--cold", "--exact")
    assert done.returncode == 2
    assert error_line(done) == (
        "trtrun: --cold times the first run of every workload, and --exact would be its first: drop one"
    )


def test_a_peer_beside_first_runs_is_refused(config: Configs, trtrun: Run) -> None:
    done = trtrun("bench", "--config", config(ONE_PROCESS), "--cold", "--peer", "transformers")
    assert done.returncode == 2
    assert error_line(done) == (
        "trtrun: --cold times the first run of every workload, and a peer is warmed up first: drop one"
    )
