#!/usr/bin/env python3
"""What the way through `trtrun serve` costs, with models and without.

    python scripts/bench/bench_serve.py --config run.yaml [--parts models,front] [--streams 1,16,64] [--max-tokens 128]
        [--repeats 5] [--bursts 8] [--warm-up-seconds 10] [--set KEY=VALUE]

`models`: tokens a second and time to the first token through the server, against `LLM.generate` in one process. The
configuration has one slot. In a burst all streams ask for their texts at once, greedy; `LLM.generate` has the same
texts in one call. A repeat is --bursts of these one after the other without a pause, on both sides: the next one begins
when the slowest stream has its last token. Its tokens a second are those of all bursts over the whole time. The time to
the first token is the median over all requests: from the sending of a request, and from the call of `LLM.generate`
until the engine core hands its first tokens over; both have to make tokens of texts. Between repeats the clients count
what they have got, and the server rests for so long.

`front`: the front with an engine that computes nothing (bench_serve_engine.py): requests a second, and what streams
cost it at rounds of 2 ms.

Clients (bench_serve_client.py) have a process of their own and parse nothing while they are timed; `client_cpu` says
how much of the time it was at work. CPU seconds of front and engine are of their processes, user and system: on a busy
machine they say more than times. Medians over the repeats; the last line is JSON. On a GPU the first rounds of a shape
compile kernels and capture graphs, and streams meet more shapes than a batch: for --warm-up-seconds nothing is counted,
on both sides. -v tells every repeat.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.harness.processes import cpu_seconds
from scripts.harness.serving import Served, serve_words, serving
from scripts.harness.trials import exiting_clearly
from trtrun import LLM, SamplingParams, load_config
from trtrun.configuration.model_paths import ASSETS
from trtrun.core.outputs import CompletionDelta, RequestId

SCRIPTS = Path(__file__).resolve().parent
FRONT_CONNECTIONS = 32
REQUESTS_EACH = 50
ROUND_MS = 2.0
TOKENS_PER_ROUND = 2


def read_prompts(count: int) -> list[str]:
    """Texts that neither model of the shipped pair has seen in training; from the first again where they are few."""
    record = json.loads((ASSETS / "heldout.json").read_text(encoding="utf-8"))
    return [entry["text"] for entry, _ in zip(cycle(record["prompts"]), range(count), strict=False)]


class Clients:
    """A process that reads streams, all at once."""

    def __init__(self, server: Served, num_streams: int, process: subprocess.Popen[str]) -> None:
        self._server = server
        self._num_streams = num_streams
        self._process = process

    @classmethod
    @contextmanager
    def started(cls, server: Served, num_streams: int) -> Iterator[Clients]:
        """With a process for these streams, which ends afterwards."""
        script = [sys.executable, str(SCRIPTS / "bench_serve_client.py")]
        url = urlsplit(server.addresses.url)
        words = [*script, str(url.hostname), str(url.port), server.addresses.model, str(num_streams)]
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            yield cls(server, num_streams, process)

    def measure(self, max_tokens: int, bursts: int = 1, requests: int = 1) -> dict[str, float]:
        """So many bursts, in each of which every stream asks so many times, one after the other."""
        assert self._process.stdin is not None and self._process.stdout is not None
        order = {"prompts": read_prompts(self._num_streams), "max_tokens": max_tokens}
        front, engine = self._server.cpu_seconds()
        self._process.stdin.write(json.dumps(order | {"bursts": bursts, "requests": requests}) + "\n")
        self._process.stdin.flush()
        told = json.loads(self._process.stdout.readline() or sys.exit("bench_serve.py: a client has failed"))
        front_after, engine_after = self._server.cpu_seconds()
        seconds, tokens, chunks = told["seconds"], told["tokens"], told["chunks"]
        return {
            "seconds": seconds,
            "tokens_per_s": tokens / seconds,
            "requests_per_s": len(told["firsts"]) / seconds,
            "first_token_ms": 1000 * statistics.median(told["firsts"]),
            "chunks_per_s": chunks / seconds,
            "tokens_per_chunk": tokens / chunks,
            "client_cpu": told["cpu_s"] / seconds,
            "front_cpu_s": front_after - front,
            "engine_cpu_s": engine_after - engine,
            "front_cpu_us_per_chunk": 1e6 * (front_after - front) / chunks,
            "front_cpu_ms_per_1000_tokens": 1e6 * (front_after - front) / tokens,
            "engine_cpu_ms_per_1000_tokens": 1e6 * (engine_after - engine) / tokens,
        }


def medians(results: Sequence[dict[str, float]]) -> dict[str, float]:
    """The median of each figure by itself."""
    return {name: statistics.median(result[name] for result in results) for name in results[0]}


def measure_clients(
    server: Served, num_streams: int, options: argparse.Namespace, max_tokens: int, bursts: int = 1, requests: int = 1
) -> dict[str, float]:
    """Medians over the repeats, behind those that are not counted; clients of their own."""
    with Clients.started(server, num_streams) as clients:
        return counted(f"{num_streams} streams", lambda: clients.measure(max_tokens, bursts, requests), options)


def counted(what: str, run: Callable[[], dict[str, float]], options: argparse.Namespace) -> dict[str, float]:
    """Medians over the runs that count, behind those that warm up; tells all of them where that is asked for."""
    began = time.perf_counter()
    warm = [run()]
    while time.perf_counter() - began < options.warm_up_seconds:
        warm.append(run())
    results = [run() for _ in range(options.repeats)]
    if options.verbose:
        for name in ("first_token_ms", "tokens_per_s"):
            told = [[round(item[name], 1) for item in runs] for runs in (warm, results)]
            print(f"{what}, {name} while warming up: {told[0]}, then {told[1]}", flush=True)
    return medians(results)


class FirstTokens:
    """When the first tokens of requests leave the engine core of an LLM, as a program that streams would have them.

    Attributes:
        seconds: from the call, of every request so far.
    """

    def __init__(self, llm: LLM) -> None:
        self.seconds: list[float] = []
        self._step = llm.engine.step
        self._asked = 0.0
        self._num_expected = 0
        self._seen: set[RequestId] = set()
        llm.engine.step = self._look  # type: ignore[method-assign]

    def expect(self, num_requests: int) -> None:
        """So many requests are asked for now."""
        self._num_expected, self._asked = num_requests, time.perf_counter()
        self._seen.clear()

    def _look(self) -> list[CompletionDelta]:
        deltas = self._step()
        if len(self._seen) < self._num_expected:
            now = time.perf_counter()
            new = {delta.request_id for delta in deltas} - self._seen
            self._seen |= new
            self.seconds += [now - self._asked] * len(new)
        return deltas


def measure_here(llm: LLM, firsts: FirstTokens, num_streams: int, options: argparse.Namespace) -> dict[str, float]:
    """By the Python API, in this process."""

    prompts = read_prompts(num_streams)
    sampling = SamplingParams(max_tokens=options.max_tokens, ignore_eos=True)

    def run() -> dict[str, float]:
        firsts.seconds.clear()
        before, began = cpu_seconds(os.getpid()), time.perf_counter()
        outputs = []
        for _ in range(options.bursts):
            firsts.expect(num_streams)
            outputs += llm.generate(prompts, sampling)
        seconds, cpu = time.perf_counter() - began, cpu_seconds(os.getpid()) - before
        tokens = sum(len(completion.token_ids) for output in outputs for completion in output.completions)
        return {
            "tokens_per_s": tokens / seconds,
            "first_token_ms": 1000 * statistics.median(firsts.seconds),
            "cpu_ms_per_1000_tokens": 1e6 * cpu / tokens,
        }

    return counted(f"{num_streams} prompts in this process", run, options)


def bench_models(options: argparse.Namespace) -> list[dict[str, float]]:
    """Through the server, and then in this process."""
    settings = [word for setting in options.set for word in ("--set", setting)]
    with serving(serve_words(options.config, *settings)) as server:
        served = {
            count: measure_clients(server, count, options, options.max_tokens, options.bursts)
            for count in options.streams
        }
    with LLM(config=load_config(options.config, options.set)) as llm:
        firsts = FirstTokens(llm)
        here = {count: measure_here(llm, firsts, count, options) for count in options.streams}
    rows = []
    for count in options.streams:
        through, own = served[count], here[count]
        rows.append(
            {
                "streams": count,
                "served_tokens_per_s": through["tokens_per_s"],
                "in_process_tokens_per_s": own["tokens_per_s"],
                "ratio": through["tokens_per_s"] / own["tokens_per_s"],
                "served_first_token_ms": through["first_token_ms"],
                "added_time_to_first_token_ms": through["first_token_ms"] - own["first_token_ms"],
                "in_process_cpu_ms_per_1000_tokens": own["cpu_ms_per_1000_tokens"],
                **_some(through, "engine_cpu_ms_per_1000_tokens", "front_cpu_us_per_chunk", "tokens_per_chunk"),
                **_some(through, "client_cpu"),
            }
        )
        tell("models", rows[-1])
    return rows


def bench_front(options: argparse.Namespace) -> dict[str, Any]:
    """The front with an engine that computes nothing."""
    script = [sys.executable, SCRIPTS / "bench_serve_engine.py", options.config]
    with serving([*script, 0, 1]) as server:
        found = measure_clients(server, FRONT_CONNECTIONS, options, max_tokens=16, requests=REQUESTS_EACH)
        requests = _some(found, "requests_per_s", "first_token_ms", "client_cpu")
        per_request = 1000 / (FRONT_CONNECTIONS * REQUESTS_EACH)
        requests |= {
            "connections": FRONT_CONNECTIONS,
            "front_cpu_ms_per_request": found["front_cpu_s"] * per_request,
        }
        tell("front, requests", requests)
    rows = []
    with serving([*script, ROUND_MS, TOKENS_PER_ROUND]) as server:
        for count in options.streams:
            found = measure_clients(server, count, options, max_tokens=1000)
            rows.append(
                {
                    "streams": count,
                    **_some(found, "tokens_per_s", "chunks_per_s", "tokens_per_chunk", "first_token_ms", "client_cpu"),
                    "front_cpu_ms_per_1000_deltas": found["front_cpu_ms_per_1000_tokens"] * TOKENS_PER_ROUND,
                    **_some(found, "front_cpu_us_per_chunk"),
                    "front_cpu": found["front_cpu_s"] / found["seconds"],
                }
            )
            tell("front, rounds", rows[-1])
    return {"requests": requests, "round_ms": ROUND_MS, "tokens_per_round": TOKENS_PER_ROUND, "rows": rows}


def tell(part: str, row: dict[str, float]) -> None:
    """One line of figures."""
    print(f"{part}: " + ", ".join(f"{name} {value:.4g}" for name, value in row.items()), flush=True)


def main() -> None:
    """Measure what is asked for, and tell."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--parts", type=lambda text: text.split(","), default=["models", "front"])
    parser.add_argument("--streams", type=lambda text: [int(part) for part in text.split(",")], default=[1, 16, 64])
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--bursts", type=int, default=8)
    parser.add_argument("--warm-up-seconds", type=float, default=10.0)
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("-v", "--verbose", action="store_true")
    options = parser.parse_args()
    told: dict[str, Any] = {"max_tokens": options.max_tokens, "warm_up_seconds": options.warm_up_seconds}
    told |= {"repeats": options.repeats, "bursts": options.bursts}
    with exiting_clearly():
        if "models" in options.parts:
            told["models"] = bench_models(options)
        if "front" in options.parts:
            told["front"] = bench_front(options)
    print(json.dumps(_rounded(told)))


def _some(figures: dict[str, float], *names: str) -> dict[str, float]:
    return {name: figures[name] for name in names}


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


if __name__ == "__main__":
    main()
