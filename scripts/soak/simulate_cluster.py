#!/usr/bin/env python3
"""The scheduler's own code under a cluster's load, without models: how long first tokens take, what gives way first.

    python scripts/soak/simulate_cluster.py [--servers 1,8,64,512] [--loads 0.75] [--seconds 60] [--max-waiting 64]

Each server of 8 GPUs is a scheduler and a pacer of the product, in simulated time: rounds take what such rounds were
measured to take (simulated_cluster/server.py), requests have the shape of a public trace, and a router sends them to
servers by a hash of their conversation (simulated_cluster/load.py). `--loads 1` gives each server as many requests a
second as the whole trace has. Requests come for `--seconds`; those of the first sixth are not counted. Servers share
this machine's cores. The same seed has the same result, but for `host_ms_a_round`. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.soak.simulated_cluster.load import RATE, Arrival, make_arrivals, route
from scripts.soak.simulated_cluster.server import KV_TOKENS, ServerResult, ServerSetup, SimulatedServer

PERCENTILES = (50, 90, 99)


def serve(setup: ServerSetup, server: tuple[int, Sequence[Arrival]]) -> ServerResult:
    """One server's part, by its number and requests."""
    number, arrivals = server
    return SimulatedServer(setup, arrivals, seed=number).run()


def simulate(num_servers: int, load: float, setup: ServerSetup, seed: int, processes: int) -> dict[str, Any]:
    """A cluster that is given `load` times the trace's rate for each server; returns what came of it."""
    seconds = setup.seconds
    arrivals = make_arrivals(RATE * load * num_servers, seconds, seed)
    routed = list(enumerate(route(arrivals, num_servers)))
    started = time.monotonic()
    if min(num_servers, processes) > 1:
        # Forked, each child would have the threads' locks of this process, and torch's.
        with multiprocessing.get_context("spawn").Pool(min(num_servers, processes)) as pool:
            results = pool.map(partial(serve, setup), routed, chunksize=1)
    else:
        results = [serve(setup, server) for server in routed]
    return {
        "servers": num_servers,
        "load": load,
        "seconds": seconds,
        "requests": len(arrivals),
        **summarize(results, seconds),
        "skew_of_requests": _skew([len(requests) for _, requests in routed]),
        "skew_of_tokens": _skew([sum(one.num_prompt_tokens + one.num_output_tokens for one in of) for _, of in routed]),
        "wall_s": round(time.monotonic() - started, 1),
    }


def summarize(results: Sequence[ServerResult], seconds: float) -> dict[str, Any]:
    """All servers' results together; what is said of servers is of the worst."""
    first = [value for result in results for value in result.first_token_s]
    speeds = [value for result in results for value in result.tokens_per_s]
    medians = [statistics.median(result.first_token_s) for result in results if result.first_token_s]
    rounds = sum(result.num_rounds for result in results)
    prompt_tokens = sum(result.num_prompt_tokens for result in results)
    return {
        "first_token_s": _percentiles(first),
        "tokens_per_s": _percentiles(speeds, falling=True),
        "tokens_per_s_of_all": round(sum(result.num_tokens / max(seconds, result.ended) for result in results)),
        "refused": sum(result.num_refused for result in results),
        "reused_share": round(sum(result.num_reused for result in results) / max(1, prompt_tokens), 3),
        "rows_taken_back": sum(result.num_preemptions for result in results),
        "most_waiting": max(result.most_waiting for result in results),
        "most_blocks": max(result.most_blocks for result in results),
        "worst_median_first_token_s": round(max(medians, default=0.0), 3),
        "most_pieces_a_second": round(max(result.num_pieces / max(seconds, result.ended) for result in results)),
        "host_ms_a_round": round(1e3 * sum(result.host_seconds for result in results) / max(1, rounds), 3),
        "ms_a_round": round(1e3 * sum(result.busy_s for result in results) / max(1, rounds), 1),
    }


def _percentiles(values: Sequence[float], *, falling: bool = False) -> dict[str, float]:
    """Of seconds the longest are the worst, of speeds the lowest."""
    if not values:
        return {}
    found = np.percentile(values, [100 - share if falling else share for share in PERCENTILES]).tolist()
    return {f"p{share}": round(value, 3) for share, value in zip(PERCENTILES, found, strict=True)}


def _skew(counts: Sequence[int]) -> float:
    """What the server with most has, as a multiple of the mean."""
    return round(max(counts) / max(1e-9, statistics.mean(counts)), 2)


def main() -> None:
    """Run what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", type=lambda text: [int(part) for part in text.split(",")], default=[1, 8, 64])
    parser.add_argument("--loads", type=lambda text: [float(part) for part in text.split(",")], default=[0.75])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--max-batch-size", type=int, default=ServerSetup.max_batch_size)
    parser.add_argument("--max-num-tokens", type=int, default=ServerSetup.max_num_tokens)
    parser.add_argument("--max-waiting", type=int)
    parser.add_argument("--kv-tokens", type=int, default=KV_TOKENS)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    limits = (given.max_batch_size, given.max_num_tokens, given.max_waiting, given.kv_tokens)
    setup = ServerSetup(*limits, seconds=given.seconds)
    runs = []
    for num_servers in given.servers:
        for load in given.loads:
            runs.append(simulate(num_servers, load, setup, given.seed, os.cpu_count() or 1))
            print(", ".join(f"{name} {value}" for name, value in runs[-1].items()), flush=True)
    print(json.dumps({"runs": runs}))


if __name__ == "__main__":
    main()
