"""Times rows that decode behind long prompts, and nothing else: `long_rows.py CONFIG ROWSxTOKENS… [--set KEY=VALUE]`.

Prompts are computed first, for a token each. Then they are found in the KV store again, so that all rows begin at once:
what is timed is decoding alone, as `trtrun bench` cannot. A program of its own, so that what it takes of a GPU is free
again afterwards; its last line is a JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from trtrun import LLM, SamplingParams
from trtrun.configuration.config import load_config
from trtrun.models.config import read_model_config

REPEATS = 3


def time_rows(llm: LLM, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
    """Decoding of `prompts`: median of some runs, and what computing the prompts took."""
    started = time.monotonic()
    llm.generate(prompts, SamplingParams(max_tokens=1, ignore_eos=True))
    prompts_s, steps = time.monotonic() - started, []
    for _ in range(REPEATS):
        outputs = llm.generate(prompts, SamplingParams(max_tokens=max_tokens + 1, ignore_eos=True))
        times = [output.completions[0].statistics for output in outputs]
        first = max(one.first_token or 0.0 for one in times)
        steps.append((max(one.finished or 0.0 for one in times) - first) / max_tokens)
    step = statistics.median(steps)
    return {
        "rows": len(prompts),
        "prompt_tokens": len(prompts[0]),
        "prompts_s": round(prompts_s, 3),
        "step_ms": round(1e3 * step, 4),
        "step_ms_runs": [round(1e3 * one, 4) for one in steps],
        "tokens_per_s": round(len(prompts) / step, 2),
    }


def main() -> None:
    """Entry of the program."""
    parser = argparse.ArgumentParser()
    parser.add_argument("config")
    parser.add_argument("workloads", nargs="+")
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    parser.add_argument("--max-tokens", type=int, default=128)
    arguments = parser.parse_args()
    config = load_config(arguments.config, arguments.overrides)
    draw, vocabulary = random.Random(1), read_model_config(config.target.model).vocab_size
    with LLM(config=config) as llm:
        results = []
        for workload in arguments.workloads:
            rows, tokens = map(int, workload.split("x"))
            prompts = [draw.choices(range(vocabulary), k=tokens) for _ in range(rows)]
            results.append(time_rows(llm, prompts, arguments.max_tokens))
        report = llm.report.ranks[0]
    print(json.dumps({"results": results, "kv_tokens": report.kv_tokens, "kv_bytes": report.kv_bytes}))


if __name__ == "__main__":
    main()
