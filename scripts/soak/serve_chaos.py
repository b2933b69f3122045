#!/usr/bin/env python3
"""Kills each part of a loaded `trtrun serve` with SIGKILL, again and again, and looks at every stream.

    python scripts/soak/serve_chaos.py [--ranks 3] [--kills 10] [--clients 8] [--victims 'rank 0,rank 2,mpirun']
    [--config F]

The shipped pair is served on CPU ranks, or what a configuration says. While clients stream, one part after another is
killed: each rank, mpirun, the engine's parent, and the front itself, which is then started again. A victim such as
`stop rank 2` is stopped by SIGSTOP instead, so that the heartbeat has to find it, after 5 s here. Every answer is
compared with the one that `trtrun run` has written before: a stream ends with its exact text or with one clear error, a
killed front breaks connections, and nothing else may happen. In the end, and after each killed front, no process and no
file is left. The last line is JSON: what became of all requests, how long streams paused, when the front knew of a kill
and what it said of the way back, and the memory that the last front held at first and in the end. Exit status 1 where
anything was wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import sys
import time
from collections import Counter
from itertools import cycle
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.harness.announcements import find_leftovers
from scripts.harness.children import ChildError
from scripts.harness.server import Server, open_client, wait_for, write_config
from scripts.harness.trials import Trial, make_parser, play_trial
from scripts.soak.judged_clients import Reply, Verdict, ask
from scripts.soak.questions import Question, ask_reference, make_rows

PATIENCE = 400.0
"""Seconds that anything may take: a restart, an answer with several restarts in it. What takes longer hangs."""

STOP = "stop "
"""Begins the name of a victim that is stopped instead of killed."""

LONGEST = 160
"""Tokens of the longest completion: long enough to be met by a kill."""


class Chaos(Trial):
    """Clients that ask without end, and what became of their questions."""

    def __init__(
        self, server: Server, questions: list[Question], num_clients: int, streams_all: bool, standby: bool
    ) -> None:
        super().__init__()
        self._streams_all, self._standby = streams_all, standby
        self._server = server
        self._questions = cycle(questions)
        self._num_clients = num_clients
        self._is_over = False
        self._front_is_gone = asyncio.Event()
        self.open: dict[int, Reply] = {}
        self.verdicts: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()

    async def ask_on(self) -> None:
        """All clients, until `finish`."""
        async with asyncio.TaskGroup() as clients:
            for number in range(self._num_clients):
                clients.create_task(self._ask_on(number))

    def finish(self) -> None:
        """Ask nothing more; what is open is read to its end."""
        self._is_over = True

    async def wait_streaming(self) -> list[Reply]:
        """Wait until half of the clients, or more, are in the middle of their streams; returns what they read."""
        deadline = time.monotonic() + PATIENCE
        while True:
            reading = [reply for reply in self.open.values() if 0 < sum(map(len, reply.tokens.values())) < LONGEST / 2]
            if 2 * len(reading) >= self._num_clients:
                return reading
            if time.monotonic() > deadline:
                raise ChildError(f"only {len(reading)} of {self._num_clients} clients read after {PATIENCE:g} s")
            await asyncio.sleep(0.005)

    async def wait_standing(self) -> None:
        """Wait until one engine stands by for each that has come up, where some do: a job that goes on without a draft
        rank keeps the one that it has."""
        if self._standby:
            wanted = self._count_lines("is served at", "is up again after")
            await wait_for(lambda: self._count_lines("stands by") >= wanted or None, PATIENCE, "one that stands by")
            print(f"an engine stands by ({wanted})", flush=True)

    def _count_lines(self, *words: str) -> int:
        return sum(any(word in line for word in words) for line in self._server.lines)

    async def _ask_on(self, number: int) -> None:
        while not self._is_over:
            async with open_client(self._server.url, PATIENCE) as client:
                front = self._server.url
                while not self._is_over and self._server.url == front:
                    verdict = await self._ask(client, number)
                    if verdict in (Verdict.REFUSED, Verdict.BROKEN):
                        await asyncio.sleep(0.2)
            while not self._server.url and not self._is_over:
                await asyncio.sleep(0.05)

    async def _ask(self, client: httpx.AsyncClient, number: int) -> Verdict:
        question, reply, streams = next(self._questions), Reply(), self._streams_all or number % 4 != 3
        self.open[number] = reply
        try:
            await asyncio.wait_for(ask(client, self._server.model, question, streams, reply), PATIENCE)
            verdict, detail = reply.judge(question)
        except TimeoutError:
            verdict, detail = Verdict.WRONG, f"it hangs: {len(reply.arrivals)} pieces, no end within {PATIENCE:g} s"
        del self.open[number]
        self.verdicts[verdict] += 1
        if verdict in (Verdict.ERROR, Verdict.REFUSED):
            self.errors[detail] += 1
        if verdict is Verdict.WRONG:
            self.tell_fault(f"{detail}; asked: {json.dumps(question.fields)[:300]}")
        return verdict


async def kill_part(server: Server, chaos: Chaos, victim: str) -> dict[str, Any]:
    """Kill or stop a part under load and wait until the server serves again; returns how long that took, and the
    pauses of streams that were read."""
    await chaos.wait_standing()
    reading = await chaos.wait_streaming()
    process = await server.find(victim.removeprefix(STOP), PATIENCE)
    told = len(server.lines)
    before = time.perf_counter()
    os.kill(process, signal.SIGSTOP if victim.startswith(STOP) else signal.SIGKILL)
    if victim == "front":
        server.url = ""
        await server.wait_over()
        await server.start(PATIENCE)
        return {"back_s": time.perf_counter() - before, "pauses_s": []}
    noticed_s: float | None = None
    while any(reply in chaos.open.values() for reply in reading):
        if noticed_s is None and find_line(server, told, NOTICED):
            noticed_s = time.perf_counter() - before
        await asyncio.sleep(0.01)
    await server.wait_healthy(PATIENCE)
    pauses = [pause for reply in reading if (pause := reply.longest_pause_after(before)) is not None]
    told_back = find_line(server, told, ("is up again after",))
    return {
        "back_s": time.perf_counter() - before, "pauses_s": pauses, "noticed_s": noticed_s, "told": told_back,
    }  # fmt: skip


NOTICED = ("started again", "goes on without")
"""In lines of a front that knows of a kill."""


def find_line(server: Server, start: int, words: tuple[str, ...]) -> str:
    """The first line from number `start` on that has one of some words; empty where there is none."""
    return next((line for line in server.lines[start:] if any(word in line for word in words)), "")


async def run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The whole trial; returns its figures."""
    config = options.config or write_config(folder / "serve.yaml", options.ranks, kv_cache={"max_tokens": 16384})
    rows = [{**row, "ignore_eos": True} for row in make_rows(4 * options.clients, LONGEST, seed=options.seed)]
    questions = await ask_reference(config, rows, folder)
    print(f"{len(questions)} answers are known", flush=True)
    kills = len(options.victims) * options.kills
    words = ["--set", f"server.max_restarts={min(1000, kills + 1)}"]
    words += ["--set", "server.standby=true"] if options.standby else []
    words += [word for override in options.overrides for word in ("--set", override)]
    if any(victim.startswith(STOP) for victim in options.victims):
        words += ["--set", "launch.heartbeat_seconds=5"]
    server = Server(config, folder, tuple(words))
    await server.start(PATIENCE)
    print("the server is up", flush=True)
    chaos = Chaos(server, questions, options.clients, options.streams_all, options.standby)
    asking = asyncio.create_task(chaos.ask_on())
    held: list[int] = []
    found: dict[str, list[dict[str, Any]]] = {victim: [] for victim in options.victims}
    try:
        for number in range(options.kills):
            for victim in options.victims:
                found[victim].append(await kill_part(server, chaos, victim))
                if victim == "front":
                    held.clear()
                held.append(server.resident_bytes()["front"])
                print(f"{number + 1}: {victim}: {show(found[victim][-1])}; {dict(chaos.verdicts)}", flush=True)
        chaos.finish()
        await asyncio.wait_for(asking, PATIENCE)
        held.append(server.resident_bytes()["front"])
        metrics = await server.metrics()
        status = await server.end(PATIENCE)
    except BaseException:
        print("\n".join(server.lines[-30:]), file=sys.stderr)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        server.kill()
        raise
    if status != 0:
        chaos.faults.append(f"the server ended with status {status}")
    chaos.faults += find_leftovers(metrics)
    if chaos.verdicts[Verdict.BROKEN] and "front" not in options.victims:
        chaos.faults.append("connections broke, though the front was there")
    faults = [line for line in server.lines if "Traceback" in line]
    return {
        "kills": kills,
        "victims": {victim: summarize(times) for victim, times in found.items()},
        "requests": dict(chaos.verdicts),
        "errors": dict(chaos.errors),
        "front_bytes": [held[0], held[-1]],
        "faults": chaos.faults + faults,
    }


def show(times: dict[str, Any]) -> str:
    """One kill, for people."""
    pauses = times["pauses_s"]
    paused = f", {len(pauses)} streams paused {min(pauses):.2f} to {max(pauses):.2f} s" if pauses else ""
    return f"serves again after {times['back_s']:.2f} s{paused}"


def summarize(times: list[dict[str, Any]]) -> dict[str, Any]:
    """All kills of one part."""
    pauses = [pause for one in times for pause in one["pauses_s"]]
    told: dict[str, Any] = {"kills": len(times), "back_s": round(statistics.median(one["back_s"] for one in times), 2)}
    if pauses:
        told |= {"pause_s_median": round(statistics.median(pauses), 2), "pause_s_max": round(max(pauses), 2)}
    told["each"] = [
        {
            "streams": len(one["pauses_s"]),
            "pause_s": round(max(one["pauses_s"], default=0.0), 2),
            "noticed_s": round(one["noticed_s"], 2) if one.get("noticed_s") is not None else None,
            "told": one.get("told", ""),
        }
        for one in times
    ]
    return told


def main() -> int:
    """Try it, and tell."""
    parser = make_parser(__doc__, clients=8, ranks=3)
    parser.add_argument("--kills", type=int, default=10, help="of each part")
    parser.add_argument("--standby", action="store_true", help="server.standby, and kill where an engine stands by")
    parser.add_argument(
        "--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE", help="of the server's YAML file"
    )
    parser.add_argument("--streams-all", action="store_true", help="instead of three of four answers")
    parser.add_argument("--victims", help="parts to kill, or to `stop`, separated by commas  [default: kill all]")
    options = parser.parse_args()
    if options.victims is None:
        ranks = [f"rank {rank}" for rank in range(options.ranks)] if options.ranks > 1 else []
        options.victims = [*ranks, *(["mpirun"] if ranks else []), "engine", "front"]
    else:
        options.victims = [victim.strip() for victim in options.victims.split(",")]
    if wrong := [name for name in options.victims if name.startswith(STOP) and not name.startswith(STOP + "rank ")]:
        parser.error(f"--victims: {wrong[0]}: only ranks are watched, so only ranks can be stopped")
    return play_trial(run, options)


if __name__ == "__main__":
    sys.exit(main())
