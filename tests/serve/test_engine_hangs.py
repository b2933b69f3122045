"""Engines that hang, as a process that is stopped does: the server says so, and its streams lose no token by it."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from servers import ONE_PROCESS, PATIENCE, THREE_RANKS, Server, serving, wait_until, write_config
from streams import Streamed

from trtrun import LLM

pytestmark = pytest.mark.timeout(400)
GREEDY: dict[str, Any] = {"max_tokens": 100, "ignore_eos": True, "logprobs": 1, "temperature": 0.0}
SETTINGS: dict[str, Any] = {
    "scheduler": {"max_batch_size": 4},
    "kv_cache": {"max_tokens": 8192},
    "server": {"max_restarts": 1000},  # a busy machine may keep an engine from answering, too
}


def health_of(server: Server) -> tuple[int, str]:
    answer = httpx.get(server.url + "/health", timeout=PATIENCE)
    return answer.status_code, answer.json()["status"]


def stop_within_stream(server: Server, process: int, pool: ThreadPoolExecutor) -> Any:
    """Stop a process while a stream runs; the stream."""
    stream = Streamed(server, "def f(", GREEDY)
    reading = pool.submit(stream.read)
    assert stream.has_begun.wait(PATIENCE)
    os.kill(process, signal.SIGSTOP)
    return reading


def test_an_engine_that_is_stopped_is_not_healthy_until_it_goes_on(pair: Path, tmp_path: Path, llm: LLM) -> None:
    settings = SETTINGS | {"launch": {"heartbeat_seconds": 1.5}}
    with serving(write_config(tmp_path / "serve.yaml", pair, ONE_PROCESS, **settings)) as server:
        process = server.engine()
        with ThreadPoolExecutor(1) as pool:
            reading = stop_within_stream(server, process, pool)
            try:
                line = server.wait_for("the engine hangs")
                assert "it has not answered for 1.5 s (launch.heartbeat_seconds); it is ended in 10 s unless" in line
                assert health_of(server) == (503, "engine_hanging")
                assert server.metrics()["trtrun:engine_up"] == 0
                refused = server.post("/v1/completions", {"model": "pair", "prompt": "x"})
                assert refused.status_code == 503 and refused.headers["retry-after"] == "5"
                assert refused.json()["error"]["code"] == "engine_hanging"
            finally:
                os.kill(process, signal.SIGCONT)
            server.wait_for("the engine gets on again")
            reading.result(timeout=PATIENCE).check(llm)
        assert health_of(server) == (200, "ok")
        assert server.wait_idle()["trtrun:engine_up"] == 1


@pytest.mark.long
@pytest.mark.parametrize("victim", ["one process", "rank 0", "target rank"])
def test_an_engine_that_stays_stopped_is_started_again(pair: Path, tmp_path: Path, llm: LLM, victim: str) -> None:
    devices = ONE_PROCESS if victim == "one process" else THREE_RANKS
    settings = SETTINGS | {"launch": {"heartbeat_seconds": 6}}
    with serving(write_config(tmp_path / "serve.yaml", pair, devices, **settings)) as server:
        victims = {
            "one process": server.engine,
            "rank 0": lambda: server.rank(0),
            "target rank": lambda: server.rank(2),
        }
        with ThreadPoolExecutor(1) as pool:
            reading = stop_within_stream(server, victims[victim](), pool)
            server.wait_for("it is started again")
            reading.result(timeout=PATIENCE).check(llm)
        wait_until(lambda: health_of(server)[0] == 200 or None, "a healthy server")
