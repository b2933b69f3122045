"""What the µs of a token over two GPUs are, and what ranks send each other for a layer of experts.

It knows the JSON of kernel_times.py and exchange_times.py. It does not know when it runs.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from scripts.bench.gpu_bench.cut_parts import BOTH
from scripts.bench.gpu_bench.placements import ONE
from scripts.bench.gpu_bench.workbench import Workbench
from scripts.harness.children import run

_PROGRAM = "scripts.bench.gpu_bench.{}"
SHOWN = 14
"""Kernels of a rank that a table shows; the file of figures has all."""


def play_kernels(bench: Workbench) -> None:
    """The 8B shape, plain, one row, on one device and over two: µs a token of products, of each other kernel, and of
    nothing. Times are the profiler's, which makes a token a little longer."""
    total = bench.table(
        "8B-shaped target, plain, one row: µs a token", "way", "rank", "token", "products", "other kernels", "nothing"
    )
    columns = ("way", "rank", "kernel", "product", "calls a token", "µs a token, behind the one before", "in all")
    kernels = bench.table("The same by kernel", *columns, "nothing behind it")
    for way, placement in (("one device", ONE), ("TP 2", BOTH)):
        for found in _profile(bench, way.replace(" ", "-"), bench.config("8b", placement, drafts=False)):
            bench.keep({"way": way, **found})
            parts = (found[name] for name in ("token_us", "products_us", "other_kernels_us", "idle_us"))
            total.add(way, found["rank"], *parts)
            for kernel in found["kernels"][:SHOWN]:
                times = (kernel[name] for name in ("calls", "us", "running_us", "idle_behind_us"))
                kernels.add(way, found["rank"], kernel["name"][:60], kernel["is_product"], *times)


def _profile(bench: Workbench, name: str, config: object) -> list[dict[str, Any]]:
    """What each rank with a device says."""
    folder = bench.folder / f"kernels-{name}"
    folder.mkdir()
    words = [sys.executable, "-m", _PROGRAM.format("kernel_times"), config, folder, bench.options.scale.max_tokens]
    run(words, bench.folder, bench.deadline).succeed()
    return [json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("rank-*.json"))]


def play_exchange(bench: Workbench) -> None:
    """What each rank sends for a layer of the 30B-A3B shape, and whole layers cut both ways; on GPUs in graphs."""
    pair, scale = bench.pair("30b-a3b"), bench.options.scale
    config = bench.config("30b-a3b", BOTH, drafts=False)
    rows = ",".join(map(str, (*scale.rows, scale.most_rows)))
    words = [sys.executable, "-m", _PROGRAM.format("exchange_times"), config, pair.target, rows]
    report = run(words, bench.folder, bench.deadline).succeed().last_json()
    bench.keep({"report": report})
    names = list(report["results"][0]["us"])
    table = bench.table(f"A layer of experts, {pair.target}-shaped, µs: {BOTH.about}", "rows", *names)
    for entry in report["results"]:
        table.add(entry["rows"], *(entry["us"][name] for name in names))
