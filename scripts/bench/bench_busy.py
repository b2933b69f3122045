#!/usr/bin/env python3
"""Times `trtrun run`, `bench` and `serve` on a quiet machine and beside busy programs, in turns.

    python scripts/bench/bench_busy.py [--ways run,bench,serve] [--placements process,ranks] [--runs 10] [--busy N]
    [--json]

Beside as many busy programs as there are cores, half of the quiet speed is the fair share. "process" is one process
with a thread for each core, "ranks" four MPI ranks of one thread; --config FILE adds a placement of your own. Every run
is a quiet one and then one beside --busy endless loops (default: one for each core that this process may use; `taskset`
holds all of it to some). `run` and `bench` start anew for each; a server stays, and answers one request at a time.
Figures are tokens/s; a ratio is that of a run beside busy programs to the median of the quiet ones. The last line is
JSON. A variable of the environment, such as GOMP_SPINCOUNT, shows what another value gives.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.harness.children import TRTRUN, Ended, run
from scripts.harness.processes import ROOT
from scripts.harness.serving import serve_words, serving
from scripts.harness.trials import exiting_clearly
from trtrun.threads import count_cores

CONFIGS = ROOT / "launch" / "configs"
PLACEMENTS = {"process": CONFIGS / "one_process_cpu.yaml", "ranks": CONFIGS / "cpu_pair.yaml"}
PROMPT = "def main("
LONGEST_RUN_SECONDS = 600.0

Measure = Callable[[], float]


def call(*arguments: object) -> Ended:
    """A trtrun command that ends by itself.

    Raises:
        ChildError: it fails.
    """
    with tempfile.TemporaryDirectory(prefix="bench-busy-") as folder:
        return run([*TRTRUN, *arguments], Path(folder), time.monotonic() + LONGEST_RUN_SECONDS).succeed()


@contextmanager
def run_speed(config: Path, tokens: int) -> Iterator[Measure]:
    """tokens/s of one prompt, as `trtrun run` tells them: loading does not count."""

    def measure() -> float:
        arguments = ("--prompt", PROMPT, "--max-tokens", str(tokens), "--ignore-eos")
        said = call("run", "--config", config, *arguments).stderr
        found = re.search(r"\(([\d.]+) tokens/s\)", said)
        if found is None:
            raise SystemExit(f"trtrun run told no speed:\n{said[-2000:]}")
        return float(found[1])

    yield measure


@contextmanager
def bench_speed(config: Path, tokens: int) -> Iterator[Measure]:
    """Speculative tokens/s of one row, as `trtrun bench` tells them."""

    def measure() -> float:
        arguments = ("--rows", "1", "--repeats", "1", "--seed", "1", "--max-tokens", str(tokens), "--json")
        said = call("bench", "--config", config, *arguments).last_json()
        return float(said["results"][0]["speculative"]["tokens_per_s"])

    yield measure


@contextmanager
def serve_speed(config: Path, tokens: int) -> Iterator[Measure]:
    """tokens/s of one request to a server, from its sending to the end of its answer."""
    with serving(serve_words(config)) as server:
        url = server.addresses.url

        def measure() -> float:
            body = {"model": "target", "prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
            started = time.perf_counter()
            answer = _post(f"{url}/v1/completions", body)
            return int(answer["usage"]["completion_tokens"]) / (time.perf_counter() - started)

        measure()
        yield measure


def _post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    data = json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=LONGEST_RUN_SECONDS) as response:
        return dict(json.load(response))


WAYS = {"run": run_speed, "bench": bench_speed, "serve": serve_speed}


@contextmanager
def busy_programs(count: int) -> Iterator[None]:
    """So many endless loops beside what runs inside."""
    programs = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for program in programs:
            program.kill()
        for program in programs:
            program.wait()


def compare(way: str, placement: str, config: Path, options: argparse.Namespace) -> dict[str, Any]:
    """One way in and placement: quiet runs and runs beside busy programs, in turns."""
    quiet, beside = [], []
    with WAYS[way](config, options.tokens) as measure:
        for _ in range(options.runs):
            quiet.append(measure())
            with busy_programs(options.busy):
                beside.append(measure())
    usual = statistics.median(quiet)
    return {
        "way": way,
        "placement": placement,
        "quiet": [round(speed, 1) for speed in quiet],
        "beside": [round(speed, 1) for speed in beside],
        "median_ratio": round(statistics.median(beside) / usual, 3),
        "least_ratio": round(min(beside) / usual, 3),
    }


def main() -> None:
    """Measure what is asked for; print a line for each, and all of it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", default="run,bench,serve", help="which of run, bench and serve")
    parser.add_argument("--placements", default="process,ranks", help="which of process and ranks")
    parser.add_argument("--config", type=Path, action="append", default=[], help="a placement of your own; may repeat")
    parser.add_argument("--runs", type=int, default=10, help="of each kind")
    parser.add_argument("--tokens", type=int, default=120, help="of each run")
    parser.add_argument("--busy", type=int, default=count_cores(), help="busy programs; default: one for each core")
    parser.add_argument("--json", action="store_true", help="print the JSON line only")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # busy programs end with this one
    placements = {name: PLACEMENTS[name] for name in options.placements.split(",") if name}
    placements |= {path.stem: path.resolve() for path in options.config}
    results = []
    if not options.json:
        print(f"{'':<16}{'quiet':>8}{'least':>8}{'beside':>8}{'least':>8}{'median ratio':>14}{'least ratio':>13}")
    for placement, way in product(placements, options.ways.split(",")):
        with exiting_clearly():
            results.append(result := compare(way, placement, placements[placement], options))
            if not options.json:
                figures = [f(result[kind]) for kind in ("quiet", "beside") for f in (statistics.median, min)]
                line = "".join(f"{figure:>8.0f}" for figure in figures)
                ratios = f"{result['median_ratio']:>14.2f}{result['least_ratio']:>13.2f}"
                print(f"{way + ', ' + placement:<16}{line}{ratios}", flush=True)
    print(json.dumps({"cores": count_cores(), "busy": options.busy, "tokens": options.tokens, "results": results}))


if __name__ == "__main__":
    main()
