#!/usr/bin/env python3
"""What the way through `trtrun serve` costs: tokens a second and time to the first token, against the Python API.

    python scripts/bench_serve.py --config run.yaml [--streams 1,16] [--max-tokens 128] [--repeats 3]

The configuration has one slot: the same models are measured behind the server, and then by `LLM.generate` in this
process. Prompts are the same texts, greedy. Medians over the repeats; the last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path

import httpx

from trtrun import LLM, SamplingParams, load_config
from trtrun.config import ASSETS

READY = re.compile(r"trtrun: (\S+) is served at (\S+), metrics at")
PATIENCE = 600.0
Measured = dict[int, tuple[float, float]]
"""By numbers of streams: tokens a second over all, and the median of their seconds to the first token."""


def read_prompts(count: int) -> list[str]:
    """Texts that neither model of the shipped pair has seen in training; from the first again where they are few."""
    record = json.loads((ASSETS / "heldout.json").read_text(encoding="utf-8"))
    return [entry["text"] for entry, _ in zip(cycle(record["prompts"]), range(count), strict=False)]


def medians(results: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Of rates and times, each by itself."""
    rates, firsts = zip(*results, strict=True)
    return statistics.median(rates), statistics.median(firsts)


async def measure_server(url: str, model: str, options: argparse.Namespace) -> Measured:
    """Through the server."""
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE, limits=httpx.Limits(max_connections=None)) as client:

        async def read(prompt: str, max_tokens: int) -> tuple[int, float]:
            body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
            body |= {"stream": True, "return_token_ids": True}
            began, total, first = time.perf_counter(), 0, 0.0
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                answer.raise_for_status()
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        first = first or time.perf_counter() - began
                        total += len(json.loads(line.removeprefix("data: "))["choices"][0]["token_ids"])
            return total, first

        async def run(num_streams: int, max_tokens: int) -> tuple[float, float]:
            began = time.perf_counter()
            read_all = await asyncio.gather(*(read(prompt, max_tokens) for prompt in read_prompts(num_streams)))
            totals, firsts = zip(*read_all, strict=True)
            return sum(totals) / (time.perf_counter() - began), statistics.median(firsts)

        found = {}
        for num_streams in options.streams:
            await run(num_streams, 8)
            found[num_streams] = medians([await run(num_streams, options.max_tokens) for _ in range(options.repeats)])
        return found


def measure_here(llm: LLM, options: argparse.Namespace) -> Measured:
    """In this process."""

    def run(num_streams: int, max_tokens: int) -> tuple[float, float]:
        began = time.perf_counter()
        outputs = llm.generate(read_prompts(num_streams), SamplingParams(max_tokens=max_tokens, ignore_eos=True))
        seconds = time.perf_counter() - began
        completions = [completion for output in outputs for completion in output.completions]
        firsts = [(item.statistics.first_token or 0.0) - item.statistics.arrival for item in completions]
        return sum(len(item.token_ids) for item in completions) / seconds, statistics.median(firsts)

    found = {}
    for num_streams in options.streams:
        run(num_streams, 8)
        found[num_streams] = medians([run(num_streams, options.max_tokens) for _ in range(options.repeats)])
    return found


def with_server(options: argparse.Namespace) -> Measured:
    """Start a server, measure through it, end it."""
    command = [sys.executable, "-m", "launch.cli", "serve", "--config", str(options.config)]
    command += ["--http-port", "0", "--metrics-port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            for line in process.stderr:
                if ready := READY.match(line):
                    return asyncio.run(measure_server(ready[2], ready[1], options))
                print(line, end="", file=sys.stderr)
            sys.exit("bench_serve.py: the server did not start")
        finally:
            process.terminate()


def main() -> None:
    """Measure both, and tell."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--streams", type=lambda text: [int(part) for part in text.split(",")], default=[1, 16])
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    served = with_server(options)
    with LLM(config=load_config(options.config)) as llm:
        here = measure_here(llm, options)
    rows = []
    for num_streams in options.streams:
        (rate, first), (own_rate, own_first) = served[num_streams], here[num_streams]
        rows.append(
            {
                "streams": num_streams,
                "served_tokens_per_s": round(rate, 1),
                "in_process_tokens_per_s": round(own_rate, 1),
                "ratio": round(rate / own_rate, 3),
                "added_time_to_first_token_ms": round(1000 * (first - own_first), 2),
            }
        )
        print(f"{num_streams} streams: {rows[-1]}")
    print(json.dumps({"max_tokens": options.max_tokens, "repeats": options.repeats, "rows": rows}))


if __name__ == "__main__":
    main()
