"""`trtrun serve` under a user's own mpirun: rank 0 holds the frontend and the engine in one process."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
from forked_commands import ranks_below
from servers import PLAIN, THREE_RANKS, Server, serving, wait_until, write_config
from streams import Streamed, reading

from launch.jobs.mpi.library import choose_flavour
from launch.jobs.mpi.mpirun import find_mpirun
from trtrun import LLM, SamplingParams

pytestmark = pytest.mark.timeout(300)
LONG: dict[str, Any] = {"max_tokens": 100, "ignore_eos": True, "temperature": 0.0, "logprobs": 1}
SEEDED: dict[str, Any] = {"max_tokens": 40, "temperature": 0.9, "seed": 5, "n": 3, "stop": ["zqzq"]}
SETTINGS: dict[str, Any] = {"scheduler": {"max_batch_size": 4}, "kv_cache": {"max_tokens": 8192}}


def mpirun(ranks: int) -> list[str]:
    """An mpirun of one's own."""
    choice = choose_flavour("openmpi", os.environ)
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    words = [find_mpirun(choice.flavour, choice.library), *root, "--oversubscribe", "--bind-to", "none"]
    return [*words, "-n", str(ranks)]


def own_rank(server: Server, rank: int) -> int:
    """Process id of a rank below the mpirun."""
    return wait_until(lambda: ranks_below(server.process.pid).get(rank), f"rank {rank}")


def test_rank_0_serves_the_same_texts_and_drains(pair: Path, tmp_path: Path, llm: LLM) -> None:
    config = write_config(tmp_path / "serve.yaml", pair, THREE_RANKS, **SETTINGS)
    with serving(config, launcher=mpirun(3)) as server:
        whole = server.post(
            "/v1/completions", {"model": "pair", "prompt": "import os", **SEEDED, "return_token_ids": True}
        )
        (output,) = llm.generate(["import os"], SamplingParams(**SEEDED))
        told = [(choice["text"], tuple(choice["token_ids"])) for choice in whole.json()["choices"]]
        assert told == [(completion.text, completion.token_ids) for completion in output.completions]
        refused = server.post("/v1/completions", {"model": "pair", "prompt": [5] * 2000})
        assert refused.status_code == 400 and "max_seq_len" in refused.json()["error"]["message"]
        body = {"model": "pair", "prompt": "x", **LONG, "stream": True}
        with httpx.stream("POST", server.url + "/v1/completions", json=body, verify=PLAIN) as given_up:
            next(given_up.iter_lines())
        metrics = server.wait_idle()
        assert metrics["vllm:kv_cache_usage_perc"] == 0 and metrics["trtrun:requests_aborted_total"] == 1
        stream = Streamed(server, "def f(", LONG | {"max_tokens": 600})  # still in work when it is asked below
        with reading(stream):
            os.kill(own_rank(server, 0), signal.SIGTERM)
            server.wait_for("SIGTERM: no more requests are let in, the 1 in work have")
            assert server.get("/health").status_code == 503
        stream.check(llm)
        assert server.wait_ended() == 0


@pytest.mark.parametrize("victim", ["target rank", "mpirun"])
def test_a_kill_ends_the_server_and_every_stream(pair: Path, tmp_path: Path, victim: str) -> None:
    config = write_config(tmp_path / "serve.yaml", pair, THREE_RANKS, **SETTINGS)
    # What the end of mpirun is to its ranks is the kernel's word: those are new programs.
    with serving(config, launcher=mpirun(3), is_forked=victim != "mpirun") as server:
        processes = [own_rank(server, rank) for rank in range(3)]
        victims = {"target rank": processes[2], "mpirun": server.process.pid}
        stream = Streamed(server, "def f(", LONG | {"n": 4})
        try:
            with reading(stream):
                os.kill(victims[victim], signal.SIGKILL)
            assert [error["code"] for error in stream.errors] == ["server_ending"]
        except httpx.TransportError:
            pass  # mpirun was faster than the frontend
        assert server.wait_ended() != 0
        assert not [line for line in server.lines if "Traceback" in line]
        for process in processes:
            wait_until(lambda process=process: True if not Path(f"/proc/{process}").exists() else None, "the end")  # type: ignore[misc]


def test_a_signal_while_the_ranks_start_ends_them(pair: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path / "serve.yaml", pair, THREE_RANKS, **SETTINGS)
    server = Server(config, launcher=mpirun(3))
    try:
        for rank in range(3):
            own_rank(server, rank)
        server.process.send_signal(signal.SIGINT)
        assert server.wait_ended() != 0
    except subprocess.TimeoutExpired:
        pytest.fail("the ranks did not end")
    finally:
        server.end()
