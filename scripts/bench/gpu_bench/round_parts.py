"""Parts that look at one device's kernels: what each takes in a round, and layers of experts by what they are held in,
and by tiles.

It knows the programs that measure, and their JSON. It does not know when it runs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from scripts.bench.gpu_bench.placements import ONE
from scripts.bench.gpu_bench.workbench import Workbench
from scripts.harness.children import ChildError, last_words, run, started

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
    """Microseconds a layer of experts with other tiles than those that are used, or other steps; on GPUs alone."""
    columns = ("shape", "rows", "µs as it is", "changed", "to", "µs")
    table = bench.table("Layers of experts by tiles", *columns)
    for entry in results_so_far([sys.executable, HERE / "expert_tiles.py"], bench.folder, bench.deadline):
        bench.keep({"report": entry})
        for kind in ("gates", "product", "both"):
            for changed, time in entry.get(kind, ()):
                table.add(entry["shape"], entry["rows"], entry["us"], kind, changed, time)


def results_so_far(words: Sequence[object], folder: Path, deadline: float) -> list[dict[str, Any]]:
    """Objects with rows that a program has written, a line each, by its end or the deadline.

    Raises:
        ChildError: there are none.
    """
    with started(words, folder) as child, suppress(ChildError):
        child.wait(deadline).succeed()
    lines = [line for line in child.output.splitlines() if line.startswith("{") and line.endswith("}")]
    results = [found for found in map(json.loads, lines) if "rows" in found]
    if not results:
        raise ChildError(f"no results: {last_words(child.errors)}")
    return results
