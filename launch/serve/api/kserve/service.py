"""What both protocols of KServe answer with: models and their states, statistics, and runs of requests.

A request reads as it works: model → checked inputs → what they ask for → a run through the frontend. A request may
stop others of the same stream or connection by their clients' ids.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from launch.serve.admission.refusals import Kind, Refusal
from launch.serve.api.kserve.grpc_messages import Sent, write_response
from launch.serve.api.kserve.http_bodies import InferBody
from launch.serve.api.kserve.models import MODELS, PARTS, VERSION, Model
from launch.serve.api.kserve.requests import STOP, InferRequest, InferResponse
from launch.serve.api.kserve.row_requests import AskedRows
from launch.serve.api.kserve.runs import Run
from launch.serve.api.kserve.tensors import refuse_input
from launch.serve.frontend.frontend import Frontend
from launch.serve.metrics import ModelRequest, Stage
from launch.serve.metrics.models import ModelTotals
from launch.serve.parsing.messages import Stops
from launch.serve.parsing.parsers import ParsedAnswer, ParsedRequest, UnencodedRequest
from trtrun import __version__


class Place:
    """A request's place among the others, from the moment that it has come."""

    def __init__(self) -> None:
        self._stop: Callable[[], None] | None = None
        self._is_stopped = False

    def fill(self, stop: Callable[[], None]) -> None:
        """The request has been let in; `stop` makes what there is of it its last response."""
        self._stop = stop
        if self._is_stopped:
            stop()

    def stop(self) -> None:
        """Stop the request, be it at work or not let in yet."""
        self._is_stopped = True
        if self._stop is not None:
            self._stop()


class Places:
    """The requests of one stream or connection."""

    def __init__(self, around: Places | None = None) -> None:
        """Begin without requests.

        Args:
            around: those of the connection, for a stream: its requests are among these, too.
        """
        self._around = around
        self._by_id: defaultdict[str, set[Place]] = defaultdict(set)

    @contextmanager
    def take(self, request_id: str) -> Iterator[Place]:
        """A request's place, as long as it is at work."""
        place = Place()
        self._add(request_id, place)
        try:
            yield place
        finally:
            self._remove(request_id, place)

    def _add(self, request_id: str, place: Place) -> None:
        self._by_id[request_id].add(place)
        if self._around is not None:
            self._around._add(request_id, place)

    def _remove(self, request_id: str, place: Place) -> None:
        self._by_id[request_id].discard(place)
        if not self._by_id[request_id]:
            del self._by_id[request_id]
        if self._around is not None:
            self._around._remove(request_id, place)

    def stop(self, request_id: str) -> None:
        """Stop all requests of an id; nothing where there is none."""
        for place in tuple(self._by_id.get(request_id, ())):
            place.stop()

    def __len__(self) -> int:
        return len(self._by_id)


class PlacesByCaller:
    """Places of each of many callers, as long as they have calls."""

    def __init__(self) -> None:
        self._callers: defaultdict[Hashable, Places] = defaultdict(Places)
        self._num_calls: Counter[Hashable] = Counter()

    @contextmanager
    def of(self, caller: Hashable) -> Iterator[Places]:
        """The requests of one caller, within a call of theirs. A stream is one, though it may have none at times."""
        self._num_calls[caller] += 1
        try:
            yield self._callers[caller]
        finally:
            self._num_calls[caller] -= 1
            if not self._num_calls[caller]:
                del self._num_calls[caller]
                del self._callers[caller]

    def __len__(self) -> int:
        return len(self._callers)


EXTENSIONS = (
    "binary_tensor_data",
    "generate",
    "model_configuration",
    "model_repository",
    "parameters",
    "statistics",
)
"""Extensions of the protocol that are here."""

NOTHING = InferBody("", (), (), frozenset(), False)
"""What a request says on which its answer does not hang."""


@dataclass(frozen=True)
class Begun:
    """A request that was let in.

    Attributes:
        body: what it says, as far as its answer hangs on it.
        work: that answers it, or its answer in the form in which it came.
    """

    body: InferBody
    work: Run | ParsedAnswer


class KServeService:
    """The models over a frontend."""

    def __init__(self, frontend: Frontend, max_batch_size: int, block_size: int) -> None:
        """Serve a frontend's model.

        Args:
            frontend: whose admission control and metrics these are, too.
            max_batch_size: rows that a request may have.
            block_size: tokens of a KV block.
        """
        self.frontend = frontend
        self.max_batch_size = max_batch_size
        self._block_size = block_size
        for name, parts in PARTS.items():
            frontend.metrics.models.compose(name, parts)

    def check_ready(self, model: Model | None = None) -> None:
        """Raise a Refusal while requests, or those for a model, are not answered."""
        self.frontend.admission.check_open()
        if model is not None:
            self._check_text(model)

    def is_ready(self, model: Model | None = None) -> bool:
        """Whether requests, or those for a model, are answered."""
        try:
            self.check_ready(model)
        except Refusal:
            return False
        return True

    def server_metadata(self) -> dict[str, Any]:
        """The server's metadata, as KServe has it."""
        return {"name": "trtrun", "version": __version__, "extensions": list(EXTENSIONS)}

    def index(self, ready_only: bool) -> list[dict[str, Any]]:
        """The models and their states."""
        found = []
        for model in MODELS.values():
            try:
                self.check_ready(model)
            except Refusal as refusal:
                if not ready_only:
                    state = {"state": "UNAVAILABLE", "reason": str(refusal)}
                    found.append({"name": model.name, "version": VERSION, **state})
            else:
                found.append({"name": model.name, "version": VERSION, "state": "READY", "reason": ""})
        return found

    def statistics(self, models: Sequence[Model]) -> list[dict[str, Any]]:
        """Triton's statistics of models, of the numbers that its metrics have, too."""
        return [_statistics(model.name, self.frontend.metrics.models.read(model.name)) for model in models]

    async def begin(self, sent: Sent, arrived: float, beside: Places | None = None) -> Begun:
        """Let a request in.

        Args:
            sent: as it came.
            arrived: when it was there as a whole, in seconds of `time.perf_counter`.
            beside: what has come on the same stream or connection, for requests that stop another one; None where
                that cannot be told.

        Raises:
            Refusal: it is wrong, or there is no room.
        """
        counted = self.frontend.metrics.models.begin(sent.model.name)
        try:
            self._check_text(sent.model)
            found: object = self.frontend.parse_in_loop(sent.form, sent.raw, sent.model.name, sent.json_length)
            if found is None:
                found = await self.frontend.read(sent.form, sent.raw, arrived, sent.model.name, sent.json_length)
            if isinstance(found, ParsedAnswer):
                counted.num_inferences = found.num_inferences
                counted.enter(Stage.INFER)
                counted.begin_answer()
                counted.succeed()
                return Begun(NOTHING, found)
            if isinstance(found, Stops):
                return Begun(NOTHING, _stop(sent.model, found.request_id, beside, counted))
            assert isinstance(found, ParsedRequest | UnencodedRequest)
            asked = _asked_rows(found)
            body = InferBody(asked.request_id, (), asked.outputs, asked.binary, asked.all_binary)
            outputs = tuple(dict.fromkeys(asked.outputs))
            request = InferRequest(sent.model, asked.request_id, {}, outputs, len(asked.rows))
            generation = await self.frontend.begin(found, arrived)
            return Begun(body, Run(request, asked.rows, generation, self.frontend, self._block_size, counted))
        except BaseException as error:
            counted.fail_with(error)
            raise

    def _check_text(self, model: Model) -> None:
        if model.has_text and self.frontend.tokenizer is None:
            raise Refusal(
                Kind.INVALID,
                f"{model.name} needs a tokenizer, which this checkpoint does not have: send token ids to tensorrt_llm",
            )


def _asked_rows(found: ParsedRequest | UnencodedRequest) -> AskedRows:
    """What a request asks for beside its prompts and parameters, whoever has parsed it."""
    if isinstance(found, UnencodedRequest):
        assert isinstance(found.others, AskedRows)
        return found.others
    rows = [{**row, "prompt": "", "sampling": {}} for row in found.others["rows"]]
    asked = msgspec.convert({**found.others, "rows": rows}, AskedRows)
    each = zip(asked.rows, found.prompts, found.sampling, strict=True)
    return replace(asked, rows=tuple(replace(row, prompt=prompt, sampling=given) for row, prompt, given in each))


def _stop(model: Model, request_id: str, beside: Places | None, counted: ModelRequest) -> ParsedAnswer:
    """Stop what has the same id on the same stream or connection of gRPC: nobody ends the requests of others."""
    if beside is None:
        raise refuse_input(
            STOP, "stops a request of the same gRPC stream or connection and id: send it there, with its id"
        )
    beside.stop(request_id)
    counted.succeed()
    return ParsedAnswer(1, write_response(InferResponse(model, request_id)).SerializeToString(), None)


def _statistics(name: str, totals: ModelTotals) -> dict[str, Any]:
    successes, failures = totals.num_successes, sum(totals.num_failures.values())

    def took(count: int, seconds: float) -> dict[str, int]:
        return {"count": count, "ns": round(seconds * 1e9)}

    return {
        "name": name,
        "version": VERSION,
        "last_inference": round(totals.last_end * 1000),
        "inference_count": totals.num_inferences,
        "execution_count": successes,
        "inference_stats": {
            "success": took(successes, totals.success_seconds),
            "fail": took(failures, totals.failure_seconds),
            **{stage.value: took(successes, totals.seconds[stage]) for stage in Stage},
            "cache_hit": took(0, 0.0),
            "cache_miss": took(0, 0.0),
        },
        "batch_stats": [],
    }
