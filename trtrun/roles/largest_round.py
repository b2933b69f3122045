"""The largest rounds of a configuration, run at start on a GPU to measure what rounds need beside weights and KV.

They run on the engines as requests will, through the functions of the cycle, with every row at the end of its context
and with every sampling parameter, against a KV store of the null block alone: block tables are empty, so that all is
written there. It knows the cycle and a GPU's counters of memory. It does not know how much KV follows from it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from trtrun.core import Draft, PrefillChunk, RoundPlan, RowAdmission
from trtrun.engine.graphs import MOST_GRAPHS, MOST_PROMPT_TOKENS
from trtrun.engine.runner import Engine
from trtrun.engine.working_memory import RoundShape
from trtrun.sampling_params import SamplingParams
from trtrun.speculation.ahead.drafter import AheadDrafter
from trtrun.speculation.cycle import anticipate_round, begin_round, draft_round, propose_round, verify_round
from trtrun.speculation.drafter import Drafter

_MUCH_PADDING = 17
"""Tokens of a prompt that becomes a tile of 32 queries (engine/prompt_tiles.py)."""

_GRAPH_TENSORS_BYTES = 1 << 20
"""What a graph reads and writes of its own, above all the block tables of its rows."""

_CATCH_UP = 8
"""Tokens that a draft engine feeds of a row at most (scheduling/planning.py)."""

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


class SilentLink:
    """A DraftLink of a rehearsal: nothing travels, and every verdict is one of no tokens."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def send_draft(self, tokens: torch.Tensor, draft_lens: torch.Tensor, draft_probs: torch.Tensor | None) -> None:
        """See DraftLink."""

    def receive_draft(
        self, rows: int, draft_len: int, probability_rows: int, vocab: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """See DraftLink: as many tokens as are asked for, and probabilities, of zeros."""
        probs = torch.zeros((probability_rows, draft_len, vocab), device=self._device) if probability_rows else None
        tokens = torch.zeros((rows, draft_len), dtype=torch.int64, device=self._device)
        return tokens, torch.full((rows,), draft_len, dtype=torch.int64, device=self._device), probs

    def send_verdict(self, num_tokens: torch.Tensor, tokens: torch.Tensor) -> None:
        """See DraftLink."""

    def receive_verdict(self, rows: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See DraftLink."""
        tokens = torch.full((rows, width), -1, dtype=torch.int64, device=self._device)
        return torch.zeros(rows, dtype=torch.int64, device=self._device), tokens


@dataclass
class Rehearsal:
    """This process's engines, over stores of one block.

    Attributes:
        drafter: where the process drafts beside a target rank, or in its place.
        ahead: where it drafts on a device of its own.
        draft: the draft engine, where it holds a draft rank.
        target: where it holds a target rank.
        leads_target: whether its target rank decides.
        shape: of the largest round.
    """

    drafter: Drafter | None
    ahead: AheadDrafter[Any] | None
    draft: Engine | None
    target: Engine | None
    leads_target: bool
    shape: RoundShape

    @property
    def engines(self) -> list[Engine]:
        """The engines that are here."""
        return [engine for engine in (self.draft, self.target) if engine is not None]

    @property
    def num_graphs(self) -> int:
        """Graphs that they hold."""
        return sum(engine.num_graphs for engine in self.engines)

    @torch.inference_mode()
    def play(self, plan: RoundPlan) -> None:
        """Run a round as a worker does. Collective over the tensor-parallel groups."""
        if self.ahead is not None:
            self.ahead.begin_round(plan)
            propose_round(self.ahead, plan)
            anticipate_round(self.ahead, plan, guesses=True)
            return
        by_probability = begin_round(plan, self.drafter, self.target, use_logits=self.shape.use_logits)
        draft = draft_round(self.drafter, plan, by_probability) if self.drafter is not None else None
        if self.target is None:
            return
        link = SilentLink(self.target.device)
        if draft is None and plan.draft_len:
            count = len(by_probability) if self.leads_target else 0
            vocab = self.target.vocab_size
            draft = Draft(*link.receive_draft(len(plan.decode_rows), plan.draft_len, count, vocab))
        verify_round(self.target, link, plan, draft, by_probability, leads=self.leads_target)

    def close(self) -> None:
        """Give the graphs back."""
        for engine in self.engines:
            engine.close()


def largest_rounds(shape: RoundShape) -> list[RoundPlan]:
    """Rounds of all the tokens that a round may have, in few prompts and in as many as take most padding, beside rows;
    a round with a prompt as long as graphs take them; and one of all rows alone."""
    length = max(2, shape.max_seq_len - shape.draft_len - 1)
    kinds = [
        _chunks(shape, length, shape.max_tokens, length),
        _chunks(shape, length, shape.max_tokens, _MUCH_PADDING),
        _chunks(shape, length, min(shape.max_tokens, length, MOST_PROMPT_TOKENS), length),
        [],
    ]
    return [_plan(shape, range(shape.max_rows - len(chunks)), chunks, length) for chunks in kinds]


def _chunks(shape: RoundShape, length: int, num_tokens: int, usual: int) -> list[PrefillChunk]:
    """The ends of prompts of `length`, `num_tokens` in all where there are rows for them, `usual` each but for the one
    of the first row, which gets the rest."""
    chunks, left = [], num_tokens
    for row in reversed(range(shape.max_rows)):
        count = min(left, usual if row else length)
        if count:
            chunks.append(PrefillChunk(row, length - count, count, is_last=True, followed=True))
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
        catch_up=np.full(count, min(_CATCH_UP, length) if speculates else 0, dtype=np.int32),
        max_context=length + shape.draft_len + 1,
        num_guesses=shape.num_guesses,
    )


def measure_largest_round(device: torch.device, prepare: Callable[[], Rehearsal], shape: RoundShape) -> int:
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
    rehearsal = prepare()
    try:
        for plan in (*largest_rounds(shape), chained_round(shape)):
            rehearsal.play(plan)
        for_graphs, captured = 0, rehearsal.num_graphs
        torch.cuda.synchronize(device)
        elsewhere = _elsewhere(device, free, reserved)
        if captured:
            rehearsal.play(small_round(shape))
            torch.cuda.synchronize(device)
            more = rehearsal.num_graphs - captured
            beside = max(0, _elsewhere(device, free, reserved) - elsewhere) // max(1, more)
            for_graphs = (beside + _GRAPH_TENSORS_BYTES) * MOST_GRAPHS * len(rehearsal.engines)
        peak = torch.cuda.max_memory_reserved(device) - reserved
    finally:
        rehearsal.close()
        del rehearsal
        gc.collect()
        torch.cuda.empty_cache()
    return peak + max(0, elsewhere) + for_graphs


def _elsewhere(device: torch.device, free: int, reserved: int) -> int:
    """Bytes that were taken beside torch's allocator since `free` were free and `reserved` reserved."""
    return free - torch.cuda.mem_get_info(device)[0] - (torch.cuda.memory_reserved(device) - reserved)
