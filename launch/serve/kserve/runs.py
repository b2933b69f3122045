"""Requests for the generating models, at work: what rows ask for goes through the front, what comes becomes outputs.

A completion's tokens are those of the engine up to its end: a token that ends it is left out, a word that stops it
stays. It knows the front's pieces and the models' outputs. It does not know how responses travel.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from launch.serve.front import Front, Generation, Piece
from launch.serve.kserve.asks import Ask
from launch.serve.kserve.requests import InferRequest, InferResponse
from launch.serve.kserve.tensors import Tensor, text_array
from launch.serve.metrics import ModelRequest, Stage
from launch.serve.metrics.models import Failure
from launch.serve.refusals import Kind, Refusal
from trtrun.detokenizer import IncrementalDetokenizer
from trtrun.outputs import CompletionDelta
from trtrun.text import Tokenizer


@dataclass
class Gain:
    """What a completion gained; whole completions are all their gains, added up.

    Attributes:
        tokens, log_probs, text: new ones.
        sum_log_probs: of the completion so far.
        num_tokens: of prompt and completion so far.
        num_cached_tokens: of the prompt, whose keys and values were there.
        is_last: whether it has ended.
    """

    row: int
    sequence: int
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    log_probs: list[float] = field(default_factory=list)
    sum_log_probs: float = 0.0
    num_tokens: int = 0
    num_cached_tokens: int = 0
    is_last: bool = False

    def add(self, later: Gain) -> None:
        """Go on with what came after."""
        self.tokens += later.tokens
        self.text += later.text
        self.log_probs += later.log_probs
        self.sum_log_probs, self.num_tokens = later.sum_log_probs, later.num_tokens
        self.num_cached_tokens, self.is_last = later.num_cached_tokens, later.is_last


class _Completion:
    """One completion of one row while it comes: where it ends, and its text.

    Attributes:
        is_over: whether it has ended.
    """

    def __init__(self, ask: Ask, row: int, sequence: int, prompt: Sequence[int], tokenizer: Tokenizer | None) -> None:
        self._ask = ask
        self._row, self._sequence = row, sequence
        self._longest_stop = max(ask.stops_by_length, default=0)
        self._tail: list[int] = []
        self._sum_log_probs = 0.0
        self._num_tokens = len(prompt)
        self._num_cached_tokens = 0
        self.is_over = False
        # The engine's text has stop tokens in it, and goes on behind stop sequences, which it does not know.
        has_own_text = tokenizer is not None and (ask.stop_sequences or ask.sampling.stop_token_ids)
        self._text = IncrementalDetokenizer(tokenizer, prompt) if tokenizer is not None and has_own_text else None

    def take(self, delta: CompletionDelta) -> Gain:
        """What a delta adds."""
        kept, is_stopped = self._count(delta.token_ids)
        is_last = self.is_over = is_stopped or delta.finish_reason is not None
        if not is_stopped and delta.finish_reason == "stop" and delta.token_ids[-1:]:
            kept -= delta.token_ids[-1] in self._ask.end_tokens
        tokens = list(delta.token_ids[:kept])
        log_probs = [entry.logprob for entry in (delta.logprobs or ())[:kept]]
        self._sum_log_probs += sum(log_probs)
        self._num_tokens += kept
        text = delta.text
        if self._text is not None:
            text = "".join([self._text.append(token) for token in tokens]) + (self._text.flush() if is_last else "")
        self._num_cached_tokens = delta.statistics.num_cached_prompt_tokens
        return self._gain(tokens, text, log_probs, is_last)

    def end(self) -> Gain:
        """End it where it is."""
        self.is_over = True
        return self._gain([], self._text.flush() if self._text is not None else "", [], is_last=True)

    def _gain(self, tokens: list[int], text: str, log_probs: list[float], is_last: bool) -> Gain:
        return Gain(
            self._row,
            self._sequence,
            tokens,
            text,
            log_probs,
            self._sum_log_probs,
            self._num_tokens,
            self._num_cached_tokens,
            is_last,
        )

    def _count(self, tokens: Sequence[int]) -> tuple[int, bool]:
        """How many of the new tokens belong to the completion, and whether a stop sequence ends it there."""
        if not self._longest_stop:
            return len(tokens), False
        for place, token in enumerate(tokens):
            self._tail = [*self._tail, token][-self._longest_stop :]
            if any(tuple(self._tail[-length:]) in stops for length, stops in self._ask.stops_by_length.items()):
                return place + 1, True
        return len(tokens), False


class Run:
    """One request for a generating model. `responses` is read once; `close` has to be called, however that ends."""

    def __init__(
        self,
        request: InferRequest,
        asks: Sequence[Ask],
        generation: Generation,
        front: Front,
        block_size: int,
        counted: ModelRequest,
    ) -> None:
        self._request = request
        self._asks = asks
        self._generation = generation
        self._tokenizer = front.tokenizer
        self._block_size = block_size
        self._counted = counted
        self._n = asks[0].sampling.n
        self._is_stopped = False
        counted.num_inferences = len(asks) * self._n

    @classmethod
    async def begin(
        cls,
        request: InferRequest,
        asks: Sequence[Ask],
        front: Front,
        block_size: int,
        counted: ModelRequest,
        arrived: float,
    ) -> Run:
        """Let the request in, which arrived at a time of `time.perf_counter`.

        Raises:
            Refusal: it is wrong, or there is no room.
        """
        generation = await front.begin([ask.prompt for ask in asks], [ask.sampling for ask in asks], arrived)
        counted.enter(Stage.INFER)
        return cls(request, asks, generation, front, block_size, counted)

    async def whole(self) -> InferResponse:
        """All completions, each a row of the outputs: those of the first row of the batch come first.

        Raises:
            Refusal: the request was lost, or its time is over.
        """
        with self._counted:
            found: dict[tuple[int, int], Gain] = {}
            async for gain in self._gains():
                _add(found, gain)
            self._counted.enter(Stage.OUTPUT)
            gains = [found[place] for place in sorted(found)]
            return self._response(gains, is_whole=True, is_last=True)

    async def responses(self) -> AsyncIterator[InferResponse]:
        """Responses as they come, each of one completion: its pieces where the client streams, else all of it.

        Raises:
            Refusal: the request was lost, or its time is over.
        """
        with self._counted:
            streams = self._asks[0].stream
            num_going_on = len(self._asks) * self._n
            found: dict[tuple[int, int], Gain] = {}
            async for gain in self._gains():
                num_going_on -= gain.is_last
                if streams:
                    if gain.tokens or gain.text or gain.is_last:
                        yield self._response([gain], is_whole=False, is_last=not num_going_on)
                    continue
                _add(found, gain)
                if gain.is_last:
                    whole = found.pop((gain.row, gain.sequence))
                    yield self._response([whole], is_whole=True, is_last=not num_going_on)

    def stop(self) -> None:
        """The client wants no more: completions end where they are."""
        self._is_stopped = True
        self._generation.give_up(Refusal(Kind.FAILED, "the request was stopped"))

    def close(self) -> None:
        """Give up what has not ended."""
        self._generation.close()
        self._counted.fail(Failure.CANCELED)  # unless it has ended

    async def _gains(self) -> AsyncIterator[Gain]:
        completions = [
            _Completion(ask, row, sequence, prompt, self._tokenizer if self._request.model.has_text else None)
            for row, (ask, prompt) in enumerate(zip(self._asks, self._generation.prompts, strict=True))
            for sequence in range(self._n)
        ]
        try:
            async for piece in self._generation:
                gain = completions[piece.choice].take(piece.delta)
                if gain.is_last and not _has_ended(piece):
                    self._generation.finish(piece.choice)
                yield gain
        except Refusal:
            if not self._is_stopped:
                raise
            for completion in completions:
                if not completion.is_over:
                    yield completion.end()
        self._counted.move_to_queue(self._generation.queue_seconds)

    def _response(self, gains: Sequence[Gain], is_whole: bool, is_last: bool) -> InferResponse:
        tensors = {tensor.name: tensor for tensor in self._outputs(gains, is_whole)}
        names = self._request.outputs or tuple(tensors)
        return InferResponse(
            self._request.model, self._request.request_id, [tensors[name] for name in names if name in tensors], is_last
        )

    def _outputs(self, gains: Sequence[Gain], is_whole: bool) -> list[Tensor]:
        """The outputs of completions or pieces, each a row."""
        rows = len(gains)
        if self._request.model.has_text:
            texts = [self._text(gain) if is_whole else gain.text for gain in gains]
            found = [Tensor("text_output", "BYTES", text_array(texts, (rows,)))]
        else:
            tokens = [self._prompt(gain, is_whole) + gain.tokens for gain in gains]
            output_ids = np.zeros((rows, 1, max(map(len, tokens))), np.int32)
            for place, (gain, row) in enumerate(zip(gains, tokens, strict=True)):
                output_ids[place, 0] = self._asks[gain.row].pad_token
                output_ids[place, 0, : len(row)] = row
            found = [
                Tensor("output_ids", "INT32", output_ids),
                _integers("sequence_length", [len(row) for row in tokens]),
            ]
        if any(ask.log_probs for ask in self._asks):
            found += _log_probs(gains)
        found.append(_integers("batch_index", [gain.row for gain in gains]))
        found.append(_integers("sequence_index", [gain.sequence for gain in gains]))
        if any(ask.reuse_stats for ask in self._asks):
            totals = [-(-gain.num_tokens // self._block_size) for gain in gains]
            reused = [gain.num_cached_tokens // self._block_size for gain in gains]
            found += [
                _integers("kv_cache_alloc_new_blocks", [all - old for all, old in zip(totals, reused, strict=True)]),
                _integers("kv_cache_reused_blocks", reused),
                _integers("kv_cache_alloc_total_blocks", totals),
            ]
        return found

    def _text(self, gain: Gain) -> str:
        """A whole completion's text, behind the prompt's where that is asked for."""
        if not self._asks[gain.row].has_prompt or self._tokenizer is None:
            return gain.text
        return self._tokenizer.decode([*self._generation.prompts[gain.row], *gain.tokens])

    def _prompt(self, gain: Gain, is_whole: bool) -> list[int]:
        ask = self._asks[gain.row]
        # Pieces never begin with the prompt, and neither do completions of clients that want pieces.
        return list(self._generation.prompts[gain.row]) if is_whole and ask.has_prompt else []


def _add(found: dict[tuple[int, int], Gain], gain: Gain) -> None:
    """Keep a gain with those of its completion."""
    place = (gain.row, gain.sequence)
    if place in found:
        found[place].add(gain)
    else:
        found[place] = replace(gain)


def _has_ended(piece: Piece) -> bool:
    return piece.delta.finish_reason is not None


def _integers(name: str, values: Sequence[int]) -> Tensor:
    return Tensor(name, "INT32", np.array(values, np.int32).reshape(len(values), 1))


def _log_probs(gains: Sequence[Gain]) -> list[Tensor]:
    """[rows, 1] sums, and [rows, 1, tokens] log probabilities, filled up with 0."""
    of_tokens = np.zeros((len(gains), 1, max(len(gain.log_probs) for gain in gains)), np.float32)
    for place, gain in enumerate(gains):
        of_tokens[place, 0, : len(gain.log_probs)] = gain.log_probs
    sums = np.array([[gain.sum_log_probs] for gain in gains], np.float32)
    return [Tensor("cum_log_probs", "FP32", sums), Tensor("output_log_probs", "FP32", of_tokens)]
