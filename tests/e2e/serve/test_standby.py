"""An engine that stands by while another serves: its ranks are those that go on when that one is lost."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from forked_commands import ranks_below, running_processes
from servers import THREE_RANKS, Server, serving, wait_until, write_config
from streams import Streamed, reading
from test_engine_loss import GREEDY, SEEDED, SETTINGS

from scripts.harness.processes import is_alive, words_of
from trtrun import LLM

pytestmark = pytest.mark.timeout(400)


def ranks_of_engines(server: Server) -> list[dict[int, int]]:
    """Process ids of ranks by rank, of the server's engines that have all of theirs; the oldest first."""
    children, _ = running_processes()
    engines = [process for process in children.get(server.process.pid, []) if "serve-engine" in words_of(process)]
    return [ranks for engine in sorted(engines) if len(ranks := ranks_below(engine)) == 3]


def wait_standing(server: Server, count: int) -> None:
    """Until so many engines have stood by."""
    wait_until(lambda: sum("stands by" in line for line in server.lines) == count or None, "an engine that stands by")


def test_streams_go_on_with_the_ranks_that_stood_by(pair: Path, tmp_path: Path, llm: LLM) -> None:
    config = write_config(tmp_path / "serve.yaml", pair, THREE_RANKS, **SETTINGS, server={"standby": True})
    with serving(config) as server:
        wait_standing(server, 1)
        serving_ranks, standing = ranks_of_engines(server)
        streams = [Streamed(server, "def f(", kind) for kind in (GREEDY, SEEDED)]
        with reading(*streams):
            os.kill(serving_ranks[0], signal.SIGSTOP)  # so that no stream ends meanwhile, however slow this process is
            os.kill(serving_ranks[2], signal.SIGKILL)
            os.kill(serving_ranks[0], signal.SIGCONT)
        for stream in streams:
            stream.check(llm)
        assert all(is_alive(process) for process in standing.values())
        assert not any(is_alive(process) for process in serving_ranks.values())
        wait_until(lambda: server.metrics()["trtrun:engine_restarts_total"] == 1 or None, "a loss that is counted")
        wait_standing(server, 2)  # the first one serves now
        left = [process for ranks in ranks_of_engines(server) for process in ranks.values()]
    assert not any(is_alive(process) for process in left), "the server's end ends what stands by"
    back = [line for line in server.lines if "is up again after" in line]
    assert len(back) == 1 and "communicators" in back[0]
