"""Requests for the generating models, at work: rows go through the frontend, and its pieces become outputs.

A completion's tokens are the engine's up to its end: a token that ends it is left out, a word that stops it stays.
Logits of completions, which come in parts, become one tensor of all rows; they are large, so the event loop may serve
others between the parts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from launch.serve.admission.event_loop_stalls import YieldTimer
from launch.serve.admission.refusals import Kind, Refusal
from launch.serve.api.kserve.requests import InferRequest, InferResponse
from launch.serve.api.kserve.row_requests import RowRequest
from launch.serve.api.kserve.tensors import Array, Tensor, text_array
from launch.serve.frontend.frontend import Frontend, Generation
from launch.serve.metrics import ModelRequest, Stage
from launch.serve.metrics.models import Failure
from trtrun.core.outputs import CompletionDelta
from trtrun.tokens.detokenizer import IncrementalDetokenizer

_AT_ONCE = 1 << 20
"""Logits that are copied without a rest: 4 MiB."""


def first_positions(count: int, parts: Sequence[Array]) -> list[Array]:
    """The first `count` positions of parts, [positions, vocab] each."""
    found: list[Array] = []
    for part in parts:
        found.append(part[: count - sum(map(len, found))])
    return found


async def stack_logits(of_rows: Sequence[Sequence[Array]]) -> Array:
    """[rows, positions, vocab] float32 of the parts, [positions, vocab] each, that each of the rows has; shorter rows
    are filled up with 0."""
    if len(of_rows) == 1 and len(of_rows[0]) == 1:
        return of_rows[0][0][None]
    lengths = [sum(map(len, parts)) for parts in of_rows]
    width = max((part.shape[1] for parts in of_rows for part in parts), default=0)
    stacked = np.zeros((len(of_rows), max(lengths, default=0), width), np.float32)
    step = max(1, _AT_ONCE // max(1, width))
    yield_timer = YieldTimer()
    for row, parts in zip(stacked, of_rows, strict=True):
        at = 0
        for part in parts:
            for start in range(0, len(part), step):
                piece = part[start : start + step]
                row[at : at + len(piece)] = piece
                at += len(piece)
                await yield_timer.yield_if_due()
    return stacked


@dataclass
class RowUpdate:
    """What is new of a completion; a whole completion is the sum of its updates.

    Attributes:
        tokens, log_probs: new ones.
        texts: the new text, in parts: a whole completion may have as many as it has tokens.
        sum_log_probs: of the completion so far.
        num_tokens: of prompt and completion so far.
        num_cached_tokens: of the prompt, whose keys and values were there.
        is_last: whether it has ended.
        context_logits, generation_logits: [positions, vocab] float32 of the prompt, where they came with it, and of the
            new tokens, in parts.
    """

    row: int
    sequence: int
    tokens: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    sum_log_probs: float = 0.0
    num_tokens: int = 0
    num_cached_tokens: int = 0
    is_last: bool = False
    context_logits: list[Array] = field(default_factory=list)
    generation_logits: list[Array] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All parts."""
        return "".join(self.texts)

    def add(self, later: RowUpdate) -> None:
        """Go on with what came after."""
        self.tokens += later.tokens
        self.texts += later.texts
        self.log_probs += later.log_probs
        self.generation_logits += later.generation_logits
        self.context_logits += later.context_logits
        self.sum_log_probs, self.num_tokens = later.sum_log_probs, later.num_tokens
        self.num_cached_tokens, self.is_last = later.num_cached_tokens, later.is_last


class _Completion:
    """A completion of a row while it comes: where it ends, and its text.

    Attributes:
        is_over: whether it has ended.
    """

    def __init__(
        self,
        row_request: RowRequest,
        row: int,
        sequence: int,
        prompt: Sequence[int],
        text: IncrementalDetokenizer | None,
    ) -> None:
        self._request = row_request
        self._row, self._sequence = row, sequence
        self._newest: deque[int] = deque(maxlen=max(map(len, row_request.sampling.stop_sequences), default=1))
        self._sum_log_probs = 0.0
        self._num_tokens = len(prompt)
        self._num_cached_tokens = 0
        self.is_over = False
        self._text = text

    def take(self, delta: CompletionDelta) -> RowUpdate:
        """Turn a delta into an update."""
        self._newest.extend(delta.token_ids)
        is_last = self.is_over = delta.finish_reason is not None
        kept = len(delta.token_ids) - (delta.finish_reason == "stop" and self._ends_with_end_token())
        tokens = list(delta.token_ids[:kept])
        log_probs = [entry.logprob for entry in (delta.logprobs or ())[:kept]]
        self._sum_log_probs += sum(log_probs)
        self._num_tokens += kept
        text = delta.text
        if self._text is not None:
            text = self._text.extend(tokens) + (self._text.flush() if is_last else "")
        self._num_cached_tokens = delta.statistics.num_cached_prompt_tokens
        update = self._update(tokens, text, log_probs, is_last)
        if delta.context_logits is not None:
            update.context_logits = delta.context_logits.arrays()
        if delta.generation_logits is not None:
            update.generation_logits = first_positions(kept, delta.generation_logits.arrays())
        return update

    def _ends_with_end_token(self) -> bool:
        """Whether the newest token is one that is left out: it may be the end of a stop sequence, which stays."""
        newest = tuple(self._newest)
        if not newest or newest[-1] not in self._request.end_tokens:
            return False
        return not any(newest[-len(stop) :] == stop for stop in self._request.sampling.stop_sequences)

    def end(self) -> RowUpdate:
        """End it where it is."""
        self.is_over = True
        return self._update([], self._text.flush() if self._text is not None else "", [], is_last=True)

    def _update(self, tokens: list[int], text: str, log_probs: list[float], is_last: bool) -> RowUpdate:
        return RowUpdate(
            self._row,
            self._sequence,
            tokens,
            [text] if text else [],
            log_probs,
            sum_log_probs=self._sum_log_probs,
            num_tokens=self._num_tokens,
            num_cached_tokens=self._num_cached_tokens,
            is_last=is_last,
        )


class Run:
    """A request for a generating model, at work. `responses` is read once; `close` has to be called, however that ends,
    and `let_go` once the client has read what came of it."""

    def __init__(
        self,
        request: InferRequest,
        requests: Sequence[RowRequest],
        generation: Generation,
        frontend: Frontend,
        block_size: int,
        counted: ModelRequest,
    ) -> None:
        self._request = request
        self._requests = requests
        self._generation = generation
        self._tokenizer = frontend.tokenizer
        self._block_size = block_size
        self._counted = counted
        self._n = requests[0].sampling.n
        self._is_stopped = False
        counted.num_inferences = len(requests) * self._n
        counted.enter(Stage.INFER)

    async def whole(self) -> InferResponse:
        """All completions, each a row of the outputs: those of the first row of the batch come first.

        Raises:
            Refusal: the request was lost, or its time is over.
        """
        with self._counted:
            found: dict[tuple[int, int], RowUpdate] = {}
            yield_timer = YieldTimer()
            async for update in self._updates():
                _add(found, update)
                await yield_timer.yield_if_due()
            self._counted.enter(Stage.OUTPUT)
            updates, rows = [found[place] for place in sorted(found)], []
            for update in updates:
                rows.append(self._row(update, is_whole=True))
                await yield_timer.yield_if_due()
            return await self._response(updates, rows, is_last=True)

    async def responses(self) -> AsyncIterator[InferResponse]:
        """Responses as they come, each of one completion: its pieces where the client streams, else all of it.

        Raises:
            Refusal: the request was lost, or its time is over.
        """
        with self._counted:
            streams = self._requests[0].stream
            num_going_on = len(self._requests) * self._n
            found: dict[tuple[int, int], RowUpdate] = {}
            async for update in self._updates():
                num_going_on -= update.is_last
                _add(found, update)
                if update.is_last or (streams and (update.tokens or update.text)):
                    told = found.pop((update.row, update.sequence))
                    row = self._row(told, is_whole=not streams)
                    yield await self._response([told], [row], is_last=not num_going_on)

    def stop(self) -> None:
        """The client wants no more: completions end where they are."""
        self._is_stopped = True
        self._generation.give_up(Refusal(Kind.FAILED, "the request was stopped"))

    def close(self) -> None:
        """Give up what has not ended."""
        self._generation.close()
        self._counted.fail(Failure.CANCELED)  # unless it has ended

    def let_go(self) -> None:
        """Make room for the logits of other requests."""
        self._generation.logits.leave()

    async def _updates(self) -> AsyncIterator[RowUpdate]:
        completions = []
        for row, (row_request, prompt) in enumerate(zip(self._requests, self._generation.prompts, strict=True)):
            text = self._own_text(row_request, prompt)
            completions += [
                _Completion(row_request, row, sequence, prompt, None if text is None else text.copied())
                for sequence in range(self._n)
            ]
        try:
            async for delta in self._generation:
                self._counted.begin_answer()
                yield completions[delta.index].take(delta)
        except Refusal:
            if not self._is_stopped:
                raise
            for completion in completions:
                if not completion.is_over:
                    yield completion.end()
        self._counted.move_to_queue(self._generation.queue_seconds)

    def _own_text(self, row_request: RowRequest, prompt: Sequence[int]) -> IncrementalDetokenizer | None:
        """What makes the text of a row's completions where the engine's is not theirs: that has stop tokens in it."""
        if self._tokenizer is None or not self._request.model.has_text or not row_request.sampling.stop_token_ids:
            return None
        return IncrementalDetokenizer(self._tokenizer, prompt)

    def _row(self, update: RowUpdate, is_whole: bool) -> str | Array:
        """The text, or the tokens, of a completion or a piece; behind the prompt's where that is asked for. Pieces
        never begin with the prompt, and neither do completions of clients that want pieces."""
        has_prompt = is_whole and self._requests[update.row].has_prompt
        prompt = self._generation.prompts[update.row] if has_prompt else ()
        if self._request.model.has_text:
            if not has_prompt or self._tokenizer is None:
                return update.text
            return self._tokenizer.decode([*prompt, *update.tokens])
        return np.concatenate([np.array(prompt, np.int32), np.array(update.tokens, np.int32)])

    async def _response(
        self, updates: Sequence[RowUpdate], rows: Sequence[str | Array], is_last: bool
    ) -> InferResponse:
        logits = await self._logits(updates)
        tensors = {tensor.name: tensor for tensor in self._outputs(updates, rows, logits)}
        names = self._request.outputs or tuple(tensors)
        return InferResponse(
            self._request.model, self._request.request_id, [tensors[name] for name in names if name in tensors], is_last
        )

    def _outputs(
        self, updates: Sequence[RowUpdate], rows: Sequence[str | Array], logits: Sequence[Tensor]
    ) -> list[Tensor]:
        """The outputs of completions or pieces, each with its row of texts or tokens; among them their `logits`."""
        if self._request.model.has_text:
            texts = [row for row in rows if isinstance(row, str)]
            found = [Tensor("text_output", "BYTES", text_array(texts, (len(rows),)))]
        else:
            output_ids = np.zeros((len(rows), 1, max(map(len, rows))), np.int32)
            for place, (update, row) in enumerate(zip(updates, rows, strict=True)):
                output_ids[place, 0] = self._requests[update.row].pad_token
                output_ids[place, 0, : len(row)] = row
            found = [
                Tensor("output_ids", "INT32", output_ids),
                _integers("sequence_length", [len(row) for row in rows]),
            ]
        if any(row_request.log_probs for row_request in self._requests):
            found += _log_probs(updates)
        found += logits
        found.append(_integers("batch_index", [update.row for update in updates]))
        found.append(_integers("sequence_index", [update.sequence for update in updates]))
        if any(row_request.reuse_stats for row_request in self._requests):
            totals = [-(-update.num_tokens // self._block_size) for update in updates]
            reused = [update.num_cached_tokens // self._block_size for update in updates]
            found += [
                _integers("kv_cache_alloc_new_blocks", [all - old for all, old in zip(totals, reused, strict=True)]),
                _integers("kv_cache_reused_blocks", reused),
                _integers("kv_cache_alloc_total_blocks", totals),
            ]
        return found

    async def _logits(self, updates: Sequence[RowUpdate]) -> list[Tensor]:
        """[rows, prompt, vocab] behind prompts, and [rows, 1, tokens, vocab] of tokens: as much as there is of what is
        asked for."""
        found = []
        if any(update.context_logits for update in updates):
            of_prompts = await stack_logits([update.context_logits for update in updates])
            found.append(Tensor("context_logits", "FP32", of_prompts))
        if any(row_request.sampling.return_generation_logits for row_request in self._requests):
            of_tokens = await stack_logits([update.generation_logits for update in updates])
            found.append(Tensor("generation_logits", "FP32", of_tokens[:, None]))
        return found


def _add(found: dict[tuple[int, int], RowUpdate], update: RowUpdate) -> None:
    """Add an update to the earlier ones of its completion."""
    place = (update.row, update.sequence)
    if place in found:
        found[place].add(update)
    else:
        found[place] = replace(update)


def _integers(name: str, values: Sequence[int]) -> Tensor:
    return Tensor(name, "INT32", np.array(values, np.int32).reshape(len(values), 1))


def _log_probs(updates: Sequence[RowUpdate]) -> list[Tensor]:
    """[rows, 1] sums, and [rows, 1, tokens] log probabilities, filled up with 0."""
    of_tokens = np.zeros((len(updates), 1, max(len(update.log_probs) for update in updates)), np.float32)
    for place, update in enumerate(updates):
        of_tokens[place, 0, : len(update.log_probs)] = update.log_probs
    sums = np.array([[update.sum_log_probs] for update in updates], np.float32)
    return [Tensor("cum_log_probs", "FP32", sums), Tensor("output_log_probs", "FP32", of_tokens)]
