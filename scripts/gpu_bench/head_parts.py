"""Heads that draft on the target's own device: what a round of Medusa's and of EAGLE's costs beside a plain step.

Heads are made up, so that their tokens are hardly ever right: a round takes as long whatever is accepted. It knows
directories of heads and `trtrun bench`'s JSON. It does not know when it runs.
"""

from __future__ import annotations

import sys
from pathlib import Path

from gpu_bench.children import run
from gpu_bench.placements import Placement
from gpu_bench.workbench import Workbench

WRITE_HEADS = Path(__file__).resolve().parent / "write_heads.py"

CASES: tuple[tuple[str, str, dict[str, object]], ...] = (
    ("EAGLE, a chain of 5", "eagle", {"draft_len": 5}),
    ("EAGLE-3, a chain of 5", "eagle3", {"draft_len": 5}),
    ("EAGLE-3, a dynamic tree of 20, 5 deep", "eagle3", {"draft_len": 5, "eagle_topk": 4}),
    ("3 Medusa heads with a matrix each, a tree of 63", "medusa", {"medusa_choices": "vicuna_33b_stage1"}),
    ("3 Medusa heads on the target's matrix, a tree of 63", "medusa-shared", {"medusa_choices": "vicuna_33b_stage1"}),
    ("3 Medusa heads with a matrix each, a chain", "medusa", {"draft_len": 3}),
)


def play_heads(bench: Workbench, placement: Placement) -> None:
    """Rounds with heads beside plain ones, of the 8B-shaped target."""
    target = bench.model(bench.pair("8b").target)
    folders = {name: bench.folder / f"heads-{name}" for _, name, _ in CASES}
    words = [f"{name}={folder}" for name, folder in folders.items()]
    bench.succeed(run([sys.executable, WRITE_HEADS, target, *words], bench.folder, bench.deadline))
    columns = ("heads", "rows", "tokens a round", "tokens/s", "round ms", "plain step ms", "round ÷ plain step")
    table = bench.table(f"Heads beside the 8B-shaped target: {placement.about}", *columns, "drafting ms")
    for about, name, options in CASES:
        method = name.removesuffix("-shared")
        config = bench.config("8b", placement, heads=folders[name], method=method, **options)
        for entry in bench.bench(config, bench.options.scale.rows)["results"]:
            plain, speculative = entry["plain"], entry["speculative"]
            step, took = plain["round_wall_ms"], speculative["round_wall_ms"]
            gained = (speculative["mean_acceptance_length"], speculative["tokens_per_s"])
            drafting = speculative["round_ms"]["drafting"]
            table.add(about, entry["rows"], *gained, took, step, took / step, drafting)
