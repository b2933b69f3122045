"""How likely the tokens of prompts are: the target's log probabilities behind positions of chunks that ask for them.

Logits of few positions exist at a time, whatever the chunk: those of a whole chunk would take a gigabyte for each 2,048
positions and 128k entries of the vocabulary. It knows hidden states, the head and chunks. It does not know who asked,
or how the numbers travel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from trtrun.core.nouns import LogitsPart, PrefillChunk, ScoredPart, VerdictLogprobs
from trtrun.engine.rows import RowState
from trtrun.models.decoder import CausalLM
from trtrun.sampling.pieces import MOST_ELEMENTS
from trtrun.sampling.row_sampling import RowSampling

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
