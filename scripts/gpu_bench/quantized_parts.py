"""What weights of fewer bits give: plain decoding of quantized targets beside those of bfloat16.

It knows `trtrun bench`'s JSON. It does not know when it runs.
"""

from __future__ import annotations

from gpu_bench.placements import Placement
from gpu_bench.workbench import Workbench

FP8 = ("--set", "target.quantization=fp8", "--set", "target.dtype=bfloat16")


def play_quantized(bench: Workbench, placement: Placement) -> None:
    """Plain tokens of the 8B and of the 70B shape, and rounds of the 8B shape with its draft."""
    rows = bench.options.scale.rows
    columns = ("weights", "rows", "tokens/s", "ms a token", "÷ bfloat16", "first token ms")
    table = bench.table(f"8B-shaped target, plain: {placement.about}", *columns, "round with a draft of 5, ms")
    base: dict[int, float] = {}
    for name, weights, more in (("8b", "bfloat16", ()), ("8b", "FP8", FP8), ("8b-int4", "4 bits", ())):
        config = bench.config(name, placement)
        for entry in bench.bench(config, rows, *more)["results"]:
            plain, rate = entry["plain"], entry["plain"]["tokens_per_s"]
            base.setdefault(entry["rows"], rate)
            step, first = plain["time_per_output_token_ms"], plain["time_to_first_token_ms"]
            round_ms = entry["speculative"]["round_wall_ms"]
            table.add(weights, entry["rows"], rate, step, rate / base[entry["rows"]], first, round_ms)
    large = bench.table(f"70B-shaped target in 4 bits, plain: {placement.about}", *columns[1:4], columns[5])
    for entry in bench.bench(bench.config("large-int4", placement, drafts=False), rows)["results"]:
        plain = entry["plain"]
        rate, first = plain["tokens_per_s"], plain["time_to_first_token_ms"]
        large.add(entry["rows"], rate, plain["time_per_output_token_ms"], first)
