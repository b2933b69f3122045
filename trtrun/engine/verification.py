"""The forward that verifies drafts, beside the prompts of the round: logits, what is tapped on the way, and what
prompts are asked for: log probabilities of their tokens, and logits behind them.

Logits of few positions of a prompt exist at a time, whatever the chunk: those of a whole chunk would take a gigabyte
for each 2,048 positions and 128k entries of the vocabulary. It does not know which tokens are accepted, who asked, or
how the numbers travel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from trtrun.core.nouns import Draft, LogitsPart, PrefillChunk, RoundPlan, ScoredPart, Step, VerdictLogprobs
from trtrun.engine.batch import BatchBuilder
from trtrun.engine.forwards import Forwards
from trtrun.engine.rows import RowState
from trtrun.models.decoder import CausalLM
from trtrun.sampling.filters import MOST_ELEMENTS
from trtrun.sampling.row_sampling import RowSampling
from trtrun.tensors import cached_tensor, device_integers

_MOST_AT_ONCE = 128


def positions_at_once(vocab_size: int) -> int:
    """Positions whose logits exist at once."""
    return max(1, min(_MOST_AT_ONCE, MOST_ELEMENTS // vocab_size))


def tokens_of_parts(
    places: Sequence[Sequence[range]],
    chunks: Sequence[PrefillChunk],
    part_of: Callable[[PrefillChunk], ScoredPart | LogitsPart | None],
) -> list[int]:
    """Where positions of parts of chunks stand in a batch, in order; `places` says where each chunk's tokens do, and
    `part_of` which part counts, None for none."""
    found: list[int] = []
    for of_chunk, chunk in zip(places, chunks, strict=True):
        part = part_of(chunk)
        if part is not None:
            tokens = [token for run in of_chunk for token in run]
            first = part.start - chunk.start
            found += tokens[first : first + part.length]
    return found


def score_prompts(
    model: CausalLM, rows: RowState, chunks: Sequence[PrefillChunk], hidden: torch.Tensor
) -> VerdictLogprobs | None:
    """Log probabilities behind the scored positions of chunks. Collective over the tensor-parallel group.

    Args:
        model: whose head makes logits.
        rows: which have the prompts' tokens.
        chunks: some of which are scored.
        hidden: [positions, hidden] of `CausalLM.forward`, of the scored positions in order.

    Returns:
        [positions, 1 + alternatives] each: the token behind the position, then the most likely ones. None on ranks that
        read no logits.
    """
    scored = [(chunk.row, chunk.scored) for chunk in chunks if chunk.scored is not None]
    most = max(part.alternatives for _, part in scored)
    behind = [rows.token_ids[row, part.start + 1 : part.start + 1 + part.length] for row, part in scored]
    tokens = torch.cat(behind).to(torch.int64)
    ids, values = [], []
    at_once = positions_at_once(model.config.vocab_size)
    for start in range(0, len(hidden), at_once):
        part = slice(start, start + at_once)
        logits = model.logits(hidden[part])
        if model.reads_logits:
            found = RowSampling.top_logprobs(logits.unsqueeze(0), tokens[part].unsqueeze(0), most)
            ids.append(found.token_ids[0])
            values.append(found.values[0])
    return VerdictLogprobs(torch.cat(ids), torch.cat(values)) if ids else None


def report_prompts(model: CausalLM, hidden: torch.Tensor) -> torch.Tensor | None:
    """Logits of positions. Collective over the tensor-parallel group.

    Args:
        model: whose head makes them.
        hidden: [positions, hidden] of `CausalLM.forward`, of the reported positions in order.

    Returns:
        [positions, vocab] float32 on the host: from a GPU in pinned memory, where they are once the device has done
        what it was given. None on ranks that read no logits.
    """
    found = None
    at_once = positions_at_once(model.config.vocab_size)
    for start in range(0, len(hidden), at_once):
        part = slice(start, start + at_once)
        logits = model.logits(hidden[part])
        if model.reads_logits:
            if found is None:
                shape = (len(hidden), logits.shape[-1])
                found = torch.empty(shape, dtype=logits.dtype, pin_memory=logits.is_cuda)
            found[part].copy_(logits, non_blocking=True)
    return found


class Verification:
    """Runs it on one engine rank."""

    def __init__(self, model: CausalLM, rows: RowState, forwards: Forwards) -> None:
        self._model = model
        self._rows = rows
        self._forwards = forwards
        self._device = rows.device
        self._vocab_size = model.config.vocab_size

    def run(self, plan: RoundPlan, draft: Draft) -> Step:
        """One forward over the newest token of every decode row and its draft, and over every prefill chunk.

        Args:
            plan: the round's plan.
            draft: on the device; where its draft_lens are below 1 only the newest token is fed.
        """
        if any(chunk.scored is not None or chunk.reported is not None for chunk in plan.prefill):
            return self._verify_beside_prompts(plan, draft)  # graphs have the last positions of prompts alone
        queries = draft.tokens.shape[1] + 1
        logits = torch.empty((0, queries, self._vocab_size), device=self._device)
        rows = cached_tensor(plan.decode_rows.tolist(), self._device)
        mixed = self._forwards.run_mixed(rows, draft, plan.prefill, plan.max_context)
        by_graph = mixed.prompts if mixed is not None else self._forwards.prefill_by_graph(plan.prefill)
        if by_graph is None and plan.prefill:
            return self._verify_beside_prompts(plan, draft)
        if mixed is not None:
            logits = mixed.logits
        elif len(plan.decode_rows):
            logits = self._forwards.run_drafts(rows, draft, plan.max_context).view(-1, queries, self._vocab_size)
        tapped = by_graph.tapped if by_graph is not None else []
        hidden = (
            self._forwards.taps.states(len(plan.decode_rows), queries, tapped)
            if self._forwards.taps is not None
            else None
        )
        return Step(logits if by_graph is None else self._join(logits, by_graph.logits, plan, queries), hidden)

    def _verify_beside_prompts(self, plan: RoundPlan, draft: Draft) -> Step:
        """`verify_forward` where prompts are computed beside the decode rows, in one forward."""
        builder, queries = BatchBuilder(self._rows), draft.tokens.shape[1] + 1
        if len(plan.decode_rows):
            rows = cached_tensor(plan.decode_rows.tolist(), self._device)
            if draft.paths is None:
                builder.add_rows(rows, *self._rows.with_drafts(rows, draft.tokens, draft.draft_lens), plan.max_context)
            else:
                assert self._forwards.paths is not None
                builder.add_trees(self._forwards.paths.fork(rows, draft, self._forwards.tables(rows, plan.max_context)))
        num_decoded = builder.num_tokens
        places = builder.add_prompts(plan.prefill, self._forwards.prompt_width)
        ended = [of_chunk[-1][-1] for of_chunk, chunk in zip(places, plan.prefill, strict=True) if chunk.is_last]
        scored = tokens_of_parts(places, plan.prefill, lambda chunk: chunk.scored)
        reported = tokens_of_parts(places, plan.prefill, lambda chunk: chunk.reported)
        wanted = [*range(num_decoded), *ended, *scored, *reported]
        hidden = self._forwards.run(builder.build(device_integers(wanted, self._device)))
        states = None
        if self._forwards.taps is not None:
            states = self._forwards.taps.states(
                len(plan.decode_rows), queries, [self._forwards.taps.copy(one) for one in places]
            )
        scores = reports = None
        if scored or reported:
            end, behind = num_decoded + len(ended), len(wanted) - len(reported)
            if scored:
                scores = score_prompts(self._model, self._rows, plan.prefill, hidden[end:behind])
            if reported:
                reports = report_prompts(self._model, hidden[behind:])
            hidden = hidden[:end]
        if not len(hidden):
            return Step(torch.empty((0, queries, self._vocab_size), device=self._device), states, scores, reports)
        logits = self._model.logits(hidden)
        after_prompts = logits[num_decoded:].unsqueeze(1).expand(-1, queries, -1)
        decoded = logits[:num_decoded].view(-1, queries, self._vocab_size)
        return Step(torch.cat((decoded, after_prompts)), states, scores, reports)

    def _join(self, logits: torch.Tensor, after_prompts: torch.Tensor, plan: RoundPlan, queries: int) -> torch.Tensor:
        """Logits [decode_rows, queries, vocab], and behind them those of prompts that end in the round, repeated."""
        ended = [index for index, chunk in enumerate(plan.prefill) if chunk.is_last]
        if not ended:
            return logits
        last = after_prompts[device_integers(ended, self._device)].unsqueeze(1)
        return torch.cat((logits, last.expand(-1, queries, -1)))
