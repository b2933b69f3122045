"""How `trtrun serve` is let in to and how it ends: drains, keys, TLS, time limits, and what is refused at the start."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import ssl
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from forked_commands import shared_commands
from servers import ONE_PROCESS, PATIENCE, PLAIN, THREE_RANKS, Server, serving, write_config

from scripts.harness.processes import ROOT, server_environment

pytestmark = pytest.mark.timeout(300)
SECRET = "a secret of the prompt"
LONG: dict[str, Any] = {"model": "pair", "prompt": SECRET, "temperature": 0, "max_tokens": 300, "ignore_eos": True}
SHORT: dict[str, Any] = {**LONG, "max_tokens": 1}
SETTINGS: dict[str, Any] = {"scheduler": {"max_batch_size": 1}, "kv_cache": {"max_tokens": 2048}}


def stream(server: Server, values: dict[str, Any], begun: threading.Event) -> list[Any]:
    """All events of a stream."""
    found: list[Any] = []
    with httpx.stream(
        "POST", server.url + "/v1/completions", json=values | {"stream": True}, timeout=PATIENCE, verify=PLAIN
    ) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: "):
                begun.set()
                found.append(line.removeprefix("data: "))
    return [json.loads(event) if event != "[DONE]" else event for event in found]


def drain(server: Server, values: dict[str, Any]) -> tuple[list[Any], int]:
    """Send SIGTERM while a stream runs; its events, and how the server ended."""
    begun = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(stream, server, values, begun)
        assert begun.wait(PATIENCE)
        server.process.send_signal(signal.SIGTERM)
        server.wait_for("SIGTERM: no more requests are let in, the 1 in work have")
        health = server.get("/health")
        told = health.json()
        assert health.status_code == 503 and told.pop("phases") and told == {"status": "server_ending"}
        refused = server.post("/v1/completions", SHORT)
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "server_ending"
        return reading.result(timeout=PATIENCE), server.wait_ended()


def test_the_first_signal_drains_and_the_status_is_0(pair: Path, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    config = write_config(tmp_path / "serve.yaml", pair, ONE_PROCESS, **SETTINGS)
    with serving(config, "--log-dir", str(logs), "--http-port", "0") as server:
        events, status = drain(server, LONG)
        assert status == 0 and events[-1] == "[DONE]"
        assert events[-2]["choices"][0]["finish_reason"] == "length"
    written = {file.name: file.read_text() for file in logs.iterdir()}
    assert len(written) == 2 and any(name.startswith("front-") for name in written)
    assert "POST /v1/completions: 503" in "".join(written.values())
    assert SECRET not in "".join(written.values()) + "".join(server.lines)


def test_what_does_not_finish_in_time_ends_with_an_error_and_status_3(pair: Path, tmp_path: Path) -> None:
    settings = SETTINGS | {"launch": {"drain_seconds": 3}}  # long enough to be asked twice meanwhile
    with serving(write_config(tmp_path / "serve.yaml", pair, ONE_PROCESS, **settings)) as server:
        events, status = drain(server, LONG | {"n": 60})
        assert events[-2]["error"]["code"] == "server_ending" and events[-1] == "[DONE]"
        assert status == 3


def test_the_second_signal_ends_at_once(pair: Path, tmp_path: Path) -> None:
    with serving(write_config(tmp_path / "serve.yaml", pair, ONE_PROCESS, **SETTINGS)) as server:
        begun = threading.Event()
        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(stream, server, LONG | {"n": 60}, begun)
            assert begun.wait(PATIENCE)
            server.process.send_signal(signal.SIGTERM)
            server.wait_for("SIGTERM: no more requests")
            server.process.send_signal(signal.SIGTERM)
            assert server.wait_ended() == 128 + signal.SIGTERM
            with pytest.raises(httpx.HTTPError):
                reading.result(timeout=PATIENCE)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate of 127.0.0.1 that is its own authority, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl: install the package openssl")
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=test", "-addext",
         "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)],
        check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    return cert, key


def test_keys_tls_and_the_time_of_a_request(pair: Path, tmp_path: Path, certificate: tuple[Path, Path]) -> None:
    keys = tmp_path / "keys"
    keys.write_text("first\n\nsecond\n")
    cert, key = certificate
    config = write_config(
        tmp_path / "serve.yaml", pair, ONE_PROCESS, **SETTINGS, server={"request_timeout_s": 1.5, "host": "0.0.0.0"}
    )
    words = ["--api-key-file", str(keys), "--tls-cert", str(cert), "--tls-key", str(key)]
    with serving(config, *words) as server:
        assert server.url.startswith("https://") and not [line for line in server.lines if "WARNING" in line]
        url = server.url.replace("0.0.0.0", "127.0.0.1")
        context = ssl.create_default_context(cafile=str(cert))
        with httpx.Client(base_url=url, verify=context, timeout=PATIENCE) as client:
            for sent in (
                {},
                {"authorization": "Bearer third"},
                {"authorization": "first"},
                {"authorization": "Bearer"},
            ):
                for answer in (client.get("/v1/models", headers=sent), client.post("/v1/completions", headers=sent)):
                    assert answer.status_code == 401, sent
                    assert answer.json()["error"]["code"] == "invalid_api_key"
            assert client.get("/health").status_code == 200
            client.headers["authorization"] = "Bearer second"
            assert client.get("/v1/models").status_code == 200
            late = client.post("/v1/completions", json=LONG | {"n": 60})
            assert late.status_code == 504 and "server.request_timeout_s" in late.json()["error"]["message"]
            assert client.post("/v1/completions", json=SHORT).status_code == 200
            with client.stream("POST", "/v1/completions", json=LONG | {"n": 60, "stream": True}) as answer:
                events = [line for line in answer.iter_lines() if line]
            assert events[-1] == "data: [DONE]" and '"code":"timeout"' in events[-2]


def run_refused(*arguments: object, environment: dict[str, str] | None = None) -> str:
    """The one line of a server that does not start."""
    words = ["serve", *map(str, arguments)]
    done = shared_commands().run(words, server_environment(environment or {}), ROOT, PATIENCE)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    return line


def test_what_is_wrong_at_the_start_is_one_line_and_status_2(pair: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path / "serve.yaml", pair, ONE_PROCESS)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = run_refused("--config", config, "--http-port", port)
    assert line.endswith(f"cannot listen on 127.0.0.1 port {port}: Address already in use; 0 takes a free one")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--tls-cert", "x"], "TLS needs server.tls_cert and server.tls_key, both"),
        (["--tls-cert", "/nowhere", "--tls-key", "y"], "server.tls_cert /nowhere cannot be read"),
        (["--api-key-file", "/nowhere"], "/nowhere cannot be read"),
        (["--api-key-file", "/dev/null"], "/dev/null holds no API key"),
        (["--http-port", "70000"], "server.http_port"),
        (["--set", "server.http_prot=5"], "did you mean 'http_port'?"),
        (["--set", "scheduler.max_waiting=5"], "a server's queue has its limit in server.max_queue"),
        (["--set", "target.model=/nowhere"], "/nowhere"),
        (["--host", "999.0.0.1"], "cannot listen on 999.0.0.1"),
    ],
)
def test_more_that_is_wrong_at_the_start(pair: Path, tmp_path: Path, words: list[str], text: str) -> None:
    assert text in run_refused("--config", write_config(tmp_path / "serve.yaml", pair, ONE_PROCESS), *words)


def test_an_engine_that_cannot_start_ends_the_server_with_its_status(pair: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path / "serve.yaml", pair, THREE_RANKS)
    server = Server(config, "--set", "launch.mpirun=/nowhere/mpirun")
    try:
        assert server.wait_ended() == 2
        assert server.lines == ["trtrun: launch.mpirun: /nowhere/mpirun is no program"]
    finally:
        server.end()


def test_an_open_address_without_keys_is_told_loudly(pair: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path / "serve.yaml", pair, ONE_PROCESS, **SETTINGS)
    with serving(config, "--host", "0.0.0.0") as server:
        assert [line for line in server.lines if "WARNING" in line and "server.api_key_file" in line]


@pytest.mark.parametrize(
    ("keys", "words", "expected"),
    [
        ("one\n", ("method=suffix", "suffix_decoding_max_cached_requests=9"), []),
        ("one\ntwo\n", ("method=suffix", "suffix_decoding_max_cached_requests=9"), ["answers to one API key are"]),
        ("one\ntwo\n", ("method=token_recycling",), ["what the target held likely for one API key is"]),
    ],
)
def test_what_keys_share_is_told(
    pair: Path, tmp_path: Path, keys: str, words: tuple[str, ...], expected: list[str]
) -> None:
    (tmp_path / "keys").write_text(keys)
    config = write_config(tmp_path / "serve.yaml", pair, ONE_PROCESS, **SETTINGS)
    settings = [word for setting in words for word in ("--set", f"speculation.{setting}")]
    with serving(config, "--api-key-file", str(tmp_path / "keys"), *settings) as server:
        told = [line for line in server.lines if "who may tell by their speed" in line]
    assert len(told) == len(expected) and all(part in line for part, line in zip(expected, told, strict=True))


def test_a_wrong_number_of_ranks_is_answered_with_the_right_command(pair: Path, tmp_path: Path) -> None:
    rank = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}
    config = write_config(tmp_path / "serve.yaml", pair, ONE_PROCESS)
    line = run_refused("--config", config, environment=rank)
    assert "the devices need 1 ranks" in line and "but 2 were started; run: " in line and "launch.cli serve" in line
