"""`trtrun submit -- serve` on a real Slurm: found by `trtrun status`, used, and drained before the limit."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import httpx
import pytest
from batch import Run
from cluster import Cluster, wait_for

pytestmark = pytest.mark.timeout(300)
Config = Callable[..., Path]
LONG = {
    "model": "target",
    "prompt": "def main(",
    "temperature": 0,
    "max_tokens": 900,
    "ignore_eos": True,
    "stream": True,
}


def submit(trtrun: Run, file: Path) -> int:
    """Submit a server; its job's number."""
    done = trtrun("submit", "--config", file, "--", "serve")
    assert done.returncode == 0, done.stderr
    job = int(done.stdout)
    assert f"trtrun: where it listens, once it does: trtrun status {job}\n" in done.stderr
    return job


def find_socket(cluster: Cluster, trtrun: Run, job: int) -> str:
    """The path of its socket, as the status tells it."""

    def ask() -> dict[str, str] | None:
        assert cluster.show(job)["JobState"] in ("PENDING", "RUNNING")
        lines = trtrun("status", job).stdout.splitlines()
        values = {line.split()[0]: line.split(maxsplit=1)[1] for line in lines if line.startswith("  ")}
        return values if values.get("served", "").startswith("unix") else None

    told = wait_for(ask, 120, "the server listens")
    path = unquote(urlsplit(told["served"]).path)
    assert path.endswith(f"/trtrun-{job}.sock") and "n1" in told["reach"]
    assert told["reach"].startswith(f"ssh -N -L 8000:{shlex.quote(path)} ")
    curl = ["bash", "-c", f"{told['there']} --silent --fail"]
    assert json.loads(subprocess.run(curl, capture_output=True, check=True).stdout)["data"][0]["id"] == "target"
    return path


def stream(path: str, begun: threading.Event) -> list[Any]:
    """All events of a stream."""
    found: list[Any] = []
    with (
        httpx.Client(transport=httpx.HTTPTransport(uds=path), timeout=120) as client,
        client.stream("POST", "http://localhost/v1/completions", json=LONG | {"stream": True}) as answer,
    ):
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                begun.set()
                found.append(json.loads(line.removeprefix("data: ")))
    return found


def test_a_server_is_found_used_and_drained(cluster: Cluster, trtrun: Run, config: Config, folder: Path) -> None:
    """By `trtrun cancel`, which the job's script takes as it takes Slurm's warning (test_slurm_endings.py)."""
    job = submit(trtrun, config(1, kv_cache={"max_tokens": 4096}))
    path = find_socket(cluster, trtrun, job)
    begun = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(stream, path, begun)
        assert begun.wait(120)
        # Until the server has heard of it the request stays in work, however long the command takes.
        engine, _ = cluster.ranks(job)[0]
        os.kill(engine, signal.SIGSTOP)
        try:
            assert trtrun("cancel", job).returncode == 0
            log = folder / f"trtrun-{job}.log"
            told = "trtrun: SIGUSR1: no more requests are let in, the 1 in work have 30 s"
            wait_for(lambda: told in log.read_text(encoding="utf-8"), 60, told)
        finally:
            os.kill(engine, signal.SIGCONT)
        events = reading.result(timeout=120)
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    wait_for(lambda: cluster.show(job)["JobState"] == "COMPLETED", 60, "the job ends")
    assert f"job {job} COMPLETED" in trtrun("status", job).stdout
    assert len(cluster.ranks(job)) == 0 and not Path(path).exists()


def test_what_cannot_be_served_is_told_before_submission(trtrun: Run, config: Config) -> None:
    done = trtrun("submit", "--config", config(1), "--", "serve", "--http-prot", "0")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
