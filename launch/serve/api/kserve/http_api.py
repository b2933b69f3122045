"""KServe's protocol over HTTP: the endpoints below /v2, Triton's extensions among them, and errors in its shape.

An endpoint reads as it works: body → tensors → a run → a response, or one event for each.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from launch.serve.admission.limits import PARSED_IN_LOOP_BYTES
from launch.serve.admission.refusals import HTTP_STATUS, Kind, Refusal, retry_headers
from launch.serve.api.kserve.grpc_messages import GENERATE, INFER, Sent
from launch.serve.api.kserve.http_bodies import dump, write_generate, write_infer
from launch.serve.api.kserve.models import MODELS, VERSION, Model
from launch.serve.api.kserve.requests import InferResponse, find_model, fixed_models, no_shared_memory
from launch.serve.api.kserve.runs import Run
from launch.serve.api.kserve.service import Begun, KServeService
from launch.serve.http.answers import EventStream, answer_in_parts, event, make_parts
from launch.serve.http.bodies import Bodies, parse_json
from launch.serve.http.requests import Keys, unless_gone
from launch.serve.parsing.parsers import ParsedAnswer

PREFIX = "/v2"

JSON_LENGTH = "inference-header-content-length"
"""Where tensors follow a body's JSON as bytes: the length of the JSON."""


Endpoint = Callable[[Request], Awaitable[Response]]


class KServeHttpApi:
    """The endpoints below /v2."""

    def __init__(self, service: KServeService, keys: Keys, bodies: Bodies) -> None:
        self._service = service
        self._keys = keys
        self._bodies = bodies

    def routes(self) -> list[Route]:
        """The protocol's routes, for the application. Health needs no key."""
        found = [
            Route(f"{PREFIX}/health/live", _live, methods=["GET"]),
            Route(f"{PREFIX}/health/ready", self.ready, methods=["GET"]),
        ]
        self._add(found, "GET", "", self.server_metadata)
        self._add(found, "GET", "/models/stats", self.statistics)
        self._add(found, "POST", "/repository/index", self.index)
        self._add(found, "POST", "/repository/models/{model}/load", _refuse_change)
        self._add(found, "POST", "/repository/models/{model}/unload", _refuse_change)
        for kind in ("systemsharedmemory", "cudasharedmemory"):
            self._add(found, "GET", f"/{kind}/status", _no_regions)
            self._add(found, "GET", f"/{kind}/region/{{region}}/status", _no_regions)
            self._add(found, "POST", f"/{kind}/unregister", _no_regions)
            self._add(found, "POST", f"/{kind}/region/{{region}}/register", _refuse_region)
            self._add(found, "POST", f"/{kind}/region/{{region}}/unregister", _no_regions)
        for model in ("/models/{model}", "/models/{model}/versions/{version}"):
            self._add(found, "GET", model, self.metadata)
            self._add(found, "GET", f"{model}/ready", self.ready)
            self._add(found, "GET", f"{model}/config", self.config)
            self._add(found, "GET", f"{model}/stats", self.statistics)
            self._add(found, "POST", f"{model}/infer", self.infer)
            self._add(found, "POST", f"{model}/generate", self.generate)
            self._add(found, "POST", f"{model}/generate_stream", self.generate_stream)
        return found

    async def ready(self, request: Request) -> Response:
        """Whether the server, or a model, answers requests: 200, or an error that says why not."""
        self._service.check_ready(_model(request) if "model" in request.path_params else None)
        return Response()

    async def server_metadata(self, request: Request) -> Response:
        """Name, version and extensions."""
        return JSONResponse(self._service.server_metadata())

    async def metadata(self, request: Request) -> Response:
        """A model's inputs and outputs."""
        return JSONResponse(_model(request).metadata())

    async def config(self, request: Request) -> Response:
        """Answer with a model's inputs and outputs, as Triton's configuration has them."""
        return JSONResponse(_model(request).config(self._service.max_batch_size))

    async def statistics(self, request: Request) -> Response:
        """Answer with the statistics of one model, or of all."""
        models = [_model(request)] if "model" in request.path_params else list(MODELS.values())
        return JSONResponse({"model_stats": self._service.statistics(models)})

    async def index(self, request: Request) -> Response:
        """The models and their states."""
        with await self._bodies.read(request) as body:
            raw = body.content
            if len(raw) > PARSED_IN_LOOP_BYTES:
                raise Refusal(
                    Kind.TOO_LARGE, f"the body is larger than {PARSED_IN_LOOP_BYTES} bytes: it has one field, ready"
                )
            wanted = parse_json(raw) if raw.strip() else {}
        if not isinstance(wanted, dict):
            raise Refusal(Kind.INVALID, "the body must be a JSON object, or empty")
        return JSONResponse(self._service.index(ready_only=wanted.get("ready") is True))

    async def infer(self, request: Request) -> Response:
        """Tensors in, tensors out."""
        model = _model(request)
        with await self._bodies.read(request) as sent:
            arrived = time.perf_counter()
            length = _json_length(request.headers.get(JSON_LENGTH), len(sent.content))
            begun = await self._begin(request, Sent(INFER, model, sent.content, length), arrived)
            if isinstance(begun.work, ParsedAnswer):
                return _respond([begun.work.content], begun.work.json_length)
            response = await self._whole(request, begun.work)
        with _kept_until_sent(begun.work):
            parts, behind = write_infer(response, begun.body)
            text = await make_parts(parts)
            num_json_bytes = sum(map(len, text)) if behind else None
            return _respond([*text, *behind], num_json_bytes, begun.work.let_go)

    async def generate(self, request: Request) -> Response:
        """Inputs as a flat object in, one response out."""
        work = (await self._begin_generate(request)).work
        if isinstance(work, ParsedAnswer):
            return _respond([work.content], None)
        response = await self._whole(request, work)
        with _kept_until_sent(work):
            return _respond(await make_parts(write_generate(response)), None, work.let_go)

    async def generate_stream(self, request: Request) -> Response:
        """Answer as `generate` does, with one event for each response."""
        work = (await self._begin_generate(request)).work
        if isinstance(work, ParsedAnswer):
            return Response(event(work.content), media_type="text/event-stream")

        def close() -> None:
            work.close()
            work.let_go()

        return EventStream(close, self._events(work), self._service.frontend.ping_seconds)

    async def _begin(self, request: Request, sent: Sent, arrived: float) -> Begun:
        """Let a request in; it is given up when its client goes away while it is read, which may take long: a guide may
        be in any."""
        return await unless_gone(request, self._service.begin(sent, arrived))

    async def _begin_generate(self, request: Request) -> Begun:
        model = _model(request)
        with await self._bodies.read(request) as body:
            arrived = time.perf_counter()
            return await self._begin(request, Sent(GENERATE, model, body.content), arrived)

    async def _whole(self, request: Request, work: Run) -> InferResponse:
        """The whole response, unless the client goes away."""
        with _kept_until_sent(work):
            try:
                return await unless_gone(request, work.whole())
            finally:
                work.close()

    async def _events(self, work: Run) -> AsyncGenerator[bytes, None]:
        """An error is an event, too: the status is out."""
        try:
            async for response in work.responses():
                yield event(b"".join(await make_parts(write_generate(response))))
        except Refusal as refusal:
            self._service.frontend.metrics.count_refusal(HTTP_STATUS[refusal.kind])
            yield event(dump({"error": str(refusal)}))

    def _add(self, routes: list[Route], method: str, path: str, endpoint: Endpoint) -> None:
        """A route that asks for a key."""

        async def checked(request: Request) -> Response:
            self._keys.check(request)
            return await endpoint(request)

        routes.append(Route(PREFIX + path, checked, methods=[method]))


def is_below(request: Request) -> bool:
    """Whether a request, to whatever path, is to this protocol."""
    return request.url.path == PREFIX or request.url.path.startswith(f"{PREFIX}/")


def answer_refusal(refusal: Refusal) -> JSONResponse:
    """The HTTP answer to a request that is not answered."""
    return JSONResponse({"error": str(refusal)}, status_code=HTTP_STATUS[refusal.kind], headers=retry_headers(refusal))


async def _live(request: Request) -> Response:
    return Response()


async def _refuse_change(request: Request) -> Response:
    raise fixed_models(request.path_params["model"])


async def _no_regions(request: Request) -> Response:
    return JSONResponse([])


async def _refuse_region(request: Request) -> Response:
    raise no_shared_memory()


@contextmanager
def _kept_until_sent(work: Run) -> Iterator[None]:
    """A step on the way to an answer, which lets its logits go once it is sent: nothing is, where the step fails."""
    try:
        yield
    except BaseException:
        work.let_go()
        raise


def _respond(
    parts: Sequence[bytes | memoryview], json_length: int | None, let_go: Callable[[], None] | None = None
) -> Response:
    """An answer; bytes of tensors follow its JSON, where that has a length. `let_go` is called once it is sent."""
    if json_length is None:
        return answer_in_parts(parts, let_go=let_go)
    return answer_in_parts(parts, "application/octet-stream", {JSON_LENGTH: str(json_length)}, let_go)


def _model(request: Request) -> Model:
    return find_model(request.path_params["model"], request.path_params.get("version", VERSION))


def _json_length(header: str | None, size: int) -> int:
    if header is None:
        return size
    if not header.isdecimal() or not 0 < int(header[:20]) <= size:
        raise Refusal(
            Kind.INVALID, f"Inference-Header-Content-Length must be between 1 and {size}, the length of the body"
        )
    return int(header)
