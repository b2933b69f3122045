"""What each kernel of a round takes: `round_kernels.py CONFIG ROWS,ROWS [--max-tokens N] [--set KEY=VALUE]`.

One process, so a target and its draft share a device. Rows decode fresh random prompts, plain and, where the
configuration has a draft, speculative, first without and then with torch's profiler, which sees the kernels of graphs,
too. A kernel that begins before the one in front of it ends counts its waiting as its own, so that times may add up to
more than a round. On CPUs operations of torch stand in kernels' place. The last line is a JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from trtrun import LLM, SamplingParams
from trtrun.configuration.config import load_config
from trtrun.models.config import read_model_config

PROMPT_TOKENS = 32
MOST_NAMED = 24
"""Kernels of a round that are listed; the others are added up."""


def profile_rounds(llm: LLM, prompts: list[list[int]], max_tokens: int, mode: str) -> dict[str, Any]:
    """Rounds of one run: milliseconds of one without a profiler, and its kernels with one.

    Args:
        llm: in this process.
        prompts: fresh ones, as many for the run that is timed as for the one that is profiled.
        max_tokens: of each.
        mode: "plain" or "speculative".
    """
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    llm.set_speculation(mode == "speculative")
    rows = len(prompts) // 2
    llm.reset_statistics()
    times_of_rows = [output.completions[0].statistics for output in llm.generate(prompts[:rows], sampling)]
    first = max(one.first_token or 0.0 for one in times_of_rows)
    seconds = max(one.finished or 0.0 for one in times_of_rows) - first
    round_ms = 1e3 * seconds / max(1, llm.statistics()["num_rounds"] - 1)
    on_gpu = torch.cuda.is_available()
    llm.reset_statistics()
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiled:
        llm.generate(prompts[rows:], sampling)
    rounds = llm.statistics()["num_rounds"]
    times: dict[str, list[float]] = defaultdict(list)
    for event in profiled.events():
        if on_gpu == (event.device_type == torch.autograd.DeviceType.CUDA):
            times[event.name].append(event.time_range.elapsed_us() if on_gpu else event.self_cpu_time_total)
    kernels = [
        {
            "name": name[:60],
            "calls": round(len(taken) / rounds, 2),
            "us_each": round(sum(taken) / len(taken), 2),
            "us_a_round": round(sum(taken) / rounds, 1),
        }
        for name, taken in times.items()
    ]
    kernels.sort(key=lambda kernel: -float(kernel["us_a_round"]))
    return {
        "rows": rows,
        "mode": mode,
        "round_ms": round(round_ms, 4),
        "kernels_ms": round(sum(sum(taken) for taken in times.values()) / rounds / 1e3, 4),
        "launches": round(sum(map(len, times.values())) / rounds, 1),
        "kernels": kernels[:MOST_NAMED],
        "others_us": round(sum(float(kernel["us_a_round"]) for kernel in kernels[MOST_NAMED:]), 1),
    }


def main() -> None:
    """Entry of the program."""
    parser = argparse.ArgumentParser()
    parser.add_argument("config")
    parser.add_argument("rows")
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    parser.add_argument("--max-tokens", type=int, default=32)
    arguments = parser.parse_args()
    config = load_config(arguments.config, arguments.overrides)
    draw, vocabulary = random.Random(1), read_model_config(config.target.model).vocab_size
    modes = ("plain", "speculative") if config.is_speculative else ("plain",)
    with LLM(config=config) as llm:
        results = []
        for rows in map(int, arguments.rows.split(",")):
            for mode in modes:
                prompts = [draw.choices(range(vocabulary), k=PROMPT_TOKENS) for _ in range(2 * rows)]
                results.append(profile_rounds(llm, prompts, arguments.max_tokens, mode))
    print(json.dumps({"results": results}))


if __name__ == "__main__":
    main()
