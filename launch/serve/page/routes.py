"""The page at /: a few files of this package, which need nothing from anywhere else.

The browser is told to load scripts, styles and data from this server alone, and to run nothing that stands in the page
itself. What they show they ask the public API for.
"""

from __future__ import annotations

import hashlib
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}

INDEX = "index.html"

HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    # Another version of the server has another page: the browser asks each time, and is told when it has it already.
    "cache-control": "no-cache",
}


def page_routes() -> list[Route]:
    """The page, and the files that it loads. They are read once."""
    folder = files("launch.serve.page") / "files"
    found = {entry.name: entry.read_bytes() for entry in folder.iterdir() if entry.name.rpartition(".")[2] in TYPES}
    return [_route("/" if name == INDEX else f"/page/{name}", name, content) for name, content in sorted(found.items())]


def _route(path: str, name: str, content: bytes) -> Route:
    tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    kind = TYPES[name.rpartition(".")[2]]
    headers = {**HEADERS, "etag": tag, "content-type": f"{kind}; charset=utf-8"}

    async def answer(request: Request) -> Response:
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers)

    return Route(path, answer, methods=["GET"])
