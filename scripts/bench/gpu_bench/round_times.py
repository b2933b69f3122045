"""What a plain round of a shape takes, and whether its texts are those of another version:
`round_times.py SHAPE ROWS,ROWS [--repeats N] [--device 0] [--set KEY=VALUE]`.

For trying a change of a kernel: run it with and without, in turns, on one GPU. Weights are made up, and prompts fresh
for each run; both are the same each time, so texts are told by a digest. Such models soon repeat themselves: that is no
proof. One process; medians are of whole runs from the first token on, without a profiler (round_kernels.py has one).
The last line is a JSON object.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from scripts.bench.gpu_bench.models import SHAPES, write_model
from scripts.bench.gpu_bench.round_kernels import PROMPT_TOKENS, time_rounds
from trtrun import LLM, SamplingParams
from trtrun.configuration.config import load_config

MAX_TOKENS, REPEATS = 96, 7


def measure(llm: LLM, rows: int, repeats: int, draw: random.Random, vocabulary: int) -> dict[str, Any]:
    """Milliseconds of a round of so many rows, and the digest of all texts."""
    sampling, times, texts = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True), list[float](), hashlib.sha256()
    for _ in range(repeats):
        prompts = [draw.choices(range(vocabulary), k=PROMPT_TOKENS) for _ in range(rows)]
        round_ms, completions = time_rounds(llm, prompts, sampling)
        times.append(round_ms)
        texts.update(repr([one.token_ids for one in completions]).encode())
    median, least = round(statistics.median(times), 4), round(min(times), 4)
    return {"rows": rows, "round_ms": median, "least_ms": least, "texts": texts.hexdigest()[:16]}


def main(words: Sequence[str] | None = None) -> None:
    """Entry of the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=sorted(SHAPES), metavar="SHAPE", help="as gpu_bench/models.py has them")
    parser.add_argument("rows", help="numbers of rows, by commas")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--device", default="0", help="a GPU's number, or a CPU slot (default: 0)")
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE")
    asked = parser.parse_args(words)
    counts = [int(count) for count in asked.rows.split(",")]
    device = int(asked.device) if asked.device.isdecimal() else asked.device
    with tempfile.TemporaryDirectory(prefix="round-times-") as folder:
        model, path = write_model(Path(folder), asked.shape), Path(folder) / "job.json"
        values = {
            "target": {"model": str(model), "devices": [device], "load_format": "dummy"},
            "scheduler": {"max_batch_size": max(counts)},
            "speculation": {"method": "none"},
        }
        path.write_text(json.dumps(values), encoding="utf-8")
        draw, vocabulary = random.Random(1), SHAPES[asked.shape].vocabulary
        with LLM(config=load_config(path, asked.overrides)) as llm:
            results = []
            for rows in counts:
                results.append(measure(llm, rows, asked.repeats, draw, vocabulary))
                print(json.dumps(results[-1]), flush=True)
    print(json.dumps({"shape": asked.shape, "results": results}))


if __name__ == "__main__":
    main()
