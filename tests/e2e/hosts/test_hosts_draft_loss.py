"""A draft rank on another host is lost, or its whole host: drafts are lost, and nothing else."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from network import wait_for
from two_hosts import PATIENCE, Site, rank_of, read_rows, write_rows

pytestmark = pytest.mark.timeout(400)

APART = {"target": {"north": ["cpu:0"]}, "draft": {"south": ["cpu:0"]}}
HEARTBEAT_SECONDS = 5


def kill_rank(site: Site) -> None:
    (process,) = [process for process in site.network["south"].processes() if rank_of(process) == 1]
    os.kill(process, signal.SIGKILL)


def cut_off(site: Site) -> None:
    site.network["south"].cut_off()


@pytest.fixture(scope="module")
def undisturbed() -> list[list[dict[str, Any]]]:
    """Rows of a run without drafts, which nobody disturbs, once there are any: they are the same for all."""
    return []


@pytest.mark.parametrize("lose", [kill_rank, cut_off])
def test_the_run_goes_on_without_drafts(
    two_hosts: Site, folder: Path, undisturbed: list[list[dict[str, Any]]], lose: Callable[[Site], None]
) -> None:
    rows = [{"prompt": f"def f{place}(", "max_tokens": 80, "temperature": place % 2, "seed": 1} for place in range(24)]
    prompts = write_rows(folder / "prompts.jsonl", rows)
    file = two_hosts.config(
        APART,
        speculation={"ahead": "on"},
        scheduler={"max_batch_size": 4},
        launch={"ssh_arguments": two_hosts.network.ssh_arguments, "heartbeat_seconds": HEARTBEAT_SECONDS},
    )
    outputs = folder / "undisturbed.jsonl", folder / "lost.jsonl"
    words = ("run", "--config", file, "--prompts", prompts, "--ignore-eos", "--output")
    if not undisturbed:  # in one process
        plainly = ("run", "--config", two_hosts.config({"target": ["cpu:0"]}), *words[3:])
        done = two_hosts.trtrun(*plainly, outputs[0])
        assert done.returncode == 0, done.stderr
        undisturbed.append(read_rows(outputs[0]))
    process = two_hosts.start(*words, outputs[1])
    working = outputs[1].with_name("lost.jsonl.partial")
    try:
        wait_for(lambda: working.exists() and working.read_bytes().count(b"\n") > 3, 60, lambda: "no row is written")
        lose(two_hosts)
        _, errors = process.communicate(timeout=PATIENCE)
    finally:
        two_hosts.network["south"].connect()
        process.kill()
        process.communicate()
    assert process.returncode == 0, errors
    (line,) = [line for line in errors.splitlines() if "lost" in line]
    assert "draft rank 1 (south cpu:0) is lost" in line and line.endswith("the job goes on without drafts")
    assert read_rows(outputs[1]) == undisturbed[0]
    two_hosts.expect_nothing_left(seconds=180)
