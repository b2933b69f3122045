"""What each kernel of a round takes:
`round_kernels.py CONFIG ROWS,ROWS [--prompt-tokens N] [--max-tokens N] [--set KEY=VALUE]`.

One process, so a target and its draft share a device. Rows decode fresh random prompts, plain and, where the
configuration has a draft, speculative, first without and then with torch's profiler, which sees the kernels of graphs,
too. Long prompts with one token each tell of chunks of prompts. A moment is that kernel's which began first
(kernel_sweep.py). On CPUs operations of torch stand in kernels' place. The last line is a JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from scripts.bench.gpu_bench.kernel_times import describe, read_kernels
from trtrun import LLM, SamplingParams
from trtrun.configuration.config import load_config
from trtrun.core.outputs import CompletionOutput
from trtrun.models.config import read_model_config

PROMPT_TOKENS = 32


def last_first_token(completions: list[CompletionOutput]) -> float:
    """When the last row of a run had its first token."""
    return max(one.statistics.first_token or 0.0 for one in completions)


def time_rounds(llm: LLM, prompts: list[list[int]], sampling: SamplingParams) -> tuple[float, list[CompletionOutput]]:
    """Milliseconds of a round of one run, from its last first token on; and what was completed."""
    llm.reset_statistics()
    completions = [output.completions[0] for output in llm.generate(prompts, sampling)]
    first = last_first_token(completions)
    seconds = max(one.statistics.finished or 0.0 for one in completions) - first
    return 1e3 * seconds / max(1, llm.statistics()["num_rounds"] - 1), completions


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
    round_ms, completions = time_rounds(llm, prompts[:rows], sampling)
    first_token_ms = round(1e3 * (last_first_token(completions) - completions[0].statistics.arrival), 2)
    on_gpu = torch.cuda.is_available()
    llm.reset_statistics()
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiled:
        llm.generate(prompts[rows:], sampling)
    rounds = llm.statistics()["num_rounds"]
    kernels = read_kernels(profiled, on_gpu)
    window = {"start": min(one.start for one in kernels), "end": max(one.end for one in kernels), "tokens": rounds}
    launches = round(len(kernels) / rounds, 1)
    found = describe(kernels, window)
    times = {"round_ms": round(round_ms, 4), "first_token_ms": first_token_ms}
    return {"rows": rows, "mode": mode, **times, "launches": launches, **found}


def main() -> None:
    """Entry of the program."""
    parser = argparse.ArgumentParser()
    parser.add_argument("config")
    parser.add_argument("rows")
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    parser.add_argument("--prompt-tokens", type=int, default=PROMPT_TOKENS)
    parser.add_argument("--max-tokens", type=int, default=32)
    arguments = parser.parse_args()
    config = load_config(arguments.config, arguments.overrides)
    draw, vocabulary = random.Random(1), read_model_config(config.target.model).vocab_size
    modes = ("plain", "speculative") if config.is_speculative else ("plain",)
    with LLM(config=config) as llm:
        results = []
        for rows in map(int, arguments.rows.split(",")):
            for mode in modes:
                prompts = [draw.choices(range(vocabulary), k=arguments.prompt_tokens) for _ in range(2 * rows)]
                results.append(profile_rounds(llm, prompts, arguments.max_tokens, mode))
    print(json.dumps({"results": results}))


if __name__ == "__main__":
    main()
