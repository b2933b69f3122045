"""Heads that draft on the target's own device: what a round of Medusa's and of EAGLE's costs beside a plain step,
and beside vLLM's; and EAGLE-3's on a device of its own.

Heads are made up, so that their tokens are hardly ever right: a round takes as long whatever is accepted. It knows
directories of heads and `trtrun bench`'s JSON. It does not know when it runs.
"""

from __future__ import annotations

import sys
from pathlib import Path

from scripts.bench.gpu_bench.placements import ONE, Placement
from scripts.bench.gpu_bench.workbench import Workbench
from scripts.harness.children import ChildError, run

WRITE_HEADS = Path(__file__).resolve().parent / "write_heads.py"

TREE_OF_60: dict[str, object] = {"draft_len": 5, "eagle_topk": 10, "max_total_draft_tokens": 60}
CASES: tuple[tuple[str, str, dict[str, object]], ...] = (
    ("EAGLE, a chain of 5", "eagle", {"draft_len": 5}),
    ("EAGLE-3, a chain of 5", "eagle3", {"draft_len": 5}),
    ("EAGLE-3, a dynamic tree of 60, 5 deep", "eagle3", TREE_OF_60),
    ("3 Medusa heads with a matrix each, a tree of 63", "medusa", {"medusa_choices": "vicuna_33b_stage1"}),
    ("3 Medusa heads on the target's matrix, a tree of 63", "medusa-shared", {"medusa_choices": "vicuna_33b_stage1"}),
    ("3 Medusa heads with a matrix each, a chain", "medusa", {"draft_len": 3}),
)

VLLM_CASES: tuple[tuple[str, str, dict[str, object]], ...] = (
    ("EAGLE-3, a chain of 5", "eagle3", {"draft_len": 5}),
    ("3 Medusa heads with a matrix each, a chain", "medusa", {"draft_len": 3}),
)
"""vLLM has chains alone of Medusa's heads, and of EAGLE-3's by default."""


def play_heads_beside_vllm(bench: Workbench, placement: Placement) -> None:
    """The same heads, target, prompts and GPU in vLLM: both gain a token a round."""
    if bench.options.vllm_python is None:
        raise ChildError("name the interpreter that has vLLM with --vllm-python")
    shape = bench.pair("8b").target
    bench.write_weights(shape)
    folders = {name: bench.folder / f"heads-{name}" for _, name, _ in VLLM_CASES}
    words = [f"{name}={folder}" for name, folder in folders.items()]
    run([sys.executable, WRITE_HEADS, bench.model(shape), *words], bench.folder, bench.deadline).succeed()
    columns = (
        "heads",
        "rows",
        "tokens/s",
        "vLLM",
        "ratio",
        "tokens a round",
        "vLLM tokens a round",
        "plain",
        "vLLM plain",
    )
    table = bench.table("Heads beside the 8B-shaped target, and in vLLM", *columns)
    peer = ("--peer", "vllm", "--peer-python", bench.options.vllm_python)
    for about, method, options in VLLM_CASES:
        config = bench.config("8b", placement, files=True, heads=folders[method], method=method, **options)
        for entry in bench.bench(config, bench.options.scale.rows, *peer)["results"]:
            ours, theirs = entry["speculative"], entry["vllm"]
            rates = (ours["tokens_per_s"], theirs["speculative_tokens_per_s"])
            lengths = (ours["mean_acceptance_length"], theirs.get("speculative_mean_acceptance_length", 1.0))
            plain = (entry["plain"]["tokens_per_s"], theirs["plain_tokens_per_s"])
            table.add(about, entry["rows"], *rates, rates[0] / rates[1], *lengths, *plain)


def play_heads(bench: Workbench, placement: Placement) -> None:
    """Rounds with heads beside plain ones, of the 8B-shaped target."""
    target = bench.model(bench.pair("8b").target)
    folders = {name: bench.folder / f"heads-{name}" for _, name, _ in CASES}
    words = [f"{name}={folder}" for name, folder in folders.items()]
    run([sys.executable, WRITE_HEADS, target, *words], bench.folder, bench.deadline).succeed()
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


def write_eagle3(bench: Workbench) -> Path:
    """The directory of an EAGLE-3 head for the 8B-shaped target."""
    target = bench.model(bench.pair("8b").target)
    folder = bench.folder / "heads-eagle3"
    run([sys.executable, WRITE_HEADS, target, f"eagle3={folder}"], bench.folder, bench.deadline).succeed()
    return folder


def play_eagle3_apart(bench: Workbench, apart: Placement) -> None:
    """Rounds of EAGLE-3's heads beside the target on one device, and on a device of their own, ahead of verdicts, too;
    and whether texts are plain decoding's."""
    folder = write_eagle3(bench)
    columns = ("heads", "placement", "ahead", "rows", "tokens a round", "round ms", "÷ plain step", "drafting ms")
    table = bench.table("EAGLE-3's heads beside the 8B-shaped target", *columns, "target idle", "equal texts")
    for about, method, options in CASES:
        if method != "eagle3":
            continue
        for placement, ahead in ((ONE, "off"), (apart, "off"), (apart, "on")):
            if ahead == "on" and "eagle_topk" in options:
                continue  # trees are drafted behind verdicts alone
            config = bench.config("8b", placement, heads=folder, method=method, ahead=ahead, **options)
            (report,) = bench.bench_together([config], bench.options.scale.rows, "--exact", traced=True)
            for entry in report["results"]:
                case, step = entry["speculative"], entry["plain"]["round_wall_ms"]
                equal = f"{entry['equal_rows']} of {entry['rows']}"
                table.add(
                    about, placement.about, ahead, entry["rows"], case["mean_acceptance_length"], case["round_wall_ms"],
                    case["round_wall_ms"] / step, case["round_ms"]["drafting"], case.get("target_idle_share"), equal,
                )  # fmt: skip
