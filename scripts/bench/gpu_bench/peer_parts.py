"""Beside vLLM: the same weights and prompts on the same GPUs, one after the other. Of shapes that are too large to
write both make weights up.

It knows `trtrun bench --peer`'s JSON. It does not know when it runs.
"""

from __future__ import annotations

import json
from typing import Any

from scripts.bench.gpu_bench.placements import ONE, Placement
from scripts.bench.gpu_bench.tables import Table, name_workload
from scripts.bench.gpu_bench.workbench import Workbench
from scripts.harness.children import ChildError

TEMPERATURE, TOP_P = 0.8, 0.95
COLUMNS = (
    "rows", "mode", "tokens/s", "vLLM", "ratio", "first token ms", "vLLM first token ms", "acceptance",
    "vLLM acceptance", "round ms", "vLLM round ms",
)  # fmt: skip
PEER_SHAPES = ("30b-a3b", "gpt-oss-120b", "27b-next", "35b-next")
"""Of mixtures and of layers that keep states, as vLLM 0.26 reads them."""
VLLM_SAMPLED = {"draft_sample_method": "probabilistic"}


def play_vllm(bench: Workbench, placement: Placement) -> None:
    """The same weights and prompts in vLLM, after the job's own runs."""
    shapes, scale, options = bench.pair("8b"), bench.options.scale, bench.options
    if options.vllm_python is None:
        raise ChildError("name the interpreter that has vLLM with --vllm-python")
    bench.write_weights(shapes.target, shapes.draft)
    rows, most, sampled = list[object](scale.rows), scale.rows[-1], []
    if placement is ONE:
        most = scale.most_rows
        rows += [scale.most_rows, *scale.long_prompts]
        sampled = [f"{number}@{TEMPERATURE}" for number in scale.rows]
    config = bench.config("8b", placement, files=True, most_rows=most)
    peer = ("--peer", "vllm", "--peer-python", options.vllm_python, "--top-p", TOP_P)
    table = bench.table(f"8B-shaped pair beside vLLM: {placement.about}", *COLUMNS)
    try:
        bench.bench(config, rows, *peer)
        if sampled:  # at its better setting; its default drafts greedily, and accepts less
            bench.bench(config, sampled, *peer, "--peer-options", json.dumps(VLLM_SAMPLED))
    finally:  # where vLLM fails, trtrun's own figures are there
        for report in bench.reports:
            for entry in report["results"]:
                for mode in ("plain", "speculative"):
                    _add_peer_row(table, entry, mode)


def play_shape(bench: Workbench, pair: str) -> None:
    """A target alone with made-up weights, plain, beside vLLM with its own."""
    if bench.options.vllm_python is None:
        raise ChildError("name the interpreter that has vLLM with --vllm-python")
    scale, peer = bench.options.scale, ("--peer", "vllm", "--peer-python", bench.options.vllm_python)
    rows = [*scale.rows, *([scale.most_rows] if pair == "30b-a3b" else [])]
    config = bench.config(pair, ONE, drafts=False, most_rows=max(rows))
    table = bench.table(f"{pair}-shaped target beside vLLM, made-up weights", *COLUMNS)
    try:
        bench.bench(config, [*rows, scale.long_prompts[-1]], *peer)
    finally:
        for report in bench.reports:
            for entry in report["results"]:
                _add_peer_row(table, entry, "plain")


def play_first_tokens(bench: Workbench) -> None:
    """The time to the first token of long prompts, beside vLLM; plain decoding."""
    if bench.options.vllm_python is None:
        raise ChildError("name the interpreter that has vLLM with --vllm-python")
    shapes = bench.pair("8b")
    bench.write_weights(shapes.target)
    config = bench.config("8b", ONE, drafts=False, files=True, most_rows=8)
    columns = ("rows", "first token ms", "vLLM first token ms", "trtrun ÷ vLLM")
    table = bench.table("8B-shaped target, plain: first tokens beside vLLM", *columns)
    report = bench.bench(
        config, ("1x8000", "1x30000"), "--peer", "vllm", "--peer-python", bench.options.vllm_python, "--max-tokens", 8
    )
    for entry in report["results"]:
        ours, theirs = entry["plain"]["time_to_first_token_ms"], entry["vllm"]["plain_time_to_first_token_ms"]
        table.add(name_workload(entry), ours, theirs, ours / theirs)


def _add_peer_row(table: Table, entry: dict[str, Any], mode: str) -> None:
    theirs = entry.get("vllm", {})
    ours, rate = entry[mode], theirs.get(f"{mode}_tokens_per_s")
    length = theirs.get(f"{mode}_mean_acceptance_length", 1.0)
    table.add(
        name_workload(entry), mode, ours["tokens_per_s"], rate, ours["tokens_per_s"] / rate if rate else None,
        ours["time_to_first_token_ms"], theirs.get(f"{mode}_time_to_first_token_ms"),
        ours["mean_acceptance_length"] if mode == "speculative" else None, length if mode == "speculative" else None,
        ours["round_wall_ms"], 1e3 * entry["rows"] * length / rate if rate else None,
    )  # fmt: skip
