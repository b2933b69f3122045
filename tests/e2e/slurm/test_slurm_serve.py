"""`trtrun submit -- serve` on a real Slurm: found by `trtrun status`, used, and followed by the next job."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
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
    "max_tokens": 600,
    "ignore_eos": True,
    "stream": True,
}


def submit(trtrun: Run, file: Path) -> int:
    """Submit the first of two servers that follow each other; its job's number."""
    done = trtrun("submit", "--config", file, "--chain", 2, "--", "serve")
    assert done.returncode == 0, done.stderr
    assert "trtrun.server.json says where it listens, once it does\n" in done.stderr
    return int(done.stdout)


def find_served(cluster: Cluster, trtrun: Run, job: int, scheme: str) -> dict[str, str]:
    """What the status tells of a job, by the first word of each line, once its server listens."""

    def ask() -> dict[str, str] | None:
        assert cluster.show(job)["JobState"] in ("PENDING", "RUNNING")
        lines = trtrun("status", job).stdout.splitlines()
        values = {line.split()[0]: line.split(maxsplit=1)[1] for line in lines if line.startswith("  ")}
        return values if values.get("served", "").startswith(scheme) else None

    return wait_for(ask, 120, "the server listens")


def find_url(cluster: Cluster, trtrun: Run, job: int) -> str:
    """Where it listens, as the status tells it."""
    told = find_served(cluster, trtrun, job, "http")
    port = told["served"].rpartition(":")[2]
    assert told["reach"].startswith(f"ssh -N -L {port}:127.0.0.1:{port} ")
    return told["served"]


def stream(url: str, options: dict[str, Any], begun: threading.Event) -> list[Any]:
    """All events of a stream."""
    found: list[Any] = []
    with httpx.stream("POST", f"{url}/v1/completions", json=LONG | options, timeout=120) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                begun.set()
                found.append(json.loads(line.removeprefix("data: ")))
    return found


def text_of(events: list[Any]) -> str:
    """What a stream said, to its own end."""
    assert events[-1]["choices"][0]["finish_reason"] == "length", events[-1]
    return "".join(event["choices"][0]["text"] for event in events)


def ask_on(name_file: Path, texts: list[str], is_over: threading.Event) -> None:
    """Add the texts of a client that asks again and again where the name's file says, and reads that anew where its
    request is not taken."""
    url = ""
    with httpx.Client(timeout=120) as client:
        while not is_over.is_set():
            url = url or json.loads(name_file.read_text(encoding="utf-8"))["url"]
            try:
                answer = client.post(f"{url}/v1/completions", json=LONG | {"max_tokens": 8, "stream": False})
            except httpx.ConnectError:
                answer = None
            if answer is None or answer.status_code == 503:
                url = ""
            else:
                texts.append(answer.raise_for_status().json()["choices"][0]["text"])


def test_a_server_is_found_and_used_and_the_next_job_goes_on_with_its_streams(
    cluster: Cluster, trtrun: Run, config: Config, folder: Path
) -> None:
    """Behind `trtrun cancel`, which the job's script takes as it takes Slurm's warning (test_slurm_endings.py)."""
    slurm = {"chain_lead_seconds": 598, "exclusive": True}  # of a limit of 600; each job has a node
    sections = {"kv_cache": {"max_tokens": 4096}, "launch": {"heartbeat_seconds": 600}}
    first = submit(trtrun, config(1, slurm, **sections))
    url = find_url(cluster, trtrun, first)
    log, name_file = folder / f"trtrun-{first}.log", folder / "trtrun.server.json"
    second = int(log.read_text(encoding="utf-8").split("trtrun: job ")[1].split()[0])
    kinds: list[dict[str, Any]] = [{}, {"temperature": 0.8, "seed": 3}]
    engine, _ = cluster.ranks(first)[0]
    asked: list[str] = []
    begun, is_over = [threading.Event() for _ in kinds], threading.Event()
    with ThreadPoolExecutor(3) as pool:
        try:
            asking = pool.submit(ask_on, name_file, asked, is_over)
            reading = [pool.submit(stream, url, *each) for each in zip(kinds, begun, strict=True)]
            assert all(each.wait(120) for each in begun)
            os.kill(engine, signal.SIGSTOP)  # what has begun there ends elsewhere
            wait_for(lambda: f"trtrun: job {second} at http" in log.read_text(encoding="utf-8"), 120, "it is followed")
            name = json.loads(name_file.read_text(encoding="utf-8"))
            assert name["job"] == str(second)
            forwarded = text_of(stream(url, {"max_tokens": 8}, threading.Event()))
            assert trtrun("cancel", first).returncode == 0
            wait_for(lambda: f" requests go on in job {second} at http" in log.read_text(encoding="utf-8"), 60, "more")
            texts = [text_of(each.result(timeout=120)) for each in reading]
            os.kill(engine, signal.SIGCONT)
            wait_for(lambda: cluster.show(first)["JobState"] == "COMPLETED", 60, "the first job ends")
            number = len(asked)
            wait_for(lambda: len(asked) > number, 60, "an answer behind it")
        finally:
            is_over.set()
            with suppress(ProcessLookupError):
                os.kill(engine, signal.SIGCONT)
        asking.result(timeout=120)
        assert set(asked) == {forwarded}
    assert texts == [text_of(stream(name["url"], each, threading.Event())) for each in kinds]
    assert cluster.show(second)["NodeList"] != cluster.show(first)["NodeList"]
    assert trtrun("cancel", second).returncode == 0
    wait_for(lambda: cluster.show(second)["JobState"] == "COMPLETED", 60, "the job ends")
    assert f"job {second} COMPLETED" in trtrun("status", second).stdout
    assert len(cluster.ranks(second)) == 0 and not name_file.exists()


def test_a_server_listens_on_a_socket_that_no_other_user_opens(cluster: Cluster, trtrun: Run, config: Config) -> None:
    """Where nobody says where else; `trtrun cancel` ends it."""
    done = trtrun("submit", "--config", config(1, kv_cache={"max_tokens": 4096}), "--", "serve")
    assert done.returncode == 0, done.stderr
    job = int(done.stdout)
    assert f"trtrun: where it listens, once it does: trtrun status {job}\n" in done.stderr
    told = find_served(cluster, trtrun, job, "unix")
    path = unquote(urlsplit(told["served"]).path)
    assert path.endswith(f"/trtrun-{job}.sock") and Path(path).stat().st_mode & 0o777 == 0o600
    assert told["reach"].startswith(f"ssh -N -L 8000:{shlex.quote(path)} ") and "n1" in told["reach"]
    curl = ["bash", "-c", f"{told['there']} --silent --fail"]
    assert json.loads(subprocess.run(curl, capture_output=True, check=True).stdout)["data"][0]["id"] == "target"
    assert trtrun("cancel", job).returncode == 0
    wait_for(lambda: cluster.show(job)["JobState"] == "COMPLETED", 60, "the job ends")
    assert f"job {job} COMPLETED" in trtrun("status", job).stdout
    assert len(cluster.ranks(job)) == 0 and not Path(path).exists()


def test_what_cannot_be_served_is_told_before_submission(trtrun: Run, config: Config) -> None:
    done = trtrun("submit", "--config", config(1), "--", "serve", "--http-prot", "0")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
