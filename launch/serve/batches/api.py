"""/v1/files and /v1/batches over HTTP: what may be uploaded, asked for and seen, by whom.

A file and a batch belong to the API key that made them; without keys all are everybody's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from launch.serve.admission.refusals import RESTART_RETRY_SECONDS, Kind, Refusal
from launch.serve.api.openai.api import ROW_ENDPOINTS
from launch.serve.batches.records import BatchRecord, new_batch_id
from launch.serve.batches.runner import BatchRunner
from launch.serve.batches.store import KEY, BatchStore
from launch.serve.batches.uploads import Uploads, read_expiry
from launch.serve.http.bodies import Bodies, parse_json
from launch.serve.http.requests import Endpoint, Keys
from trtrun.core.values import check_characters, cut_text, show_value
from trtrun.errors import InvalidRequestError, nearest

WINDOW = "24h"
_WINDOW_SECONDS = 86400
_MOST_FILES, _MOST_BATCHES, _BATCHES = 10_000, 100, 20
_FIELDS = ("input_file_id", "endpoint", "completion_window", "metadata", "output_expires_after")
_MOST_DIGITS = 9
_MOST_METADATA, _LONGEST_NAME, _LONGEST_VALUE = 16, 64, 512


class BatchApi:
    """The endpoints."""

    def __init__(
        self, runner: BatchRunner | None, keys: Keys, bodies: Bodies, model_name: str, most_file_bytes: int
    ) -> None:
        """Answer for what runs batches.

        Args:
            runner: None where the server has no directory for them.
            keys: of the server.
            bodies: of requests that are no files.
            model_name: that batches are told to be for.
            most_file_bytes: of one file.
        """
        self._runner = runner
        self._keys = keys
        self._bodies = bodies
        self._model_name = model_name
        self._uploads = Uploads(most_file_bytes)

    def routes(self) -> list[Route]:
        """The endpoints' routes, for the application."""
        return [
            Route("/v1/files", Endpoint(self.files), methods=["GET", "POST"]),
            Route("/v1/files/{file_id}", Endpoint(self.file), methods=["GET", "DELETE"]),
            Route("/v1/files/{file_id}/content", Endpoint(self.content), methods=["GET"]),
            Route("/v1/batches", Endpoint(self.batches), methods=["GET", "POST"]),
            Route("/v1/batches/{batch_id}", Endpoint(self.batch), methods=["GET"]),
            Route("/v1/batches/{batch_id}/cancel", Endpoint(self.cancel), methods=["POST"]),
        ]

    async def files(self, request: Request) -> Response:
        """Take in a file, or list those of the key."""
        owner, store = self._keys.check(request), self._there().store
        if request.method == "POST":
            with _writing():
                return JSONResponse((await self._uploads.take(request, store, owner)).told())
        purpose, order = request.query_params.get("purpose"), request.query_params.get("order", "desc")
        if order not in ("asc", "desc"):
            raise _wrong("order", f"must be asc or desc, not {show_value(order)}")
        found = [file for file in store.files_of(owner) if purpose in (None, file.purpose)]
        found = found if order == "asc" else found[::-1]
        return await store.aside(lambda: JSONResponse(_read_page(request, found, _MOST_FILES, _MOST_FILES)))

    async def file(self, request: Request) -> Response:
        """Describe a file, or delete it."""
        owner, store = self._keys.check(request), self._there().store
        file = store.find_file(request.path_params["file_id"], owner)
        if request.method == "GET":
            return JSONResponse(file.told())
        if (user := store.user_of(file.id)) is not None:
            line = f"{file.id} is the input of {user.id}, which is {user.status}: cancel that, or wait for its end"
            raise Refusal(Kind.INVALID, line, "id")
        with _writing():
            await store.remove_file(file.id)
        return JSONResponse({"id": file.id, "object": "file", "deleted": True})

    async def content(self, request: Request) -> Response:
        """Send what a file holds."""
        owner, store = self._keys.check(request), self._there().store
        file = store.find_file(request.path_params["file_id"], owner)
        path = store.content_path(file.id)
        if not await store.aside(path.is_file):
            raise Refusal(Kind.FAILED, f"{file.id} is not on the server's disk any more")
        return FileResponse(path, media_type="application/octet-stream", filename=file.filename)

    async def batches(self, request: Request) -> Response:
        """Begin a batch, or list those of the key, the newest first."""
        owner, runner = self._keys.check(request), self._there()
        if request.method == "GET":
            found = [one for one in runner.store.batches.values() if one.owner == owner]
            return JSONResponse(_read_page(request, found[::-1], _BATCHES, _MOST_BATCHES))
        with await self._bodies.read(request) as body:
            values = parse_json(body.content)
        with _writing():
            batch = self._read_batch(values, runner.store, owner)
            await runner.add(batch)
        return JSONResponse(batch.told())

    async def batch(self, request: Request) -> Response:
        """Describe a batch."""
        owner, runner = self._keys.check(request), self._there()
        return JSONResponse(runner.store.find_batch(request.path_params["batch_id"], owner).told())

    async def cancel(self, request: Request) -> Response:
        """End a batch early: rows that are done are kept."""
        owner, runner = self._keys.check(request), self._there()
        batch = runner.store.find_batch(request.path_params["batch_id"], owner)
        with _writing():
            await runner.cancel(batch)
        return JSONResponse(batch.told())

    def _there(self) -> BatchRunner:
        """What runs batches, where it can be used."""
        if self._runner is None:
            line = f"this server keeps no files and batches: set {KEY}"
            raise Refusal(Kind.UNKNOWN_MODEL, line, code="unsupported_endpoint")
        if self._runner.failure is not None:
            raise Refusal(Kind.FAILED, f"{KEY} of this server cannot be read: its log says why")
        if not self._runner.is_there:
            line = f"another server still has {KEY}, or this one is ending: send the request again later"
            raise Refusal(Kind.UNAVAILABLE, line, code="batch_directory_in_use", retry_after=RESTART_RETRY_SECONDS)
        return self._runner

    def _read_batch(self, values: object, store: BatchStore, owner: str) -> BatchRecord:
        if not isinstance(values, dict):
            raise _wrong(None, f"the body must be an object, not {show_value(values)}")
        for name in values:
            if name not in _FIELDS:
                line = f"unknown field '{cut_text(name, 100)}'{nearest(name, _FIELDS)}"
                raise Refusal(Kind.INVALID, line, cut_text(name, 100), "unknown_field")
        endpoint, window = values.get("endpoint"), values.get("completion_window")
        if not isinstance(endpoint, str) or endpoint not in ROW_ENDPOINTS:
            raise _wrong("endpoint", f"must be {' or '.join(ROW_ENDPOINTS)}, not {show_value(endpoint)}")
        if window != WINDOW:
            raise _wrong("completion_window", f"must be {WINDOW}, not {show_value(window)}")
        file_id = values.get("input_file_id")
        if not isinstance(file_id, str):
            raise _wrong("input_file_id", f"must be the id of a file of the purpose batch, not {show_value(file_id)}")
        file = store.find_file(file_id, owner, "input_file_id")
        if file.purpose != "batch":
            raise _wrong("input_file_id", f"must be a file of the purpose batch, and {file.id} is {file.purpose}")
        now = int(store.now())
        return BatchRecord(
            id=new_batch_id(),
            owner=owner,
            endpoint=endpoint,
            model=self._model_name,
            input_file_id=file.id,
            completion_window=WINDOW,
            created_at=now,
            expires_at=now + _WINDOW_SECONDS,
            metadata=_read_metadata(values.get("metadata")),
            output_seconds=read_expiry(values.get("output_expires_after"), "output_expires_after"),
        )


def _wrong(field: str | None, line: str) -> Refusal:
    return Refusal(Kind.INVALID, line if field is None else f"{field} {line}", field)


def _read_metadata(value: object) -> dict[str, str] | None:
    if value is None:
        return None
    if isinstance(value, dict) and len(value) <= _MOST_METADATA and all(map(_is_metadata, value.items())):
        try:
            check_characters("metadata", "".join((*value, *value.values())))
        except InvalidRequestError as error:
            raise _wrong(None, str(error)) from None
        return value
    raise _wrong(
        "metadata",
        f"must be an object of at most {_MOST_METADATA} texts of {_LONGEST_VALUE} characters, whose names have at most "
        f"{_LONGEST_NAME}",
    )


def _is_metadata(item: tuple[str, object]) -> bool:
    name, value = item
    return len(name) <= _LONGEST_NAME and isinstance(value, str) and len(value) <= _LONGEST_VALUE


def _read_page(request: Request, found: Sequence[Any], limit: int, most: int) -> Mapping[str, Any]:
    """The part of a list that a request asks for."""
    given = request.query_params.get("limit", str(limit))
    if not given.isdecimal() or len(given) > _MOST_DIGITS or not 1 <= int(given) <= most:
        raise _wrong("limit", f"must be 1 to {most}, not {show_value(given)}")
    after = request.query_params.get("after")
    if after is not None:
        places = [place for place, one in enumerate(found) if one.id == after]
        if not places:
            raise _wrong("after", "must be the id of one of the list")
        found = found[places[0] + 1 :]
    page = [one.told() for one in found[: int(given)]]
    ends = {"first_id": page[0]["id"] if page else None, "last_id": page[-1]["id"] if page else None}
    return {"object": "list", "data": page, **ends, "has_more": len(found) > len(page)}


@contextmanager
def _writing() -> Iterator[None]:
    """Tell a client that the directory cannot be written."""
    try:
        yield
    except OSError as error:
        raise Refusal(Kind.FAILED, f"cannot write to the server's batch directory: {error.strerror}") from error
