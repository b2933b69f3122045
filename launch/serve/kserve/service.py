"""What both protocols of KServe answer with: models and their states, statistics, and runs of requests.

A request reads as it works: model → checked inputs → what they ask for → a run through the front's door. It does not
know how requests and responses travel.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from typing import Any, Protocol

from launch.serve.aside import SHORT_TEXT, aside
from launch.serve.front import Front
from launch.serve.kserve.asks import ModelFacts, read_asks
from launch.serve.kserve.models import MODELS, POSTPROCESSING, PREPROCESSING, VERSION, Model
from launch.serve.kserve.processing import process
from launch.serve.kserve.requests import InferRequest, InferResponse, check_request
from launch.serve.kserve.runs import Run
from launch.serve.kserve.tensors import Tensor, refuse_input
from launch.serve.metrics import ModelRequest, Stage
from launch.serve.metrics.models import ModelTotals
from launch.serve.refusals import Kind, Refusal
from trtrun import __version__

EXTENSIONS = (
    "binary_tensor_data",
    "generate",
    "model_configuration",
    "model_repository",
    "parameters",
    "statistics",
)
"""Of the protocol, that are here."""

STOP = "stop"
"""Input of the models of tokens that ends another request."""


class Stopping(Protocol):
    """A request that can be stopped."""

    def stop(self) -> None:
        """Its client wants no more of it: what there is becomes its last response."""
        ...


class Answering(Stopping, Protocol):
    """A request at work. One of `whole` and `responses` is called once; `close` always."""

    async def whole(self) -> InferResponse:
        """One response for all."""
        ...

    def responses(self) -> AsyncIterator[InferResponse]:
        """Responses as they come, one at least; the last says so."""
        ...

    def close(self) -> None:
        """Give up what has not ended."""
        ...


class KServeService:
    """The models over a front."""

    def __init__(self, front: Front, facts: ModelFacts, max_batch_size: int, block_size: int) -> None:
        """Serve a front's model.

        Args:
            front: whose door and metrics these are, too.
            facts: of the model.
            max_batch_size: rows that a request may have.
            block_size: tokens of a KV block.
        """
        self.front = front
        self.max_batch_size = max_batch_size
        self._facts = facts
        self._block_size = block_size
        for name in MODELS:
            front.metrics.models.totals(name)

    def check_ready(self, model: Model | None = None) -> None:
        """Raise a Refusal while requests, or those for a model, are not answered."""
        self.front.door.check_open()
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
        """As KServe has it."""
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
        return [_statistics(model.name, self.front.metrics.models.totals(model.name)) for model in models]

    async def begin(
        self,
        model: Model,
        request_id: str,
        tensors: Sequence[Tensor],
        outputs: Sequence[str],
        arrived: float,
        beside: Mapping[str, Collection[Stopping]] | None = None,
    ) -> Answering:
        """Let a request in.

        Args:
            model, request_id, tensors, outputs: of the request.
            arrived: when it was there as a whole, in seconds of `time.perf_counter`.
            beside: what has come on the same stream, by request id, for requests that stop another one; None where
                there is no stream.

        Raises:
            Refusal: it is wrong, or there is no room.
        """
        counted = self.front.metrics.models.begin(model.name)
        try:
            request = check_request(model, request_id, tensors, outputs, self.max_batch_size)
            self._check_text(model)
            if model.name in (PREPROCESSING, POSTPROCESSING):
                self.front.door.check_open()
                return _Processed(await self._process(request, counted))
            if STOP in request.inputs and request.inputs[STOP].any():
                _stop(request, beside)
                counted.succeed()
                return _Processed(InferResponse(model, request_id))
            asks = await aside(request.is_longer(SHORT_TEXT), read_asks, request, self._facts)
            return await Run.begin(request, asks, self.front, self._block_size, counted, arrived)
        except BaseException as error:
            counted.fail_with(error)
            raise

    async def _process(self, request: InferRequest, counted: ModelRequest) -> InferResponse:
        """Tokens of texts, or texts of tokens; what is long is left to another thread, as any prompt."""
        counted.num_inferences = request.batch_size
        counted.enter(Stage.INFER)
        tokenizer = self.front.tokenizer
        assert tokenizer is not None
        with counted:
            return await aside(request.is_longer(SHORT_TEXT), process, request, tokenizer, self._facts)

    def _check_text(self, model: Model) -> None:
        if model.has_text and self.front.tokenizer is None:
            raise Refusal(
                Kind.INVALID,
                f"{model.name} needs a tokenizer, which this checkpoint does not have: send token ids to tensorrt_llm",
            )


class _Processed:
    """A request that was answered at once."""

    def __init__(self, response: InferResponse) -> None:
        self._response = response

    async def whole(self) -> InferResponse:
        """The response."""
        return self._response

    async def responses(self) -> AsyncIterator[InferResponse]:
        """The one response."""
        yield self._response

    def stop(self) -> None:
        """There is nothing to end."""

    def close(self) -> None:
        """There is nothing to give up."""


def _stop(request: InferRequest, beside: Mapping[str, Collection[Stopping]] | None) -> None:
    """Stop what has the same id on the same stream: nobody ends the requests of others."""
    if beside is None:
        raise refuse_input(STOP, "stops a request of the same stream and id: send it on that stream, with its id")
    for work in beside.get(request.request_id, ()):
        work.stop()


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
