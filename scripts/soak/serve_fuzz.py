#!/usr/bin/env python3
"""Sends each endpoint of a `trtrun serve`, and each call over gRPC, a thousand requests that nobody should send, and
reads every answer.

    python scripts/soak/serve_fuzz.py [--requests 1000] [--only http|grpc] [--seed 1]
                                 [--url http://127.0.0.1:8000 --grpc 127.0.0.1:8001 --model NAME]

Without addresses the shipped pair is served in one process. Over HTTP: malformed JSON, wrong types, huge numbers, NaN,
deep nesting, broken Unicode, wrong methods, odd headers, broken HTTP; each has to get an answer of the 4xx kind in one
line, or the thing asked for. Over gRPC: wrong names, shapes, datatypes and contents, damaged messages, bytes that are
no HTTP/2, and thousands of calls that are cancelled or cut; each has to get a status that says what is wrong, or the
thing asked for. No 5xx, no traceback, nothing that hangs, and afterwards the same tokens as before. What fails is made
as small as possible and shown. The last line is JSON: answers by status for each endpoint and call. Exit status 1 where
anything failed.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import grpc
import httpx

from scripts.harness.announcements import find_leftovers
from scripts.harness.server import Server, write_config, write_tokenizer
from scripts.harness.trials import Trial, make_parser, play_trial
from scripts.soak.fuzz import PATIENCE, try_endpoint, try_method
from scripts.soak.odd_calls import METHODS, ODD_BYTES, cancel_calls, cut_calls, send_bytes
from scripts.soak.odd_requests import kserve_endpoints, openai_endpoints

LONGEST = 56
"""Tokens of a stream that is given up: most of the context of the server that is started here."""


class Fuzz(Trial):
    """What is sent, and what has come of it.

    Attributes:
        answers: by status, for each endpoint and call.
    """

    def __init__(self, count: int, number: int) -> None:
        super().__init__()
        self.answers: dict[str, dict[str, int]] = {}
        self._count = count
        self._number = number

    def try_http(self, url: str, metrics_url: str, model: str) -> None:
        """All endpoints; those of the metrics where there is an address."""
        for endpoint in [*openai_endpoints(model), *kserve_endpoints()]:
            base = metrics_url if endpoint.is_metrics else url
            if base:
                self._keep(endpoint.path, *try_endpoint(endpoint, base, self._count, self._number))

    def try_grpc(self, address: str) -> None:
        """All calls, then bytes that are none, then calls that are given up."""
        with grpc.insecure_channel(address) as channel:
            for method in METHODS:
                self._keep(method, *try_method(channel, method, self._count, self._number))
        for data in ODD_BYTES:
            send_bytes(address, data, PATIENCE)
        asyncio.run(cancel_calls(address, LONGEST, 4 * self._count))
        asyncio.run(cut_calls(address, LONGEST, max(1, self._count // 10)))

    def _keep(self, name: str, statuses: dict[str, int], fault: str | None) -> None:
        self.answers[name] = dict(statuses)
        print(f"{name}: {self.answers[name]}", flush=True)
        if fault is not None:
            self.tell_fault(f"{name}: {fault}")


def try_server(fuzz: Fuzz, addresses: tuple[str, str, str], model: str, only: str | None) -> None:
    """Everything, or what one protocol has; addresses are those of HTTP, the metrics and gRPC."""
    url, metrics_url, grpc_address = addresses
    before = ask_tokens(url, model)
    if only in (None, "http"):
        fuzz.try_http(url, metrics_url, model)
    if only in (None, "grpc") and grpc_address:
        fuzz.try_grpc(grpc_address)
    if (after := ask_tokens(url, model)) != before:
        fuzz.faults.append(f"other tokens than before: {after}, not {before}")


def ask_tokens(url: str, model: str) -> list[int]:
    """The tokens behind a prompt, which are always the same."""
    body = {"model": model, "prompt": "def main(", "temperature": 0, "max_tokens": 24, "return_token_ids": True}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE, trust_env=False).raise_for_status()
    tokens: list[int] = answer.json()["choices"][0]["token_ids"]
    return tokens


async def serve_and_try(fuzz: Fuzz, only: str | None, folder: Path) -> None:
    """The same on a server of its own, which is looked at afterwards."""
    config = write_config(
        folder / "serve.yaml",
        1,
        tokenizer=str(write_tokenizer(folder / "tokenizer")),
        scheduler={"max_batch_size": 8, "max_seq_len": 64},
        kv_cache={"max_tokens": 2048},
        server={"max_queue": 24, "max_body_bytes": 1 << 20},
    )
    logs = folder / "logs"
    server = Server(config, folder, ("--log-dir", str(logs)))
    await server.start(PATIENCE)
    try:
        address = urlsplit(server.metrics_url)
        addresses = (server.url, f"{address.scheme}://{address.netloc}", server.grpc_address)
        await asyncio.to_thread(try_server, fuzz, addresses, server.model, only)
        await server.wait_healthy(PATIENCE)
        metrics = await server.metrics()
    finally:
        status = await server.end(PATIENCE)
    lines = [*server.lines, *(line for file in sorted(logs.iterdir()) for line in file.read_text().splitlines())]
    fuzz.faults += [line for line in lines if "Traceback" in line or " ERROR " in line][:20]
    fuzz.faults += find_leftovers(metrics)
    if status:
        fuzz.faults.append(f"the server ended with status {status}")


async def run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The whole trial; returns its figures."""
    fuzz = Fuzz(options.requests, options.seed)
    if options.url is None:
        await serve_and_try(fuzz, options.only, folder)
    else:
        addresses = (options.url, "", options.grpc)
        await asyncio.to_thread(try_server, fuzz, addresses, options.model, options.only)
    return {"endpoints": fuzz.answers, "faults": fuzz.faults}


def main() -> int:
    """Try it, and tell."""
    parser = make_parser(__doc__)
    parser.add_argument("--requests", type=int, default=1000, help="to each endpoint, and calls of each kind")
    parser.add_argument("--only", choices=("http", "grpc"), help="one of the protocols; default: both")
    parser.add_argument("--url", help="of a server that runs already")
    parser.add_argument("--grpc", default="", help="its HOST:PORT for gRPC")
    parser.add_argument("--model", help="its name there")
    options = parser.parse_args()
    if (options.url is None) != (options.model is None):
        parser.error("--url and --model go together")
    if options.grpc and options.url is None:
        parser.error("--grpc is of the server that --url names")
    if options.only == "grpc" and options.url is not None and not options.grpc:
        parser.error("--only grpc wants --grpc HOST:PORT beside --url")
    return play_trial(run, options)


if __name__ == "__main__":
    sys.exit(main())
