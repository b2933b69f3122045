"""What all endpoints share: slashes, browsers' scripts, compressed bodies, metrics, and what is said while it ends."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from fronts import NoEngine, WatchedTokenizer, make_frontend

from launch.serve.api.openai.api import OpenAIApi
from launch.serve.application.http_server import make_application, make_metrics_application
from launch.serve.application.status import metrics_route
from launch.serve.frontend.frontend import Frontend
from launch.serve.http.bodies import Bodies
from launch.serve.http.requests import Keys
from trtrun.configuration.config import make_config
from trtrun.errors import ConfigError

BODY = json.dumps({"prompt": "x", "max_tokens": 0}).encode()
PAGE = "https://chat.example"
PREFLIGHT = {
    "origin": PAGE, "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-os",
}  # fmt: skip


class SilentEngine(NoEngine):
    """Says nothing about itself."""

    async def ask_status(self) -> None:
        return None


def frontend_of() -> Frontend:
    return make_frontend(WatchedTokenizer(), SilentEngine())


def ask(
    method: str, path: str, frontend: Frontend | None = None, origins: Sequence[str] = (), keys: Any = (), **others: Any
) -> httpx.Response:
    frontend = frontend or frontend_of()
    told = Keys(keys)
    routes = [*OpenAIApi(frontend, told, Bodies(100_000, 200_000)).routes(), metrics_route(frontend, told)]
    return send(make_application(frontend, routes, origins), method, path, **others)


def send(application: Any, method: str, path: str, **others: Any) -> httpx.Response:
    async def work() -> httpx.Response:
        transport = httpx.ASGITransport(application)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return await client.request(method, path, **others)

    return asyncio.run(asyncio.wait_for(work(), 60))


@pytest.mark.parametrize("path", ["/v1/models/", "/v1/models//", "/health/", "/v1/models/m/"])
def test_slashes_at_the_end_say_nothing(path: str) -> None:
    assert ask("GET", path).status_code == 200
    assert ask("POST", "/v1/completions/", content=BODY).json()["error"]["param"] == "max_tokens"


@pytest.mark.parametrize(
    ("content", "encoding", "status", "line"),
    [
        (gzip.compress(BODY), "gzip", 400, "max_tokens must be at least 1"),
        (zlib.compress(BODY), "Deflate", 400, "max_tokens must be at least 1"),
        (BODY, "identity", 400, "max_tokens must be at least 1"),
        (b"\xef\xbb\xbf" + BODY, "", 400, "max_tokens must be at least 1"),
        (BODY, "gzip", 400, "the body is not gzip, as Content-Encoding says"),
        (gzip.compress(BODY)[:-3], "gzip", 400, "the body is not gzip as a whole"),
        (BODY, "br", 400, "Content-Encoding may be gzip or deflate"),
        (gzip.compress(b" " * 100_001), "gzip", 413, "larger than 100000 bytes"),
        (b"", "gzip", 400, "the body is empty"),
    ],
    ids=["gzip", "deflate", "identity", "mark", "no gzip", "cut", "brotli", "bomb", "empty"],
)
def test_bodies_are_what_their_headers_say(content: bytes, encoding: str, status: int, line: str) -> None:
    answer = ask("POST", "/v1/completions", content=content, headers={"content-encoding": encoding})
    assert answer.status_code == status and line in answer.json()["error"]["message"]


def test_scripts_of_other_pages_are_told_nothing_unless_they_may() -> None:
    answer = ask("GET", "/v1/models", headers={"origin": PAGE})
    assert answer.status_code == 200 and "access-control-allow-origin" not in answer.headers
    assert ask("OPTIONS", "/v1/completions", headers=PREFLIGHT).status_code == 405


@pytest.mark.parametrize(("origins", "told"), [((PAGE, "http://localhost:3000"), PAGE), (("*",), "*")])
def test_scripts_of_pages_that_may_ask_read_answers_and_errors(origins: Sequence[str], told: str) -> None:
    asked = ask("OPTIONS", "/v1/chat/completions", origins=origins, keys=["secret"], headers=PREFLIGHT)
    assert asked.status_code == 200 and asked.headers["access-control-allow-origin"] == told
    assert "x-stainless-os" in asked.headers["access-control-allow-headers"]
    refused = ask("POST", "/v1/completions", origins=origins, keys=["secret"], headers={"origin": PAGE}, content=BODY)
    assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == told
    assert "x-request-id" in refused.headers["access-control-expose-headers"]


def test_scripts_of_a_page_that_is_not_named_may_not() -> None:
    others = {**PREFLIGHT, "origin": "https://other.example"}
    assert ask("OPTIONS", "/v1/completions", origins=[PAGE], headers=others).status_code == 400
    answer = ask("GET", "/v1/models", origins=[PAGE], headers={"origin": "https://other.example"})
    assert "access-control-allow-origin" not in answer.headers


def config_of(origins: Any) -> Any:
    values = {"target": {"model": ".", "devices": ["cpu:0"]}, "draft": {"model": ".", "devices": ["cpu:0"]}}
    return make_config({**values, "server": {"allowed_origins": origins}}, Path())


@pytest.mark.parametrize("origin", ["https://chat.example/", "chat.example", "https://", "", "null", 5])
def test_what_is_no_origin_is_refused(origin: Any) -> None:
    with pytest.raises(ConfigError, match=r"server\.allowed_origins"):
        config_of([origin])
    assert config_of(["*", PAGE, "http://localhost:3000"]).server.allowed_origins[0] == "*"


def test_metrics_are_told_on_both_ports_and_need_a_key_on_the_apis() -> None:
    frontend = frontend_of()
    own = send(make_metrics_application(frontend), "GET", "/metrics")
    told = ask("GET", "/metrics", frontend)
    assert own.status_code == told.status_code == 200 and own.headers["content-type"] == told.headers["content-type"]
    assert "vllm:num_requests_running" in told.text
    assert {line for line in own.text.splitlines() if line.startswith("#")} == {
        line for line in told.text.splitlines() if line.startswith("#")
    }
    assert ask("GET", "/metrics", keys=["secret"]).status_code == 401
    assert ask("GET", "/metrics", keys=["secret"], headers={"authorization": "Bearer secret"}).status_code == 200
    assert send(make_metrics_application(frontend), "GET", "/metrics/").status_code == 404


def test_whoever_comes_while_the_server_ends_is_told_when_to_come_again() -> None:
    frontend = frontend_of()
    frontend.admission.is_closing = True
    for method, path in (("GET", "/health"), ("POST", "/v1/completions")):
        answer = ask(method, path, frontend, content=json.dumps({"prompt": "x"}).encode())
        assert answer.status_code == 503 and int(answer.headers["retry-after"]) > 0
