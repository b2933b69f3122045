"""The largest rounds of a configuration, run at start on a GPU to measure what rounds need beside weights and KV.

They run on the engines as requests will, in the order of a round (rounds/round.py), with every row at the end of its
context and with every sampling parameter, against a KV store of the null block alone: block tables are empty, so that
all is written there. It knows the round and a GPU's counters of memory. It does not know how much KV follows from it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from typing_extensions import override

from trtrun.core.nouns import Draft, HiddenStates, PrefillChunk, RoundPlan, RowAdmission, ScoredPart, Verdict
from trtrun.core.sampling_params import SamplingParams
from trtrun.engine.graphs.graph_cache import MOST_GRAPHS
from trtrun.engine.graphs.graph_shapes import MOST_PROMPT_TOKENS
from trtrun.engine.runner import Engine
from trtrun.engine.warmup import warm_up_largest_mixed
from trtrun.memory.working_memory import RoundShape
from trtrun.rounds.exchange.exchange import Exchange
from trtrun.rounds.launched_round import LaunchedRound, VerdictRound
from trtrun.rounds.round import Worker

_MUCH_PADDING = 17
"""Tokens of a prompt that becomes a tile of 32 queries (engine/batch.py)."""

_GRAPH_TENSORS_BYTES = 1 << 17
"""What a graph reads and writes of its own; block tables are all graphs' together."""

_MOST_GRAPH_BYTES = 1 << 26
"""A graph takes less beside torch's allocator: kilobytes for each of its kernels. Free memory is the whole GPU's, so
that more than that is what another process has taken meanwhile."""

_FEW_ROWS = 8
"""Rows whose contexts attention splits (kernels/triton/attention/attention_tiles.py), for which it keeps results of
shares."""

_SAMPLING = SamplingParams(
    temperature=1.0,
    top_p=0.9,
    min_p=0.001,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    logprobs=20,
    seed=0,
)

_WITHOUT_HISTORY = SamplingParams(temperature=1.0, top_k=50, top_p=0.9, seed=0)
"""Rows whose draft steps are one graph, choices and their scratch memory included."""


class SilentExchange(Exchange):
    """An Exchange of a trial run: nothing travels, a draft has as many tokens as are asked for, and every verdict that
    comes is one of no tokens."""

    def __init__(
        self,
        device: torch.device,
        target_vocab_size: int,
        *,
        verifies: bool,
        tapped: tuple[tuple[int, int], torch.dtype] | None = None,
    ) -> None:
        """Stand between engines on `device`; `verifies` where one of them is a target's. A head on a rank of its own is
        told hidden states like `tapped`: how many of a token, numbers of each, and their dtype."""
        self._device = device
        self._target_vocab_size = target_vocab_size
        self._verifies = verifies
        self._tapped = tapped

    @override
    def is_late(self, plan: RoundPlan) -> bool:
        return False

    @override
    def transfer_draft(self, plan: RoundPlan, draft: Draft | None, probability_rows: Sequence[int]) -> Draft | None:
        """Receive nothing: where nothing is drafted here, probabilities are zeros."""
        if not self._verifies or not plan.draft_len:
            return None
        if draft is not None:
            return draft
        rows, shape = len(plan.decode_rows), (len(probability_rows), plan.draft_len, self._target_vocab_size)
        tokens = torch.zeros((rows, plan.draft_len), dtype=torch.int64, device=self._device)
        probs = torch.zeros(shape, device=self._device) if probability_rows else None
        return Draft(tokens, torch.full((rows,), plan.draft_len, dtype=torch.int64, device=self._device), probs)

    @override
    def publish_guesses(self, plan: RoundPlan, guesses: Callable[[], np.ndarray | None]) -> None:
        pass

    @override
    def send_verdict(self, plan: RoundPlan, verdict: Verdict) -> None:
        pass

    @override
    def receive_verdict(self, plan: RoundPlan, width: int) -> Verdict:
        shape = (len(plan.sampled_rows), width)
        tokens = torch.full(shape, -1, dtype=torch.int64, device=self._device)
        return Verdict(torch.zeros(shape[0], dtype=torch.int64, device=self._device), tokens)

    @override
    def is_verdict_here(self, plan: RoundPlan) -> bool:
        return True

    @override
    def send_hidden(
        self, plan: RoundPlan, draft: Draft | None, verdict: Verdict | None, hidden: HiddenStates | None
    ) -> None:
        pass

    @override
    def receive_hidden(self, plan: RoundPlan, verdict: Verdict | None) -> HiddenStates | None:
        """Zeros, for as many tokens as there may be."""
        if self._tapped is None:
            return None
        shape, dtype = self._tapped
        decoded = torch.zeros((len(plan.decode_rows), plan.draft_len + 1, *shape), dtype=dtype, device=self._device)
        prompts = [torch.zeros((chunk.length, *shape), dtype=dtype, device=self._device) for chunk in plan.prefill]
        return HiddenStates(decoded, prompts)

    @override
    def conclude(self, plan: RoundPlan, decided: VerdictRound) -> LaunchedRound:
        return decided

    @override
    def forget(self) -> None:
        pass

    @override
    def close(self) -> None:
        pass


@dataclass
class TrialRun:
    """This process's worker with a SilentExchange, its engines by role over stores of one block, and the largest
    round."""

    worker: Worker
    engines: Mapping[str, Engine]
    shape: RoundShape

    @property
    def num_graphs(self) -> int:
        """Graphs that are held."""
        return sum(engine.num_graphs for engine in self.engines.values()) + self._of_drafter

    @property
    def most_graphs(self) -> int:
        """Graphs that there may be."""
        of_engines = sum(engine.most_graphs for engine in self.engines.values())
        return of_engines + (MOST_GRAPHS if self._of_drafter else 0)

    @property
    def _of_drafter(self) -> int:
        drafter = self.worker.drafter
        return drafter.num_graphs if drafter is not None else 0

    def play(self, plan: RoundPlan) -> None:
        """Run a round. Collective over the tensor-parallel groups."""
        self.worker.launch_round(plan).finish()

    def verify_beside_prompts(self) -> None:
        """Run the largest of the target's graphs of rows and prompts together, where it has any. Its forward alone: so
        it is collective over the target's group, and draft ranks need not know of it."""
        target = self.engines.get("target")
        if target is not None:
            warm_up_largest_mixed(target, self.shape.max_tokens, self.shape.max_rows)

    def close(self) -> None:
        """Give the graphs back."""
        self.worker.close()


def largest_rounds(shape: RoundShape) -> list[RoundPlan]:
    """Rounds of all the tokens that a round may have, in few prompts and in as many as take most padding, beside rows;
    a round with a prompt as long as graphs take them; one of all rows alone; one of few rows and a short prompt; and
    the first with log probabilities of prompts."""
    length = max(2, shape.max_seq_len - shape.draft_len - 1)
    kinds = [
        _chunks(shape, length, shape.max_tokens, length),
        _chunks(shape, length, shape.max_tokens, _MUCH_PADDING),
        _chunks(shape, length, min(shape.max_tokens, length, MOST_PROMPT_TOKENS), length),
        [],
    ]
    few = [PrefillChunk(shape.max_rows - 1, length - 1, 1, is_last=True, has_draft_kv=True)]
    rounds = [_plan(shape, range(shape.max_rows - len(chunks)), chunks, length) for chunks in kinds]
    rounds.append(_plan(shape, range(min(_FEW_ROWS, shape.max_rows - 1)), few, length))
    # Behind the last token of a prompt nothing is scored.
    parts = ((chunk, ScoredPart(chunk.start, chunk.length - 1, 20)) for chunk in kinds[0])
    scored = [replace(chunk, scored=part if part.length else None) for chunk, part in parts]
    return [*rounds, _plan(shape, range(shape.max_rows - len(scored)), scored, length)]


def _chunks(shape: RoundShape, length: int, num_tokens: int, usual: int) -> list[PrefillChunk]:
    """The ends of prompts of `length`, `num_tokens` in all where there are rows for them, `usual` each but for the one
    of the first row, which gets the rest."""
    chunks, left = [], num_tokens
    for row in reversed(range(shape.max_rows)):
        count = min(left, usual if row else length)
        if count:
            chunks.append(PrefillChunk(row, length - count, count, is_last=True, has_draft_kv=True))
            left -= count
    return chunks


def chained_round(shape: RoundShape) -> RoundPlan:
    """A round of all rows whose draft steps, choices included, run as one graph on engines that have graphs."""
    length = max(2, shape.max_seq_len - shape.draft_len - 1)
    return _plan(shape, range(shape.max_rows), (), length, _WITHOUT_HISTORY)


def small_round(shape: RoundShape) -> RoundPlan:
    """A round of half the rows with short contexts: other graphs than the largest round's, and none of its memory."""
    return _plan(shape, range(max(1, shape.max_rows // 2)), (), 2)


def _plan(
    shape: RoundShape,
    decoding: range,
    chunks: Sequence[PrefillChunk],
    length: int,
    sampling: SamplingParams = _SAMPLING,
) -> RoundPlan:
    count, speculates = len(decoding), shape.draft_len > 0
    rows = range(shape.max_rows)
    tokens = np.zeros(length, dtype=np.int32)
    return RoundPlan(
        round_index=-1,
        dropped_rows=tuple(rows),
        admissions=tuple(RowAdmission(row, row, tokens, length, 0, speculates, sampling) for row in rows),
        block_updates=np.zeros((0, 3), dtype=np.int32),
        prefill=tuple(chunks),
        decode_rows=np.array(decoding, dtype=np.int32),
        draft_lens=np.full(count, shape.draft_len if speculates else -1, dtype=np.int32),
        catch_up=np.full(count, min(shape.most_catch_up, length) if speculates else 0, dtype=np.int32),
        max_context=length + shape.draft_len + 1,
        num_guesses=shape.num_guesses,
    )


def measure_largest_round(device: torch.device, prepare: Callable[[], TrialRun], shape: RoundShape) -> int:
    """Bytes that rounds need on a GPU beside what it holds now: what `prepare` makes, and the peak of rounds.

    What torch's allocator reserves is counted, with its holes, and what libraries take beside it, and as much beside it
    for every graph that there may be as one more was seen to take. Graphs share the memory that they compute in.
    Collective over the tensor-parallel groups. All of it is given back.

    Args:
        device: the GPU.
        prepare: makes the engines of this process.
        shape: of the largest round.

    Raises:
        torch.OutOfMemoryError: the round does not fit into what is free.
    """
    torch.cuda.synchronize(device)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    free, reserved = torch.cuda.mem_get_info(device)[0], torch.cuda.memory_reserved(device)
    trial = prepare()
    try:
        trial.verify_beside_prompts()  # the largest graph first, as a start makes them
        for plan in (*largest_rounds(shape), chained_round(shape)):
            trial.play(plan)
        for_graphs, captured = 0, trial.num_graphs
        torch.cuda.synchronize(device)
        elsewhere = _elsewhere(device, free, reserved)
        if captured:
            trial.play(small_round(shape))
            torch.cuda.synchronize(device)
            more = trial.num_graphs - captured
            beside = graph_bytes(_elsewhere(device, free, reserved) - elsewhere, more)
            for_graphs = beside * trial.most_graphs
        peak = torch.cuda.max_memory_reserved(device) - reserved
    finally:
        trial.close()
        del trial
        gc.collect()
        torch.cuda.empty_cache()
    return peak + max(0, elsewhere) + for_graphs


def graph_bytes(taken: int, num_graphs: int) -> int:
    """Bytes that a graph takes beside what all compute in, where `taken` bytes fewer were free on the GPU behind
    `num_graphs` more of them."""
    of_one = min(max(0, taken) // num_graphs, _MOST_GRAPH_BYTES) if num_graphs else 0
    return of_one + _GRAPH_TENSORS_BYTES


def _elsewhere(device: torch.device, free: int, reserved: int) -> int:
    """Bytes that were taken beside torch's allocator since `free` were free and `reserved` reserved."""
    return free - torch.cuda.mem_get_info(device)[0] - (torch.cuda.memory_reserved(device) - reserved)
