"""Requests that nobody should send: each gets what it asks for, or one line; scripts/serve_fuzz.py sends many more."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from servers import ONE_PROCESS, PATIENCE, ROOT, Server, serving, write_config

sys.path.insert(0, str(ROOT / "scripts"))

from served.odd_requests import (
    Answered,
    Endpoint,
    OddRequest,
    exchange,
    find_fault,
    kserve_endpoints,
    odd_requests,
    openai_endpoints,
)  # fmt: skip

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def server(pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    config = write_config(
        tmp_path_factory.mktemp("fuzz") / "serve.yaml",
        pair,
        ONE_PROCESS,
        scheduler={"max_batch_size": 8, "max_seq_len": 64},
        kv_cache={"max_tokens": 2048},
        server={"max_queue": 24, "max_body_bytes": 1 << 20},
    )
    with serving(config) as server:
        yield server


def send_odd_requests(endpoint: Endpoint, url: str, count: int) -> None:
    """Send some, the same ones each time."""

    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate,),
    )
    @given(request=odd_requests(endpoint))
    def send(request: OddRequest) -> None:
        assert find_fault(request, exchange(url, request, PATIENCE)) is None, request

    send()


def test_odd_requests_are_answered_in_one_line(server: Server) -> None:
    for endpoint in openai_endpoints("pair"):
        url = server.metrics_url.removesuffix("/metrics") if endpoint.is_metrics else server.url
        send_odd_requests(endpoint, url, 60 if endpoint.body is not None else 10)
    for endpoint in kserve_endpoints():
        send_odd_requests(endpoint, server.url, 12 if endpoint.body is not None else 2)
    metrics = server.wait_idle()
    assert metrics["vllm:kv_cache_usage_perc"] == 0
    assert not [line for line in server.lines if "Traceback" in line or "ERROR" in line]


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
