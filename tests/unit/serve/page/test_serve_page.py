"""The page as the server hands it out: complete, its own, and fenced in by its content security policy."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.resources import files

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from launch.serve.page.routes import page_routes

FILES = sorted(entry.name for entry in (files("launch.serve.page") / "files").iterdir())


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with TestClient(Starlette(routes=[*page_routes()])) as client:
        yield client


def path_of(name: str) -> str:
    return "/" if name == "index.html" else f"/page/{name}"


@pytest.mark.parametrize("name", FILES)
def test_every_file_is_served_with_its_type_and_the_policy(client: TestClient, name: str) -> None:
    answer = client.get(path_of(name))
    assert answer.status_code == 200
    kind = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}[name.split(".")[1]]
    assert answer.headers["content-type"] == f"{kind}; charset=utf-8"
    policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'" and policy["frame-ancestors"] == "'none'"
    assert {policy[name] for name in ("script-src", "style-src", "img-src", "connect-src")} == {"'self'"}
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer" and answer.headers["cache-control"] == "no-cache"
    again = client.get(path_of(name), headers={"if-none-match": answer.headers["etag"]})
    assert again.status_code == 304 and again.content == b""


@pytest.mark.parametrize("name", FILES)
def test_no_file_names_another_host_or_makes_html_of_texts(client: TestClient, name: str) -> None:
    text = client.get(path_of(name)).text.replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"(https?:)?//[a-z]", text.replace("// ", ""))
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", text)
    assert not re.search(r"<[^>]+\s(on\w+|style)=", text)
    assert not re.search(r"<script(?![^>]* src=)|<style", text)


def test_every_file_that_is_asked_for_is_there(client: TestClient) -> None:
    index = client.get("/").text
    asked = set(re.findall(r'(?:src|href)="(page/[^"]+)"', index))
    for name in FILES:
        if name.endswith(".js"):
            asked |= {f"page/{other}" for other in re.findall(r'from "\./([^"]+)"', client.get(path_of(name)).text)}
    assert asked == {f"page/{name}" for name in FILES if name != "index.html"}
    ids = set(re.findall(r'\bid="([^"]+)"', index))
    used = {target for attribute in ("for", "aria-labelledby", "aria-describedby") for target in
            re.findall(rf'\b{attribute}="([^"]+)"', index)}  # fmt: skip
    assert used <= ids


def test_nothing_else_is_served(client: TestClient) -> None:
    for path in ("/page/", "/page/../status.py", "/page/%2e%2e/status.py", "/page/index.html", "/page/page.py"):
        assert client.get(path).status_code == 404
    assert client.post("/").status_code == 405
