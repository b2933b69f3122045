"""Engines that are killed while streams run: the streams go on with their exact texts, or end with one clear error."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from servers import ONE_PROCESS, PATIENCE, THREE_RANKS, Server, children_of, is_alive, serving, wait_until, write_config

from trtrun import LLM, SamplingParams

pytestmark = pytest.mark.timeout(400)
LONG: dict[str, Any] = {"max_tokens": 100, "ignore_eos": True, "logprobs": 1}
GREEDY: dict[str, Any] = {**LONG, "temperature": 0.0}
SEEDED: dict[str, Any] = {**LONG, "temperature": 0.8, "seed": 3, "n": 2, "repetition_penalty": 1.1, "stop": ["zqzq"]}
SETTINGS: dict[str, Any] = {"scheduler": {"max_batch_size": 4}, "kv_cache": {"max_tokens": 8192}}


class Streamed:
    """A streaming request that is read as it comes."""

    def __init__(self, server: Server, prompt: str, options: dict[str, Any]) -> None:
        values = {"model": "pair", "prompt": prompt, **options}
        self._values = values | {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
        self._url = server.url + "/v1/completions"
        self.tokens: dict[int, list[int]] = {}
        self.texts: dict[int, str] = {}
        self.num_logprobs = 0
        self.errors: list[dict[str, Any]] = []
        self.last: dict[str, Any] = {}
        self.has_begun = threading.Event()

    def read(self) -> Streamed:
        """Read to the end."""
        with httpx.stream("POST", self._url, json=self._values, timeout=PATIENCE) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    self._take(json.loads(line.removeprefix("data: ")))
        return self

    def _take(self, chunk: dict[str, Any]) -> None:
        if "error" in chunk:
            self.errors.append(chunk["error"])
            return
        self.last = chunk
        for choice in chunk["choices"]:
            index = choice["index"]
            self.tokens.setdefault(index, []).extend(choice["token_ids"])
            self.texts[index] = self.texts.get(index, "") + choice["text"]
            self.num_logprobs += len((choice["logprobs"] or {"tokens": ()})["tokens"])
            if len(self.tokens[index]) >= 8:
                self.has_begun.set()

    def check(self, llm: LLM) -> None:
        """Compare it with what nobody has disturbed, and its counters with itself."""
        assert not self.errors
        options = {name: value for name, value in self._values.items() if name in SamplingParams.__dataclass_fields__}
        (output,) = llm.generate([self._values["prompt"]], SamplingParams(**options))
        for completion in output.completions:
            assert tuple(self.tokens[completion.index]) == completion.token_ids
            assert self.texts[completion.index] == completion.text
        total = sum(map(len, self.tokens.values()))
        assert self.last["usage"]["completion_tokens"] == self.num_logprobs == total
        speculation = self.last["metrics"]["speculative_decoding"]
        num_first = total - speculation["num_spec_steps"] - speculation["num_accepted_draft_tokens"]
        # Each round gives a token beside the accepted ones, and so does the prefill of each engine. The last round may
        # give too many.
        assert len(self.tokens) * -5 < num_first <= len(self.tokens) * 3


def check_streams_over(server: Server, llm: LLM, losses: list[Callable[[], int]]) -> None:
    """Streams and a plain request, during which processes are killed."""
    streams = [Streamed(server, f"def f{number}(", GREEDY if number % 2 else SEEDED) for number in range(3)]
    plain = {"model": "pair", "prompt": "import", **GREEDY}
    with ThreadPoolExecutor(8) as pool:
        reading = [pool.submit(stream.read) for stream in streams]
        answer = pool.submit(server.post, "/v1/completions", plain)
        for stream in streams:
            assert stream.has_begun.wait(PATIENCE)
        for number, victim in enumerate(losses):
            wait_until(lambda: httpx.get(server.url + "/health").is_success or None, "an engine")
            os.kill(victim(), signal.SIGKILL)
            server.wait_for(f"({number + 1} of ")
            assert httpx.get(server.url + "/health").status_code == 503
            refused = server.post("/v1/completions", plain)
            assert refused.status_code == 503 and refused.headers["retry-after"]
        for future in reading:
            future.result(timeout=PATIENCE).check(llm)
    (output,) = llm.generate(["import"], SamplingParams(**GREEDY))
    assert answer.result().json()["choices"][0]["text"] == output.completions[0].text
    metrics = server.wait_idle()
    assert metrics["trtrun:engine_restarts_total"] == len(losses)
    assert metrics["vllm:kv_cache_usage_perc"] == 0
    assert httpx.get(server.url + "/health").status_code == 200


def test_a_killed_target_rank_costs_no_stream_and_too_many_end_the_server(pair: Path, tmp_path: Path, llm: LLM) -> None:
    config = write_config(tmp_path / "serve.yaml", pair, THREE_RANKS, **SETTINGS)
    with serving(config, "--set", "server.max_restarts=1") as server:
        check_streams_over(server, llm, [lambda: server.rank(2)])
        assert any("target rank 2 (cpu:1) was killed by signal 9" in line for line in server.lines)
        # The one restart is used up: the next loss ends the server, with the cause.
        stream = Streamed(server, "x", GREEDY)
        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(stream.read)
            assert stream.has_begun.wait(PATIENCE)
            os.kill(server.rank(2), signal.SIGKILL)
            reading.result(timeout=PATIENCE)
        assert [error["code"] for error in stream.errors] == ["server_ending"]
        assert server.wait_ended() == 1
        assert server.lines[-1].startswith(
            "trtrun: the engine was ended by SIGKILL, and was started again 1 of 1 within"
        )
        assert server.lines[-1].endswith("the server ends")


@pytest.mark.long
def test_an_engine_of_one_process_is_killed_and_every_stream_goes_on(pair: Path, tmp_path: Path, llm: LLM) -> None:
    with serving(write_config(tmp_path / "serve.yaml", pair, ONE_PROCESS, **SETTINGS)) as server:
        check_streams_over(server, llm, [server.engine, server.engine])


@pytest.mark.long
@pytest.mark.parametrize("victim", ["rank 0", "mpirun", "parent of mpirun"])
def test_whatever_is_killed_every_stream_goes_on(pair: Path, tmp_path: Path, llm: LLM, victim: str) -> None:
    with serving(write_config(tmp_path / "serve.yaml", pair, THREE_RANKS, **SETTINGS)) as server:
        victims: dict[str, Callable[[], int]] = {
            "rank 0": lambda: server.rank(0),
            "mpirun": lambda: children_of(server.engine())[0],
            "parent of mpirun": server.engine,
        }
        check_streams_over(server, llm, [victims[victim]] * 2)


@pytest.mark.long
def test_a_lost_draft_rank_costs_drafts_alone(pair: Path, tmp_path: Path, llm: LLM) -> None:
    with serving(write_config(tmp_path / "serve.yaml", pair, THREE_RANKS, **SETTINGS)) as server:
        stream = Streamed(server, "def f(", GREEDY)
        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(stream.read)
            assert stream.has_begun.wait(PATIENCE)
            os.kill(server.rank(1), signal.SIGKILL)
            reading.result(timeout=PATIENCE).check(llm)
        metrics = server.wait_idle()
        assert metrics["trtrun:draft_losses_total"] == 1 and metrics["trtrun:engine_restarts_total"] == 0
        server.process.send_signal(signal.SIGINT)
        assert server.wait_ended() == 0


@pytest.mark.long
def test_a_configuration_that_changed_ends_the_server(pair: Path, tmp_path: Path) -> None:
    """Streams must not go on with other models."""
    config = write_config(tmp_path / "serve.yaml", pair, ONE_PROCESS, **SETTINGS)
    with serving(config) as server:
        write_config(config, pair, ONE_PROCESS, **{**SETTINGS, "scheduler": {"max_batch_size": 5}})
        os.kill(server.engine(), signal.SIGKILL)
        assert server.wait_ended() == 1
        assert "the configuration has changed while it was served" in server.lines[-1]


@pytest.mark.long
def test_the_ranks_end_with_a_front_that_is_killed(pair: Path, tmp_path: Path) -> None:
    with serving(write_config(tmp_path / "serve.yaml", pair, THREE_RANKS, **SETTINGS)) as server:
        processes = [server.engine(), *(server.rank(rank) for rank in range(3))]
        server.process.kill()
        for process in processes:
            wait_until(lambda process=process: None if is_alive(process) else True, f"the end of {process}")  # type: ignore[misc]
