#!/usr/bin/env python3
"""Sends each endpoint of a `trtrun serve` a thousand requests that nobody should send, and reads every answer.

    python scripts/serve_fuzz.py [--requests 1000] [--url http://127.0.0.1:8000 --model NAME] [--seed 1]

Without --url the shipped pair is served in one process. Malformed JSON, wrong types, huge numbers, NaN, deep nesting,
broken Unicode, wrong methods, odd headers, broken HTTP: each has to get an answer of the 4xx kind in one line, or the
thing asked for; no 5xx, no traceback, nothing that hangs. What fails is made as small as possible and shown. The last
line is JSON: answers by status for each endpoint. Exit status 1 where anything failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.database import InMemoryExampleDatabase
from hypothesis.errors import Flaky
from served.odd_requests import (
    Endpoint,
    OddRequest,
    exchange,
    find_fault,
    kserve_endpoints,
    odd_requests,
    openai_endpoints,
)  # fmt: skip
from served.server import Server, TrialError, write_config, write_tokenizer

PATIENCE = 120.0


class FaultError(AssertionError):
    """An answer that must not be."""


def try_endpoint(endpoint: Endpoint, url: str, count: int, number: int) -> tuple[Counter[str], str | None]:
    """Send requests to one endpoint; answers by status, and the smallest request that went wrong, if one did."""
    statuses: Counter[str] = Counter()

    @seed(number)
    @settings(
        max_examples=count,
        deadline=None,
        database=InMemoryExampleDatabase(),
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
    )
    @given(request=odd_requests(endpoint))
    def send(request: OddRequest) -> None:
        try:
            answered = exchange(url, request, PATIENCE)
        except TimeoutError:
            raise FaultError(f"no end within {PATIENCE:g} s\nsent: {request.data[:1500]!r}") from None
        statuses[str(answered.status or "closed")] += 1
        if fault := find_fault(request, answered):
            raise FaultError(f"{fault}\nsent: {request.data[:1500]!r}")

    try:
        send()
    except (FaultError, Flaky) as fault:
        return statuses, str(fault)
    return statuses, None


def try_all(url: str, metrics_url: str, model: str, options: argparse.Namespace) -> dict[str, object]:
    """All endpoints; returns what to tell."""
    told: dict[str, object] = {}
    faults = []
    for endpoint in [*openai_endpoints(model), *kserve_endpoints()]:
        base = metrics_url if endpoint.is_metrics else url
        if not base:
            continue
        statuses, fault = try_endpoint(endpoint, base, options.requests, options.seed)
        told[endpoint.path] = dict(statuses)
        print(f"{endpoint.path}: {dict(statuses)}", flush=True)
        if fault is not None:
            faults.append(fault)
            print(f"FAULT: {endpoint.path}: {fault}", flush=True)
    return {"endpoints": told, "faults": faults}


async def serve_and_try(options: argparse.Namespace, folder: Path) -> dict[str, object]:
    """The same on a server of its own, which is looked at afterwards."""
    temporary = folder / "tmp"
    temporary.mkdir()
    config = write_config(
        folder / "serve.yaml",
        1,
        tokenizer=str(write_tokenizer(folder / "tokenizer")),
        scheduler={"max_batch_size": 8, "max_seq_len": 64},
        kv_cache={"max_tokens": 2048},
        server={"max_queue": 24, "max_body_bytes": 1 << 20},
    )
    server = Server(config, temporary)
    await server.start(PATIENCE)
    try:
        address = urlsplit(server.metrics_url)
        base = f"{address.scheme}://{address.netloc}"
        told = await asyncio.to_thread(try_all, server.url, base, server.model, options)
        await server.wait_healthy(PATIENCE)
        metrics = await server.metrics()
    finally:
        status = await server.end(PATIENCE)
    faults = told["faults"]
    assert isinstance(faults, list)
    faults += [line for line in server.lines if "Traceback" in line or " ERROR " in line]
    if metrics["vllm:kv_cache_usage_perc"] or metrics["vllm:num_requests_running"] or status:
        faults.append(f"the server is not whole afterwards: status {status}, {metrics}")
    return told


def main() -> int:
    """Try it, and tell."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--requests", type=int, default=1000, help="to each endpoint")
    parser.add_argument("--url", help="of a server that runs already")
    parser.add_argument("--model", help="its name there")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if (options.url is None) != (options.model is None):
        parser.error("--url and --model go together")
    try:
        if options.url is not None:
            told = try_all(options.url, "", options.model, options)
        else:
            with tempfile.TemporaryDirectory(prefix="serve-fuzz-") as folder:
                told = asyncio.run(serve_and_try(options, Path(folder)))
    except TrialError as error:
        print(f"serve_fuzz.py: {error}", file=sys.stderr)
        return 1
    print(json.dumps(told))
    return 1 if told["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
