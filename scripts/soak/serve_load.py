#!/usr/bin/env python3
"""Loads a `trtrun serve` for an hour with clients of all kinds, and looks whether it is afterwards as it was before.

    python scripts/soak/serve_load.py [--minutes 60] [--clients 64] [--ranks 1] [--config F]

The shipped pair is served on CPU ranks, or what a configuration says. Clients ask questions of mixed lengths and kinds,
streamed and not, whose answers `trtrun run` has written before; some cancel in the middle, some go away before the
answer, some send nonsense. In the end every request has had its exact answer, or the refusal that it deserved; nothing
hangs; no row runs, every KV block is free; and no process has grown once it was warm. The last line is JSON. Exit
status 1 where any of this is not so.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.harness.announcements import find_leftovers, is_idle
from scripts.harness.server import Server, open_client, write_config
from scripts.harness.trials import Trial, make_parser, play_trial
from scripts.soak.judged_clients import Reply, Verdict, ask, ask_and_leave
from scripts.soak.questions import Question, ask_reference, make_rows
from trtrun.configuration.config import load_config

PATIENCE = 300.0
"""Seconds that a request may take; what takes longer hangs."""

SAMPLE_SECONDS = 5.0
"""Between two looks at memory."""

GROWTH, GROWTH_BYTES = 1.01, 4 << 20
"""How much larger a process may be in the last quarter of the time than in the one before: until then it warms up."""

MOST_WARMING = 64
"""Requests of each kind before the time begins."""

NONSENSE: tuple[tuple[bytes, int], ...] = (
    (b"{", 400),
    (b'{"model": "nobody", "prompt": "x"}', 404),
    (b'{"prompt": 5}', 400),
    (b"[" * 5000, 400),
    (b'{"model": MODEL, "prompt": []}', 400),
    (b'{"model": MODEL, "prompt": "x", "temperature": NaN}', 400),
    (b'{"model": MODEL, "prompt": "x", "n": 1000}', 400),
    (b'{"model": MODEL, "prompt": [1000000000]}', 400),
    (b'{"model": MODEL, "promt": "x"}', 400),
    (b'{"model": MODEL, "prompt": "' + b"x " * 20000 + b'"}', 400),
)
"""Bodies, and the status that each has to get."""

EXPECTED = (Verdict.EXACT, Verdict.CUT)


class Load(Trial):
    """Clients of all kinds, and what became of their requests."""

    def __init__(self, server: Server, questions: list[Question], options: argparse.Namespace) -> None:
        super().__init__()
        self._server = server
        self._questions = questions
        self._options = options
        self._end = 0.0
        self.verdicts: Counter[str] = Counter()
        self.num_tokens = 0
        self.sizes: dict[str, list[int]] = {}

    async def warm_up(self, block_size: int) -> None:
        """Have every thread of the front make tokens of a long text, and every KV block of the engine written: what
        they keep for good they then have, and it does not look like growth.

        Args:
            block_size: tokens of a KV block.
        """
        async with open_client(self._server.url, PATIENCE) as client:
            async with asyncio.TaskGroup() as requests:
                for _ in range(MOST_WARMING):
                    requests.create_task(self._send_nonsense(client, *NONSENSE[-1]))
            status = (await client.get("/status")).json()
            length, most_tokens = status["max_seq_len"], status["kv_cache"]["blocks"] * block_size
            for number in range(min(MOST_WARMING, most_tokens // length + 1)):
                prompt = [number + 1] + [5] * (length - 2)  # shares no block with another one
                body = {"model": self._server.model, "prompt": prompt, "max_tokens": 1}
                (await client.post("/v1/completions", json=body)).raise_for_status()
        self.verdicts.clear()

    async def run(self) -> None:
        """All clients, until the time is over and each has its last answer."""
        self._end = time.monotonic() + 60 * self._options.minutes
        sampling = asyncio.create_task(self._sample())
        try:
            async with asyncio.TaskGroup() as clients:
                for number in range(self._options.clients):
                    clients.create_task(self._ask_on(random.Random(self._options.seed * 1000 + number)))
        finally:
            if sampling.done():
                sampling.result()  # sizes could not be read: nothing is known of memory
            sampling.cancel()

    async def _ask_on(self, choose: random.Random) -> None:
        async with open_client(self._server.url, PATIENCE) as client:
            while time.monotonic() < self._end:
                try:
                    await asyncio.wait_for(self._ask(client, choose), PATIENCE)
                except TimeoutError:
                    self.tell_fault(f"a request hangs: no end within {PATIENCE:g} s")

    async def _ask(self, client: httpx.AsyncClient, choose: random.Random) -> None:
        question, kind, model = choose.choice(self._questions), choose.random(), self._server.model
        if kind < 0.1:
            await self._send_nonsense(client, *choose.choice(NONSENSE))
            return
        if kind < 0.65:
            reply = await ask(client, model, question, True)
        elif kind < 0.8:
            reply = await ask(client, model, question, False)
        elif kind < 0.92:
            reply = await ask(client, model, question, True, cut_after=choose.randint(0, question.num_tokens))
        else:
            reply = await ask_and_leave(client, model, question, choose.uniform(0.0, 3.0))
        self._judge(reply, question)

    def _judge(self, reply: Reply, question: Question) -> None:
        verdict, detail = reply.judge(question)
        self.verdicts[verdict] += 1
        self.num_tokens += sum(map(len, reply.tokens.values()))
        if verdict not in EXPECTED:
            self.tell_fault(f"{verdict}: {detail}; asked: {json.dumps(question.fields)[:300]}")

    async def _send_nonsense(self, client: httpx.AsyncClient, body: bytes, status: int) -> None:
        body = body.replace(b"MODEL", json.dumps(self._server.model).encode())
        answer = await client.post("/v1/completions", content=body)
        message = answer.json().get("error", {}).get("message", "")
        self.verdicts["nonsense"] += 1
        if answer.status_code != status or not message or "\n" in message:
            self.tell_fault(f"{body[:80]!r} got HTTP {answer.status_code} instead of {status}: {answer.text[:200]}")

    async def _sample(self) -> None:
        """Look at the memory of all processes, and tell how it goes."""
        while True:
            for part, size in (await asyncio.to_thread(self._server.resident_bytes)).items():
                self.sizes.setdefault(part, []).append(size)
            if len(next(iter(self.sizes.values()))) % 12 == 1:
                megabytes = {part: round(sizes[-1] / 2**20, 1) for part, sizes in self.sizes.items()}
                left = max(0.0, self._end - time.monotonic())
                print(f"{left:.0f} s left: {dict(self.verdicts)}, MiB: {megabytes}", flush=True)
            await asyncio.sleep(SAMPLE_SECONDS)

    def memory(self) -> dict[str, dict[str, float]]:
        """MiB of each process in the third and the last quarter of the time; one that has grown is a fault."""
        told = {}
        for part, sizes in self.sizes.items():
            quarter = len(sizes) // 4
            if not quarter:
                continue
            early, late = statistics.median(sizes[2 * quarter : 3 * quarter]), statistics.median(sizes[-quarter:])
            told[part] = {"early_mib": round(early / 2**20, 1), "late_mib": round(late / 2**20, 1)}
            if late > GROWTH * early + GROWTH_BYTES:
                self.tell_fault(f"{part} has grown from {early / 2**20:.1f} to {late / 2**20:.1f} MiB")
        return told


async def run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The whole trial; returns its figures."""
    # A small KV store: all of it is in use soon, and does not look like growth.
    config = options.config or write_config(folder / "serve.yaml", options.ranks, kv_cache={"max_tokens": 8192})
    rows = make_rows(2 * options.clients, options.longest, options.seed)
    questions = await ask_reference(config, rows, folder)
    server = Server(config, folder)
    await server.start(PATIENCE)
    load = Load(server, questions, options)
    try:
        await load.warm_up(load_config(config).kv_cache.block_size)
        before = time.monotonic()
        await load.run()
        seconds = time.monotonic() - before
        metrics = await wait_idle(server)
    finally:
        status = await server.end(PATIENCE)
    load.faults += find_leftovers(metrics)
    if status or metrics["trtrun:engine_restarts_total"]:
        load.faults.append(
            f"the server ended with status {status}, restarts: {metrics['trtrun:engine_restarts_total']}"
        )
    load.faults += server.error_lines()
    return {
        "minutes": round(seconds / 60, 1),
        "clients": options.clients,
        "requests": dict(load.verdicts),
        "tokens_per_s": round(load.num_tokens / seconds, 1),
        "memory": load.memory(),
        "faults": load.faults,
    }


async def wait_idle(server: Server) -> dict[str, float]:
    """The metrics, once rows of clients that went away have ended, which takes a round."""
    for _ in range(100):
        metrics = await server.metrics()
        if is_idle(metrics):
            break
        await asyncio.sleep(0.1)
    return metrics


def main() -> int:
    """Try it, and tell."""
    parser = make_parser(__doc__, clients=64, ranks=1)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--longest", type=int, default=64, help="tokens of the longest completion")
    return play_trial(run, parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
