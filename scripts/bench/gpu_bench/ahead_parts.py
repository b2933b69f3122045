"""Drafting on a device of its own, ahead of verdicts: what it gives beside drafting behind them, and whether the
product chooses the better of both.

It knows `trtrun bench`'s JSON. It does not know when it runs.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from scripts.bench.gpu_bench.cut_parts import REPEATS_A_TURN
from scripts.bench.gpu_bench.placements import ONE, Placement
from scripts.bench.gpu_bench.workbench import Workbench

FIXED = ("off", "on")
CHOOSING = "auto"
"""Values of `speculation.ahead`; the last goes by what it measures."""

TRAINED_MTP: dict[str, Any] = {"method": "mtp", "draft_len": 3, "pacing": "fixed", "forced_acceptance": 3.2}
"""An MTP layer that is right as often as a trained one."""


def play_ahead(bench: Workbench, apart: Placement) -> None:
    """The 8B pair, a device each: drafts behind verdicts, ahead of them, and as the product chooses; in turns."""
    configs = {ahead: bench.config("8b", apart, ahead=ahead) for ahead in (*FIXED, CHOOSING)}
    columns = ("rows", "ahead", "tokens/s", "÷ better of both", "hit rate", "tokens a round", "round ms")
    table = bench.table(f"8B-shaped pair, {apart.about}, in turns", *columns, "target idle")
    found = _take_turns(bench, configs)
    choices: dict[str, float] = {}
    for number, rows in enumerate(bench.options.scale.rows):
        rates = {ahead: _median(reports, number, "tokens_per_s") for ahead, reports in found.items()}
        better = max(rates[ahead] for ahead in FIXED)
        for ahead, reports in found.items():
            case = reports[-1]["results"][number]["speculative"]
            hits = case.get("drafting_ahead", {}).get("hit_rate")
            idle = _median(reports, number, "target_idle_share")
            table.add(
                rows, ahead, rates[ahead], rates[ahead] / better, hits, case["mean_acceptance_length"],
                case["round_wall_ms"], idle,
            )  # fmt: skip
        choices[str(rows)] = round(rates[CHOOSING] / better, 3)
    bench.keep({"chosen_over_better": choices})


def play_mtp_apart(bench: Workbench, apart: Placement) -> None:
    """A target whose MTP layer drafts on the target's device, on a device of its own, and there ahead of verdicts; in
    turns. How many tokens are right is forced; which token follows them a made-up layer hardly ever guesses, so that
    drafts ahead miss."""
    how = TRAINED_MTP
    ways = {
        "beside the target": bench.config("27b-states", ONE, drafts=False, **how),
        "apart": bench.config("27b-states", apart, drafts=False, ahead="off", **how),
        "apart, ahead": bench.config("27b-states", apart, drafts=False, ahead="on", **how),
    }
    columns = ("rows", "MTP", "tokens/s", "÷ beside", "÷ plain", "tokens a round", "round ms", "drafting ms")
    table = bench.table("27b-states-shaped target with an MTP layer", *columns, "hit rate", "target idle")
    found = _take_turns(bench, ways)
    for number, rows in enumerate(bench.options.scale.rows):
        beside = _median(found["beside the target"], number, "tokens_per_s")
        for way, reports in found.items():
            entry = reports[-1]["results"][number]
            case, rate = entry["speculative"], _median(reports, number, "tokens_per_s")
            table.add(
                rows, way, rate, rate / beside, rate / entry["plain"]["tokens_per_s"], case["mean_acceptance_length"],
                case["round_wall_ms"], case["round_ms"]["drafting"], case.get("drafting_ahead", {}).get("hit_rate"),
                _median(reports, number, "target_idle_share"),
            )  # fmt: skip


def _take_turns(bench: Workbench, configs: dict[str, Path]) -> dict[str, list[dict[str, Any]]]:
    """Reports of jobs by their names, as many of each as there are turns."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in configs}
    turns = bench.options.scale.turns
    repeats = ("--repeats", REPEATS_A_TURN) if turns > 1 else ()
    for _ in range(turns):
        for name, config in configs.items():
            found[name] += bench.bench_together([config], bench.options.scale.rows, *repeats, traced=True)
    return found


def _median(reports: list[dict[str, Any]], number: int, name: str) -> float:
    """Of a figure of speculative runs, all turns together."""
    return statistics.median(report["results"][number]["speculative"][name] for report in reports)
