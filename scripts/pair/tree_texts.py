#!/usr/bin/env python3
"""Counts texts of draft trees that are plain decoding's, to the token: `ngram` with several paths beside no drafts.

    python scripts/pair/tree_texts.py [--devices cuda:0[,cuda:1]] [--rows 64] [--max-tokens 100] [--max-paths 4] [--seed
    7]

Two `trtrun run`s of the shipped target over the same rows, greedy and at temperature 0.8 by seed, prompts of code of
mixed lengths. What followed a row's last tokens before is proposed along several paths at once, right and wrong ones.
--devices is the target's, several share it by tensor parallelism. The last line is JSON. Exit status 1 where a text
differs. TRTRUN_MAX_CPU_ISA=avx2 has it all computed as on a processor with less.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
STARTS = (
    "def main(",
    "import os\n",
    "class Node:\n    def __init__(self",
    "for i in range(",
    "# Reads a file\n",
    "try:\n",
)
LONGEST_RUN_SECONDS = 900.0
MOST_ROWS = 32


def write_rows(path: Path, count: int, max_tokens: int, seed: int) -> None:
    """Prompts that end anywhere in code that repeats itself; every other row is sampled."""
    chance, rows = random.Random(seed), []
    for index in range(count):
        lines = [f"    self.{chance.choice('abcd')} = {chance.choice('abcd')}\n" for _ in range(chance.randint(0, 40))]
        values: dict[str, Any] = {"prompt": chance.choice(STARTS) + "".join(lines), "max_tokens": max_tokens}
        values |= {"temperature": 0.8, "top_p": 0.95} if index % 2 else {"temperature": 0}
        rows.append({**values, "seed": index, "ignore_eos": True})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def run(folder: Path, rows: Path, name: str, speculation: dict[str, Any], devices: list[str]) -> list[Any]:
    """Token ids of each row, and what the run says of its drafts. Rounds have room for all rows' trees."""
    output = folder / f"{name}.jsonl"
    config = folder / f"{name}.yaml"
    target = {"model": "asset:target", "devices": devices, "dtype": "bfloat16"}
    verified = MOST_ROWS * (1 + speculation.get("max_paths", 1) * speculation.get("draft_len", 1))
    scheduler = {"max_batch_size": MOST_ROWS, "max_num_tokens": max(2048, verified)}
    values = {"target": target, "speculation": speculation, "scheduler": scheduler}
    config.write_text(json.dumps(values), encoding="utf-8")
    command = [sys.executable, "-m", "launch.cli", "run", "--config", config, "--prompts", rows, "--output", output]
    done = subprocess.run(
        list(map(str, command)), cwd=ROOT, capture_output=True, text=True, timeout=LONGEST_RUN_SECONDS
    )
    if done.returncode:
        raise SystemExit(f"the run {name} ended with status {done.returncode}:\n{done.stderr[-2000:]}")
    found = sorted(map(json.loads, output.read_text(encoding="utf-8").splitlines()), key=lambda row: row["index"])
    return found


def main() -> int:
    """Run both, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="cpu:0")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=100)
    parser.add_argument("--max-paths", type=int, default=4)
    parser.add_argument("--draft-len", type=int, default=5)
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    devices = options.devices.split(",")
    trees = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 4, "pacing": "fixed"}
    trees |= {"max_paths": options.max_paths, "draft_len": options.draft_len}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = folder / "rows.jsonl"
        write_rows(rows, options.rows, options.max_tokens, options.seed)
        plain = run(folder, rows, "plain", {"method": "none"}, devices)
        found = run(folder, rows, "trees", trees, devices)
    same = [one["token_ids"] == other["token_ids"] for one, other in zip(plain, found, strict=True)]
    result = {
        "devices": devices,
        "greedy": f"{sum(same[::2])} of {len(same[::2])}",
        "sampled": f"{sum(same[1::2])} of {len(same[1::2])}",
        "accepted": sum(row.get("num_accepted_draft_tokens", 0) for row in found),
    }
    print(json.dumps(result))
    return 0 if all(same) else 1


if __name__ == "__main__":
    sys.exit(main())
