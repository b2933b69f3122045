"""examples/router: nginx and HAProxy as they are configured there, before two servers, of which tests hold the strings.

A session stays with its server, streams go on as they come, and what a server cannot answer the other one does. One
test has a real server behind them, and openai's client before.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import openai
import pytest
import yaml
from ports import lets_in
from servers import PATIENCE, PLAIN, ROOT, Server, wait_until

from trtrun import LLM, SamplingParams

EXAMPLES = ROOT / "examples" / "router"
PROGRAMS = {
    "nginx": ("nginx.conf", ["-p", "{folder}", "-e", "stderr", "-c", "{file}"]),
    "haproxy": ("haproxy.cfg", ["-f", "{file}"]),
}
SESSIONS = [f"session {number}" for number in range(12)]
Start = Callable[[str, str], str]


class StandIn(ThreadingHTTPServer):
    """A server that answers with its name, or with a status that it is told; of a stream it sends the second piece once
    `second_piece` is set.
    """

    daemon_threads = True

    def __init__(self, name: str) -> None:
        self.name = name
        self.status = 200
        self.second_piece = threading.Event()
        super().__init__(("127.0.0.1", 0), _Answers)
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"

    def end(self) -> None:
        """Be gone; a second time nothing happens."""
        self.second_piece.set()
        self.shutdown()
        self.server_close()


class _Answers(BaseHTTPRequestHandler):
    server: StandIn

    def do_GET(self) -> None:
        """Be well: the health that a router asks for."""
        self._answer(self.server.name.encode())

    def do_POST(self) -> None:
        """Answer at once, or in two pieces."""
        self.rfile.read(int(self.headers["Content-Length"]))
        if self.path != "/stream":
            return self._answer(self.server.name.encode())
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        self.wfile.write(b"data: one\n\n")
        assert self.server.second_piece.wait(PATIENCE)
        self.wfile.write(b"data: two\n\n")

    def _answer(self, body: bytes) -> None:
        self.send_response(self.server.status)
        self.send_header("Content-Length", str(len(body)))
        if self.server.status == 503:
            self.send_header("Retry-After", "7")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def pair_of_servers() -> Iterator[tuple[StandIn, StandIn]]:
    servers = (StandIn("one"), StandIn("two"))
    yield servers
    for server in servers:
        server.end()


@pytest.fixture(params=PROGRAMS)
def route(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Start]:
    """Return start(address, address) -> url of a router before two servers, as its example configures it."""
    program = shutil.which(request.param, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
    if program is None:
        pytest.skip(f"needs {request.param}: install the package {request.param}")
    name, words = PROGRAMS[request.param]
    processes: list[subprocess.Popen[str]] = []

    def start(*addresses: str) -> str:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        text = (EXAMPLES / name).read_text(encoding="utf-8")
        for number, address in enumerate(addresses, 1):
            assert text.count(f"node{number}:8000") == 1
            text = text.replace(f"node{number}:8000", address)
        text, listening = re.subn(r"(listen |bind :)8080", rf"\g<1>{port}", text)
        assert listening == 1
        (tmp_path / name).write_text(text, encoding="utf-8")
        places = {"folder": str(tmp_path), "file": str(tmp_path / name)}
        command = [program, *(word.format(**places) for word in words)]
        processes.append(subprocess.Popen(command, stderr=subprocess.STDOUT, stdout=(tmp_path / "said").open("w")))

        def listens() -> bool | None:
            assert processes[-1].poll() is None, (tmp_path / "said").read_text(encoding="utf-8")
            return lets_in(port) or None

        wait_until(listens, "a router that listens")
        return f"http://127.0.0.1:{port}"

    yield start
    for process in processes:
        process.terminate()
        process.wait(timeout=PATIENCE)


def ask(url: str, session: str | None = None) -> httpx.Response:
    headers = {} if session is None else {"X-Session-Id": session}
    return httpx.post(f"{url}/v1/completions", json={}, headers=headers, timeout=PATIENCE, verify=PLAIN)


def homes(url: str) -> dict[str, str]:
    """The server of each session."""
    return {session: ask(url, session).raise_for_status().text for session in SESSIONS}


def test_a_session_stays_with_its_server_until_that_is_gone(
    route: Start, pair_of_servers: tuple[StandIn, StandIn]
) -> None:
    one, two = pair_of_servers
    url = route(one.address, two.address)
    at_first = homes(url)
    assert set(at_first.values()) == {"one", "two"} and homes(url) == at_first
    assert len({ask(url).text for _ in range(4)}) == 1  # without a session it is the client's address
    one.end()
    assert set(homes(url).values()) == {"two"}
    two.end()
    lost = ask(url)
    assert lost.status_code == 503 and lost.headers["Retry-After"] == "2"
    assert lost.json()["error"]["message"] == "no server answers"


def test_a_server_that_refuses_gives_its_sessions_to_the_other(
    route: Start, pair_of_servers: tuple[StandIn, StandIn]
) -> None:
    one, two = pair_of_servers
    url = route(one.address, two.address)
    of_one = next(session for session, name in homes(url).items() if name == "one")
    one.status = 503
    wait_until(lambda: ask(url, of_one).text == "two" or None, "a session that moves")  # HAProxy looks once a second
    two.status = 503
    refused = ask(url, of_one)
    assert refused.status_code == 503 and refused.headers["Retry-After"] == "7"
    one.status = 200
    wait_until(lambda: ask(url, of_one).text == "one" or None, "a session that is back")


def test_a_stream_comes_piece_by_piece(route: Start, pair_of_servers: tuple[StandIn, StandIn]) -> None:
    one, two = pair_of_servers
    url = route(one.address, two.address)
    with httpx.stream("POST", f"{url}/stream", json={}, timeout=30, verify=PLAIN) as answer:
        lines = answer.iter_lines()
        assert next(lines) == "data: one"  # the second is not sent before
        one.second_piece.set()
        two.second_piece.set()
        assert "data: two" in lines


def test_a_client_of_openais_streams_through_it(
    route: Start, server: Server, llm: LLM, pair_of_servers: tuple[StandIn, StandIn]
) -> None:
    starting = pair_of_servers[0]
    starting.status = 503
    url = route(starting.address, server.url.removeprefix("http://"))
    expected = llm.generate(["def main("], SamplingParams(temperature=0, max_tokens=8))[0].completions[0].text
    for session in SESSIONS[:4]:
        headers = {"X-Session-Id": session}
        with openai.OpenAI(base_url=f"{url}/v1", api_key="-", default_headers=headers, max_retries=0) as client:
            asked = client.completions.create(
                model="pair", prompt="def main(", max_tokens=8, temperature=0, stream=True
            )
            assert "".join(chunk.choices[0].text for chunk in asked if chunk.choices) == expected


def test_prometheus_asks_the_servers_that_the_routers_have() -> None:
    scraped = yaml.safe_load((EXAMPLES / "prometheus.yml").read_text(encoding="utf-8"))
    (job,) = scraped["scrape_configs"]
    hosts = {target.partition(":")[0] for part in job["static_configs"] for target in part["targets"]}
    for name, _ in PROGRAMS.values():
        assert set(re.findall(r"server (?:\w+ )?(\w+):8000", (EXAMPLES / name).read_text(encoding="utf-8"))) == hosts
