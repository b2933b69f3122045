"""Parts that look at one device's kernels: what each takes in a round, and layers of experts by what they are held in,
and by tiles.

It knows the programs that measure, and their JSON. It does not know when it runs.
"""

from __future__ import annotations

import sys
from pathlib import Path

from scripts.bench.gpu_bench.placements import ONE
from scripts.bench.gpu_bench.workbench import Workbench
from scripts.harness.children import run

HERE = Path(__file__).resolve().parent
SHOWN = 24
"""Kernels of a round that a table shows; the file of figures has all."""

PROFILED_PAIRS = ("8b", "30b-a3b", "gpt-oss-120b", "27b-states", "35b-a3b", "v2-lite")


def play_round_kernels(bench: Workbench, pair: str) -> None:
    """The kernels of a round of few rows and of many, plain and speculative, the longest first."""
    few, *_, many = bench.options.scale.rows
    sets = [word for override in bench.options.overrides for word in ("--set", override)]
    words = [sys.executable, HERE / "round_kernels.py", bench.config(pair, ONE), f"{few},{many}", *sets]
    report = run(words, bench.folder, bench.deadline).succeed().last_json()
    bench.keep({"pair": pair, **report})
    for entry in report["results"]:
        title = (
            f"{pair}-shaped pair, {entry['mode']}, rows: {entry['rows']}; a round takes {entry['round_ms']:.3f} ms, "
            f"under the profiler {entry['token_us']:.0f} µs: products {entry['products_us']:.0f}, other kernels "
            f"{entry['other_kernels_us']:.0f}, nothing {entry['idle_us']:.0f}; {entry['launches']:.0f} kernels"
        )
        table = bench.table(title, "kernel", "calls", "µs, behind the one before", "in all", "nothing behind it")
        for kernel in entry["kernels"][:SHOWN]:
            times = (kernel[name] for name in ("calls", "us", "running_us", "idle_behind_us"))
            table.add(kernel["name"][:60], *times)


def play_expert_layers(bench: Workbench) -> None:
    """Microseconds a layer of experts, by what they are held in and by rows; on GPUs alone."""
    report = run([sys.executable, HERE / "expert_layers.py"], bench.folder, bench.deadline).succeed().last_json()
    bench.keep({"report": report})
    table = bench.table("Layers of experts", "shape", "held in", "rows", "µs a layer", "TB/s")
    for entry in report["results"]:
        table.add(entry["shape"], entry["form"], entry["rows"], entry["us"], entry["TB/s"])


def play_expert_tiles(bench: Workbench) -> None:
    """Microseconds a layer of experts in bfloat16 with other tiles than those that are used; on GPUs alone."""
    report = run([sys.executable, HERE / "expert_tiles.py"], bench.folder, bench.deadline).succeed().last_json()
    bench.keep({"report": report})
    columns = ("shape", "rows", "µs as it is", "changed", "features x inputs, warps, stages", "µs")
    table = bench.table("Layers of experts by tiles", *columns)
    for entry in report["results"]:
        for kind in ("gates", "product"):
            for features, inputs, warps, stages, time in entry[kind]:
                tile = f"{features} x {inputs}, {warps}, {stages}"
                table.add(entry["shape"], entry["rows"], entry["us"], kind, tile, time)
