"""What weights of fewer bits give, and keys and values of fewer: plain decoding beside that in bfloat16.

It knows `trtrun bench`'s JSON, and that of long_rows.py. It does not know when it runs.
"""

from __future__ import annotations

import sys
from pathlib import Path

from scripts.bench.gpu_bench.placements import Placement
from scripts.bench.gpu_bench.workbench import Workbench
from scripts.harness.children import run

LONG_ROWS = Path(__file__).resolve().parent / "long_rows.py"
WORKLOADS = {"cuda": ("32x8000", "1x8000"), "cpu": ("2x96", "1x96")}

HELD = {
    name: ("--set", f"target.quantization={name}", "--set", "target.dtype=bfloat16") for name in ("fp8", "fp8_block")
}


def play_quantized(bench: Workbench, placement: Placement) -> None:
    """Plain tokens of the 8B and of the 70B shape, and rounds of the 8B shape with its draft."""
    rows = bench.options.scale.rows
    columns = ("weights", "rows", "tokens/s", "ms a token", "÷ bfloat16", "first token ms")
    table = bench.table(f"8B-shaped target, plain: {placement.about}", *columns, "round with a draft of 5, ms")
    base: dict[int, float] = {}
    kinds = (("8b", "bfloat16", ()), ("8b", "FP8", HELD["fp8"]), ("8b", "FP8 in blocks", HELD["fp8_block"]))
    for name, weights, more in (*kinds, ("8b-int4", "4 bits", ())):
        config = bench.config(name, placement)
        for entry in bench.bench(config, rows, *more)["results"]:
            plain, rate = entry["plain"], entry["plain"]["tokens_per_s"]
            base.setdefault(entry["rows"], rate)
            step, first = plain["time_per_output_token_ms"], plain["time_to_first_token_ms"]
            round_ms = entry["speculative"]["round_wall_ms"]
            table.add(weights, entry["rows"], rate, step, rate / base[entry["rows"]], first, round_ms)
    large = bench.table(f"70B-shaped target, plain: {placement.about}", *columns[:4], "÷ FP8", columns[5])
    base = {}
    for name, weights, more in (
        ("70b", "FP8", HELD["fp8"]), ("70b", "FP8 in blocks", HELD["fp8_block"]), ("large-int4", "4 bits", ()),
    ):  # fmt: skip
        for entry in bench.bench(bench.config(name, placement, drafts=False), rows, *more)["results"]:
            plain, rate = entry["plain"], entry["plain"]["tokens_per_s"]
            base.setdefault(entry["rows"], rate)
            first = plain["time_to_first_token_ms"]
            step, ratio = plain["time_per_output_token_ms"], rate / base[entry["rows"]]
            large.add(weights, entry["rows"], rate, step, ratio, first)


def play_quantized_kv(bench: Workbench, placement: Placement, pair: str) -> None:
    """Plain steps of a pair's target over long contexts, by how keys and values, or latents, are kept; the figures have
    the ratios."""
    workloads = WORKLOADS[bench.options.kind]
    columns = ("kept as", "rows", "tokens of each", "tokens/s", "ms a step", "÷ plain", "prompts, s", "KiB a token")
    table = bench.table(f"{pair}-shaped target, kept plain and in 8 bits: {placement.about}", *columns)
    longest = max(int(workload.split("x")[1]) for workload in workloads)
    sets = [f"scheduler.max_seq_len={longest + 192}", *bench.options.overrides]
    base: dict[int, float] = {}
    for name in ("plain", "fp8", "int8"):
        config = bench.config(pair, placement, drafts=False)
        words = [sys.executable, LONG_ROWS, config, *workloads, "--max-tokens", bench.options.scale.max_tokens]
        for override in (*sets, f"kv_cache.dtype={name}"):
            words += ["--set", override]
        report = run(words, bench.folder, bench.deadline).succeed().last_json()
        token_kib = report["kv_bytes"] / report["kv_tokens"] / 1024
        for entry in report["results"]:
            rows, rate = entry["rows"], entry["tokens_per_s"]
            entry["ratio"] = round(rate / base.setdefault(rows, rate), 4)
            cells = (rate, entry["step_ms"], entry["ratio"], entry["prompts_s"], token_kib)
            table.add(name, rows, entry["prompt_tokens"], *cells)
        bench.keep({"kv_cache": name, **report})
