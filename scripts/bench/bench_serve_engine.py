#!/usr/bin/env python3
"""An engine that computes nothing, for scripts/bench/bench_serve.py: what is left is the front.

    python scripts/bench/bench_serve_engine.py CONFIG ROUND_MS TOKENS_PER_ROUND [--socket NAME]

It greets the front as the engine of CONFIG, and gives every request TOKENS_PER_ROUND tokens a round until it has its
max_tokens. A round takes ROUND_MS; 0 gives a request all its tokens at once, when it comes. Without --socket it is
`trtrun serve --config CONFIG` with such an engine, which it starts.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from launch.cli import guarded
from launch.serve.application.serve import play_serve
from launch.serve.engine.handshake import connect, hash_config, hash_files
from launch.serve.engine.messages import Abort, AskStatus, Begin, Close, Deltas, MessageStream, Ready, Status, encode
from launch.serve.engine.restarted_engine import RestartedEngine
from trtrun import __version__, load_config
from trtrun.core.outputs import CompletionDelta
from trtrun.core.request_statistics import RequestStatistics
from trtrun.scheduling.limits import SchedulerLimits
from trtrun.start.job_spec import JobSpec

TEXT = " word"
SETTINGS = ["server.http_port=0", "server.grpc_port=0", "server.metrics_port=0", "scheduler.max_batch_size=64"]
LIMITS = SchedulerLimits(
    max_batch_size=1 << 10,
    max_num_tokens=1 << 16,
    max_seq_len=1 << 16,
    draft_max_seq_len=1 << 16,
    draft_len=4,
    block_size=16,
    num_blocks=1 << 20,
)


@dataclass
class Row:
    """A request's place in the rounds."""

    request_id: str
    num_left: int
    num_rounds: int = 0

    def round(self, num_tokens: int) -> CompletionDelta:
        """What a round gives it."""
        count = min(num_tokens, self.num_left)
        self.num_left -= count
        self.num_rounds += 1
        statistics = RequestStatistics(
            num_rounds=self.num_rounds,
            num_drafts=self.num_rounds,
            num_draft_tokens=4 * self.num_rounds,
            num_accepted_draft_tokens=self.num_rounds,
            acceptance_histogram=[0, self.num_rounds],
        )
        reason = None if self.num_left else "length"
        tokens = tuple(range(100, 100 + count))
        return CompletionDelta(self.request_id, 0, tokens, TEXT * count, statistics, None, reason)


async def serve(config: Path, round_seconds: float, num_tokens: int, socket: str) -> None:
    """Serve the front until it closes the connection."""
    reader, writer = await asyncio.open_unix_connection(sock=connect(socket))
    read = load_config(config, SETTINGS)
    ready = Ready(version=__version__, config_hash=hash_config(read), limits=asdict(LIMITS), files=hash_files(read))
    writer.write(encode(ready))
    rows: dict[str, Row] = {}
    is_asked = asyncio.Event()

    async def play() -> None:
        due = time.perf_counter()
        while True:
            if not rows:
                is_asked.clear()
                await is_asked.wait()
                due = time.perf_counter()
            due = max(due + round_seconds, time.perf_counter())
            await asyncio.sleep(due - time.perf_counter())
            writer.write(encode(Deltas(deltas=tuple(row.round(num_tokens) for row in rows.values()))))
            for row in [row for row in rows.values() if not row.num_left]:
                del rows[row.request_id]

    rounds = asyncio.create_task(play())
    async for message in MessageStream(reader):
        match message:
            case Begin():
                begun = [Row(request.request_id, request.sampling["max_tokens"]) for request in message.requests]
                if round_seconds:
                    rows |= {row.request_id: row for row in begun}
                    is_asked.set()
                else:
                    writer.write(encode(Deltas(deltas=tuple(row.round(row.num_left) for row in begun))))
            case Abort():
                rows.pop(message.request_id, None)
            case AskStatus():
                writer.write(
                    encode(Status(num_running=len(rows), num_waiting=0, num_free_blocks=1, num_blocks=1, totals={}))
                )
            case Close():
                break
    rounds.cancel()


def main() -> None:
    """Be the engine, or the front that starts it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("config", type=Path)
    parser.add_argument("round_ms", type=float)
    parser.add_argument("tokens_per_round", type=int)
    parser.add_argument("--socket")
    options = parser.parse_args()
    if options.socket is not None:
        asyncio.run(serve(options.config, options.round_ms / 1000, options.tokens_per_round, options.socket))
    else:
        config = load_config(options.config, SETTINGS)
        # As the command has it: with its settings of Python's garbage collection, above all.
        sys.exit(guarded(lambda: play_serve(JobSpec(config), RestartedEngine(config, [sys.executable, *sys.argv]))))


if __name__ == "__main__":
    main()
