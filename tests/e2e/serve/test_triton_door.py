"""How Triton's front is let in to over gRPC, and how it ends: keys, TLS, time limits, drains."""

from __future__ import annotations

import signal
import socket
import ssl
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import tritonclient.grpc as grpcclient
from servers import ONE_PROCESS, PATIENCE, serving, write_config
from test_serve_ends import certificate, run_refused  # noqa: F401
from triton_clients import GREEDY, PROMPT, StreamReader, connected, expected, inputs_of, of_text, text_of
from tritonclient.utils import InferenceServerException

from trtrun import LLM

pytestmark = pytest.mark.timeout(300)
SETTINGS: dict[str, Any] = {"scheduler": {"max_batch_size": 1}, "kv_cache": {"max_tokens": 2048}}


def status_of(client: Any, values: dict[str, Any], **others: Any) -> str:
    """The status that a request is refused with."""
    with pytest.raises(InferenceServerException) as caught:
        client.infer("ensemble", inputs_of("grpc", values), **others)
    assert "\n" not in str(caught.value)
    return str(caught.value.status())


def test_keys_tls_ids_and_the_time_of_a_request(
    pair: Path,
    tmp_path: Path,
    certificate: tuple[Path, Path],  # noqa: F811
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("first\nsecond\n")
    cert, key = certificate
    limits = {"request_timeout_s": 1.5}
    config = write_config(tmp_path / "serve.yaml", pair, ONE_PROCESS, **SETTINGS, server=limits)
    words = ["--api-key-file", str(keys), "--tls-cert", str(cert), "--tls-key", str(key)]
    short = of_text("x", {"max_tokens": 1})
    logs = tmp_path / "logs"
    with serving(config, *words, "--log-dir", str(logs)) as server:
        with grpcclient.InferenceServerClient(server.grpc_address, ssl=True, root_certificates=str(cert)) as client:
            assert client.is_server_live() and client.is_server_ready()
            unauthenticated = str(grpc.StatusCode.UNAUTHENTICATED)
            for headers in ({}, {"authorization": "Bearer third"}, {"authorization": "second"}):
                assert status_of(client, short, headers=headers) == unauthenticated
                with pytest.raises(InferenceServerException) as caught:
                    client.get_server_metadata(headers=headers)
                assert caught.value.status() == unauthenticated
                with pytest.raises(InferenceServerException, match="API key"):  # as of its form over HTTP
                    client.is_model_ready("ensemble", headers=headers)
            known = {"authorization": "Bearer second", "x-request-id": "mine"}
            assert client.is_model_ready("ensemble", headers=known)
            result = client.infer("ensemble", inputs_of("grpc", short), headers=known)
            assert result.as_numpy("text_output").shape == (1,)
            long = of_text("a secret", {"max_tokens": 900, "end_id": -1, "num_return_sequences": 4})
            assert status_of(client, long, headers=known) == str(grpc.StatusCode.DEADLINE_EXCEEDED)
        with httpx.Client(
            base_url=server.url, verify=ssl.create_default_context(cafile=str(cert)), timeout=PATIENCE
        ) as client:
            for path in ("/v2", "/v2/models/ensemble", "/v2/models/ensemble/ready", "/v2/models/stats"):
                answer = client.get(path)
                assert answer.status_code == 401 and "API key" in answer.json()["error"]
                assert client.get(path, headers={"authorization": "Bearer first"}).status_code == 200
            assert client.get("/v2/health/ready").status_code == 200
            assert client.post("/v2/models/ensemble/generate", json={}).status_code == 401
    written = "".join(file.read_text() for file in logs.iterdir())
    assert "mine: gRPC ModelInfer: OK after" in written and "gRPC ModelInfer: UNAUTHENTICATED" in written
    assert "a secret" not in written + "".join(server.lines)


def test_a_port_that_is_taken_is_one_line(pair: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path / "serve.yaml", pair, ONE_PROCESS)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = run_refused("--config", config, "--grpc-port", port)
    assert f"server.grpc_port: cannot listen on 127.0.0.1 port {port}" in line


def test_the_first_signal_drains(pair: Path, tmp_path: Path, llm: LLM) -> None:
    config = write_config(tmp_path / "serve.yaml", pair, ONE_PROCESS, **SETTINGS)
    with serving(config) as server, connected("grpc", server) as client, connected("grpc", server) as other:
        idle = StreamReader(other)  # a stream without requests holds nobody up
        reader = StreamReader(client)
        options = GREEDY | {"max_tokens": 200, "end_id": -1, "stream": True}
        reader.send("ensemble", of_text(PROMPT, options))
        first = reader.take()
        server.process.send_signal(signal.SIGTERM)
        server.wait_for("no more requests are let in, the 1 in work have")
        assert not idle.client.is_server_ready() and not idle.client.is_model_ready("ensemble")
        assert server.get("/v2/health/ready").status_code == 503
        refused = of_text("x", {"max_tokens": 1})
        assert status_of(idle.client, refused) == str(grpc.StatusCode.UNAVAILABLE)
        text = text_of(first) + "".join(map(text_of, reader.read()))
        (completion,) = expected(llm, PROMPT, GREEDY, max_tokens=200, ignore_eos=True)
        assert text == completion.text
        assert server.wait_ended() == 0
