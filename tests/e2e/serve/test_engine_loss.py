"""Engines that are killed while streams run: the streams go on with their exact texts, or end with one clear error."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from mmap import mmap
from pathlib import Path
from typing import Any

import pytest
from servers import ONE_PROCESS, THREE_RANKS, Server, serving, wait_until, write_config
from streams import Streamed, reading

from scripts.harness.processes import is_alive
from trtrun import LLM, SamplingParams

pytestmark = pytest.mark.timeout(400)
LONG: dict[str, Any] = {"max_tokens": 100, "ignore_eos": True, "logprobs": 1}
GREEDY: dict[str, Any] = {**LONG, "temperature": 0.0}
SEEDED: dict[str, Any] = {**LONG, "temperature": 0.8, "seed": 3, "n": 2, "repetition_penalty": 1.1, "stop": ["zqzq"]}
DEADLY = [3, 1, 4, 1, 5]
"""Tokens of a prompt of which engines of a program with a defect die."""
SETTINGS: dict[str, Any] = {"scheduler": {"max_batch_size": 4}, "kv_cache": {"max_tokens": 8192}}


@pytest.fixture(scope="module")
def start_shared(pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Server]]:
    """Return start(name, **sections): the server of three ranks of that name, started where none of it runs."""
    with ExitStack() as stack:
        running: dict[str, Server] = {}

        def start(name: str, **sections: Any) -> Server:
            server = running.get(name)
            if server is None or server.process.poll() is not None:
                config = write_config(tmp_path_factory.mktemp(name) / "serve.yaml", pair, THREE_RANKS, **sections)
                server = running[name] = stack.enter_context(serving(config, "--set", "server.max_restarts=100"))
            return server

        yield start


@pytest.fixture
def three_ranks(start_shared: Callable[..., Server]) -> Server:
    """A server whose engine is killed by test after test."""
    return start_shared("killed", **SETTINGS)


@pytest.fixture
def three_watched_ranks(start_shared: Callable[..., Server]) -> Server:
    """A server whose engine hangs by test after test, and which soon hears of it."""
    return start_shared("hanging", **SETTINGS, launch={"heartbeat_seconds": 3})


def count_restarts(server: Server) -> int:
    """Engines that the server has started again so far; nothing runs then."""
    return int(server.wait_idle()["trtrun:engine_restarts_total"])


def check_streams_over(server: Server, llm: LLM, losses: list[Callable[[], int]]) -> None:
    """Streams and a plain request, during which processes are killed."""
    restarts = count_restarts(server)
    streams = [Streamed(server, f"def f{number}(", GREEDY if number % 2 else SEEDED) for number in range(3)]
    plain = {"model": "pair", "prompt": "import", **GREEDY}
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.post, "/v1/completions", plain)
        with reading(*streams):
            for number, victim in enumerate(losses):
                wait_until(lambda: server.get("/health").is_success or None, "an engine")
                wait_for_tokens(streams)
                os.kill(victim(), signal.SIGKILL)
                server.wait_for(f"({restarts + number + 1} of ")
                assert server.get("/health").status_code == 503
                refused = server.post("/v1/completions", plain)
                assert refused.status_code == 503 and refused.headers["retry-after"]
    for stream in streams:
        stream.check(llm)
    (output,) = llm.generate(["import"], SamplingParams(**GREEDY))
    assert answer.result().json()["choices"][0]["text"] == output.completions[0].text
    metrics = server.wait_idle()
    assert metrics["trtrun:engine_restarts_total"] == restarts + len(losses)
    assert metrics["vllm:kv_cache_usage_perc"] == 0
    assert server.get("/health").status_code == 200


def wait_for_tokens(streams: list[Streamed]) -> None:
    """Until each stream that goes on has more than it has now: one that loses engines without a token in between is
    suspected of ending them."""
    before = [stream.num_tokens for stream in streams]
    for stream, count in zip(streams, before, strict=True):
        wait_until(lambda s=stream, c=count: s.is_over or s.num_tokens > c or None, "another token")  # type: ignore[misc]


def num_blocks(server: Server) -> int:
    """Of the KV store of the engine that is there."""
    (found,) = [name for name in server.metrics() if name.startswith("vllm:cache_config_info")]
    return int(found.partition('num_gpu_blocks="')[2].partition('"')[0])


@contextmanager
def memory_in_use(num_bytes: int) -> Iterator[None]:
    """Another program takes memory, and has it meanwhile."""
    with mmap(-1, num_bytes) as memory:
        memory.write(b"1" * num_bytes)
        yield


def test_an_engine_of_one_process_is_killed_every_stream_goes_on_and_too_many_losses_end_the_server(
    pair: Path, tmp_path: Path, llm: LLM
) -> None:
    # Far fewer blocks than the rows could use, and by the memory that is free: the first engine's number stays.
    settings = {"scheduler": {"max_batch_size": 64}, "kv_cache": {"free_memory_fraction": 0.02}}
    config = write_config(tmp_path / "serve.yaml", pair, ONE_PROCESS, **settings)
    environment = {"DEADLY_PROMPT": " ".join(map(str, DEADLY))}
    with serving(config, program=["tests/e2e/serve/programs/deadly_prompt.py"], environment=environment) as server:
        room = num_blocks(server)
        with memory_in_use(1 << 28):
            check_streams_over(server, llm, [server.engine, server.engine])
        assert num_blocks(server) == room
        # One restart is left. A prompt of which engines die alone takes two, which do not count, and then another two.
        for number in (4, 6):
            answer = server.post("/v1/completions", {"model": "pair", "prompt": DEADLY})
            assert answer.status_code == 500
            assert "ended 2 times in a row while it had this request alone" in answer.json()["error"]["message"]
            wait_until(lambda: server.get("/health").is_success or None, "an engine")
            assert server.wait_idle()["trtrun:engine_restarts_total"] == number
        stream = Streamed(server, "def f(", GREEDY)
        with reading(stream):
            os.kill(server.engine(), signal.SIGKILL)
            server.wait_for("(3 of 3 ")
        stream.check(llm)
        # The next loss ends the server, with the cause.
        stream = Streamed(server, "x", GREEDY)
        with reading(stream):
            os.kill(server.engine(), signal.SIGKILL)
        assert [error["code"] for error in stream.errors] == ["server_ending"]
        assert server.wait_ended() == 1
        assert server.lines[-1].startswith(
            "trtrun: the engine was ended by SIGKILL, and was started again 3 of 3 within"
        )
        assert server.lines[-1].endswith("the server ends")


def test_a_request_that_ends_engines_behind_logits_of_its_prompt_costs_no_other(
    pair: Path, tmp_path: Path, llm: LLM
) -> None:
    """The third engine gets it alone, until it has a token; logits of its prompt are none."""
    scheduler = {"max_batch_size": 1, "max_num_tokens": 8}  # a prompt of two rounds
    config = write_config(tmp_path / "serve.yaml", pair, ONE_PROCESS, **SETTINGS | {"scheduler": scheduler})
    deadly = {"input_ids": DEADLY * 2, "input_lengths": 10, "request_output_len": 4, "return_context_logits": True}
    environment = {"DEADLY_PROMPT": " ".join(map(str, DEADLY))}
    program = ["tests/e2e/serve/programs/deadly_prompt.py"]
    with serving(config, program=program, environment=environment) as server, ThreadPoolExecutor(2) as pool:
        with server.engine_stopped():
            ending = pool.submit(server.post, "/v2/models/tensorrt_llm/generate", deadly)
            wait_until(lambda: num_requests(server) == 1 or None, "the request that ends engines")
            waiting = pool.submit(server.post, "/v1/completions", {"model": "pair", "prompt": "import", **GREEDY})
            wait_until(lambda: num_requests(server) == 2 or None, "the one behind it")
        assert ending.result().status_code == 500
        assert "ended 3 times in a row while it had this request" in ending.result().json()["error"]
        (output,) = llm.generate(["import"], SamplingParams(**GREEDY))
        assert waiting.result().status_code == 200, waiting.result().text
        assert waiting.result().json()["choices"][0]["text"] == output.completions[0].text


def num_requests(server: Server) -> int:
    """In work, as the frontend knows it."""
    return int(server.get("/status").json()["queue"]["requests"])


def test_an_engine_of_one_process_hangs_and_every_stream_goes_on(pair: Path, tmp_path: Path, llm: LLM) -> None:
    """Nobody is beside it but the frontend."""
    config = write_config(tmp_path / "serve.yaml", pair, ONE_PROCESS, **SETTINGS, launch={"heartbeat_seconds": 3})
    with serving(config) as server:
        stream = Streamed(server, "def f(", SEEDED)
        with reading(stream):
            os.kill(server.engine(), signal.SIGSTOP)
            server.wait_for("hangs: it is silent for 3 s, last seen ")
            assert server.get("/health").status_code == 503
            assert server.metrics()["trtrun:engine_up"] == 0
        stream.check(llm)
        server.wait_for("the engine was ended by SIGKILL; it is started again (1 of ")
        assert server.wait_idle()["trtrun:engine_restarts_total"] == 1


def test_whatever_is_killed_every_stream_goes_on(three_ranks: Server, llm: LLM) -> None:
    check_streams_over(three_ranks, llm, [lambda: three_ranks.rank(0), three_ranks.engine])  # which takes mpirun along


def test_ranks_that_are_killed_while_they_start_again_cost_no_stream(three_ranks: Server, llm: LLM) -> None:
    restarts = count_restarts(three_ranks)
    stream = Streamed(three_ranks, "def f(", SEEDED)
    with reading(stream):
        os.kill(three_ranks.rank(2), signal.SIGKILL)
        three_ranks.wait_for(f"({restarts + 1} of ")
        os.kill(three_ranks.rank(1), signal.SIGKILL)  # of those that are only starting
        three_ranks.wait_for(f"({restarts + 2} of ")
    stream.check(llm)
    assert count_restarts(three_ranks) == restarts + 2
    assert any("target rank 2 (cpu:1) was killed by signal 9" in line for line in three_ranks.lines)


def test_a_lost_draft_rank_costs_drafts_alone(three_ranks: Server, llm: LLM) -> None:
    before = three_ranks.wait_idle()
    stream = Streamed(three_ranks, "def f(", GREEDY)
    with reading(stream):
        os.kill(three_ranks.rank(1), signal.SIGKILL)
    stream.check(llm)
    Streamed(three_ranks, "def g(", GREEDY).read().check(llm)  # the first may have been over before the rank was
    metrics = three_ranks.wait_idle()
    assert metrics["trtrun:draft_losses_total"] == before["trtrun:draft_losses_total"] + 1
    assert metrics["trtrun:engine_restarts_total"] == before["trtrun:engine_restarts_total"]
    three_ranks.process.send_signal(signal.SIGINT)
    assert three_ranks.wait_ended() == 0


def test_a_rank_0_that_hangs_is_found_by_its_workers(three_watched_ranks: Server, llm: LLM) -> None:
    server, restarts = three_watched_ranks, count_restarts(three_watched_ranks)
    stream = Streamed(server, "def f(", GREEDY)
    with reading(stream):
        os.kill(server.rank(0), signal.SIGSTOP)
        server.wait_for("orchestrator rank 0 (host) failed: silent for 3 s")
        server.wait_for(f"it is started again ({restarts + 1} of ")
    stream.check(llm)


def test_a_rank_that_hangs_is_told_once_and_every_stream_goes_on(three_watched_ranks: Server, llm: LLM) -> None:
    server, restarts = three_watched_ranks, count_restarts(three_watched_ranks)
    num_lines = len(server.lines)
    streams = [Streamed(server, f"def f{number}(", GREEDY if number % 2 else SEEDED) for number in range(3)]
    with reading(*streams):
        os.kill(server.rank(2), signal.SIGSTOP)
        server.wait_for(f"it is started again ({restarts + 1} of ")
    for stream in streams:
        stream.check(llm)
    said = server.lines[num_lines:]
    assert len([line for line in said if "target rank 2 (cpu:1) failed: silent for 3 s" in line]) == 1
    # The stack of rank 0 is that of the thread that runs the rounds, and nothing else went wrong.
    assert any("in step" in line for line in said)
    assert not [line for line in said if "Traceback" in line]


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_is_killed_while_it_first_starts_ends_the_server(pair: Path, tmp_path: Path, rank: int) -> None:
    server = Server(write_config(tmp_path / "serve.yaml", pair, THREE_RANKS, **SETTINGS))
    try:
        os.kill(server.rank(rank), signal.SIGKILL)
        assert server.wait_ended() == 128 + signal.SIGKILL
        (line,) = server.lines
        assert f"rank {rank} " in line and "was killed by signal 9 (SIGKILL)" in line
    finally:
        server.end()


def test_an_engine_that_is_killed_in_a_drain_is_started_again(pair: Path, tmp_path: Path, llm: LLM) -> None:
    settings = SETTINGS | {"launch": {"drain_seconds": 1000}}
    with serving(write_config(tmp_path / "serve.yaml", pair, ONE_PROCESS, **settings)) as server:
        stream = Streamed(server, "def f(", SEEDED)
        with reading(stream):
            server.process.send_signal(signal.SIGTERM)
            server.wait_for("SIGTERM: no more requests are let in, the 1 in work have")
            os.kill(server.engine(), signal.SIGKILL)
            server.wait_for("it is started again (1 of ")
        stream.check(llm)
        assert server.wait_ended() == 0


def test_a_configuration_that_changed_ends_the_server(pair: Path, tmp_path: Path) -> None:
    """Streams must not go on with other models."""
    config = write_config(tmp_path / "serve.yaml", pair, ONE_PROCESS, **SETTINGS)
    with serving(config) as server:
        write_config(config, pair, ONE_PROCESS, **{**SETTINGS, "scheduler": {"max_batch_size": 5}})
        os.kill(server.engine(), signal.SIGKILL)
        assert server.wait_ended() == 1
        assert "the configuration has changed while it was served" in server.lines[-1]


def test_a_front_that_is_killed_leaves_no_process_and_no_file(
    pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    with serving(write_config(tmp_path / "serve.yaml", pair, THREE_RANKS, **SETTINGS), is_forked=False) as server:
        processes = [server.engine(), *(server.rank(rank) for rank in range(3))]
        server.process.kill()
        for process in processes:
            wait_until(lambda process=process: None if is_alive(process) else True, f"the end of {process}")  # type: ignore[misc]
    assert not list(temporary.iterdir())
