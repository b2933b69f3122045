"""Requests and calls that nobody should send: each gets what it asks for, or one line, and afterwards the server gives
the same tokens; scripts/soak/serve_fuzz.py sends many more."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest
from servers import ONE_PROCESS, PATIENCE, Server, serving, write_config
from triton_clients import GREEDY, PROMPT, connected, expected, inputs_of, of_tokens, tokens_of

from scripts.soak.fuzz import try_endpoint, try_method
from scripts.soak.odd_calls import (
    METHODS,
    ODD_BYTES,
    OddCall,
    Outcome,
    cancel_calls,
    cut_calls,
    find_call_fault,
    send_bytes,
)
from scripts.soak.odd_requests import Answered, OddRequest, find_fault, kserve_endpoints, openai_endpoints
from trtrun import LLM

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="module")
def server(pair: Path, logs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    config = write_config(
        tmp_path_factory.mktemp("fuzz") / "serve.yaml",
        pair,
        ONE_PROCESS,
        scheduler={"max_batch_size": 8, "max_seq_len": 64},
        kv_cache={"max_tokens": 2048},
        server={"max_queue": 24, "max_body_bytes": 1 << 20},
    )
    with serving(config, "--log-dir", str(logs)) as server:
        yield server


def check_whole(server: Server, llm: LLM, logs: Path) -> None:
    """Nothing is left of what was sent, nothing has failed, and the tokens are the same as ever."""
    assert server.wait_idle()["vllm:kv_cache_usage_perc"] == 0
    lines = [*server.lines, *(line for file in logs.iterdir() for line in file.read_text().splitlines())]
    assert len(lines) > len(server.lines)
    assert not [line for line in lines if "Traceback" in line or " ERROR " in line]
    tokens = tokens_of(llm, PROMPT)
    (completion,) = expected(llm, PROMPT, GREEDY)
    with connected("grpc", server) as client:
        result = client.infer("tensorrt_llm", inputs_of("grpc", of_tokens(tokens, GREEDY)))
    assert np.array_equal(result.as_numpy("output_ids")[0, 0], [*tokens, *completion.token_ids])


def test_odd_requests_are_answered_in_one_line(server: Server, llm: LLM, logs: Path) -> None:
    for endpoint in openai_endpoints("pair"):
        url = server.metrics_url.removesuffix("/metrics") if endpoint.is_metrics else server.url
        _, fault = try_endpoint(endpoint, url, 24 if endpoint.body is not None else 4, 1)
        assert fault is None, endpoint.path
    for endpoint in kserve_endpoints():
        _, fault = try_endpoint(endpoint, server.url, 6 if endpoint.body is not None else 2, 1)
        assert fault is None, endpoint.path
    check_whole(server, llm, logs)


def test_odd_calls_are_answered_with_a_status_in_one_line(server: Server, llm: LLM, logs: Path) -> None:
    with grpc.insecure_channel(server.grpc_address) as channel:
        for method in METHODS:
            statuses, fault = try_method(channel, method, 48 if "Infer" in method else 6, 1)
            assert fault is None, method
            assert statuses.total() >= 6
    for data in ODD_BYTES:
        send_bytes(server.grpc_address, data, PATIENCE)
    check_whole(server, llm, logs)


def test_calls_that_are_given_up_leave_nothing_behind(server: Server, llm: LLM, logs: Path) -> None:
    aborted = [server.wait_idle()["trtrun:requests_aborted_total"]]
    asyncio.run(cancel_calls(server.grpc_address, 56, 200))
    aborted.append(server.wait_idle()["trtrun:requests_aborted_total"])
    asyncio.run(cut_calls(server.grpc_address, 56, 8))
    aborted.append(server.wait_idle()["trtrun:requests_aborted_total"])
    # Some may have come to their end before: both kinds are seen by themselves, not all calls of a kind.
    assert aborted[0] < aborted[1] < aborted[2], aborted
    check_whole(server, llm, logs)


@pytest.mark.parametrize(
    ("status", "kind", "body"),
    [
        (500, "application/json", b'{"error": {"message": "x"}}'),
        (307, "text/plain", b""),
        (200, "text/plain", b"Traceback (most recent call last)"),
        (200, "text/event-stream", b"data: {}\n\n"),
        (400, "application/json", b'{"error": {"message": "two\\nlines"}}'),
        (400, "text/plain", b""),
        (None, "", b""),
    ],
)
def test_the_judge_sees_what_must_not_be(status: int | None, kind: str, body: bytes) -> None:
    assert (
        find_fault(OddRequest(b"POST /v1/completions HTTP/1.1\r\n\r\n", True), Answered(status, kind, body)) is not None
    )


@pytest.mark.parametrize(
    "outcome",
    [
        Outcome(grpc.StatusCode.INTERNAL, "the server failed; its log says how"),
        Outcome(grpc.StatusCode.UNKNOWN, "Unexpected <class 'ValueError'>"),
        Outcome(grpc.StatusCode.CANCELLED, "x"),
        Outcome(grpc.StatusCode.INVALID_ARGUMENT, ""),
        Outcome(grpc.StatusCode.INVALID_ARGUMENT, "two\nlines"),
        Outcome(grpc.StatusCode.INVALID_ARGUMENT, "Traceback (most recent call last)"),
        Outcome(grpc.StatusCode.OK, "", ("the server failed; its log says how",)),
        Outcome(grpc.StatusCode.OK, "", ("x" * 5000,)),
    ],
)
def test_the_judge_of_calls_sees_what_must_not_be(outcome: Outcome) -> None:
    assert find_call_fault(OddCall("ModelInfer", (b"",)), outcome) is not None
