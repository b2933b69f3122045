"""First use of every kernel, before the first request: nothing initialises under load.

oneDNN and cuBLAS choose or compile kernels at the first call of each shape, which costs milliseconds, and a CUDA graph
takes up to a tenth of a second to capture. This runs the shapes that rounds have: of one row, and where there are
graphs of as many rows as each graph is for, and of as many short prompts as may come together. Contexts are short;
longer ones have graphs that are captured when they first come. It writes to the null block only, so it leaves no trace
in the KV store's owners.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import torch

from trtrun.core.nouns import Draft, PrefillChunk, RoundPlan
from trtrun.engine.graphs import MOST_PROMPT_TOKENS
from trtrun.engine.runner import Engine

_CONTEXTS = (64, 1024)
"""One that a program attends to by itself, and one that is split."""

_LAST_ROUNDS = 8
"""Up to which draft_len rounds of one row are run, one for each: every request's end may need any of them."""


def warm_up(
    engine: Engine,
    draft_lens: Collection[int],
    max_tokens: int,
    max_rows: int,
    *,
    verifies: bool,
    num_ranked: int = 1,
) -> None:
    """Run prefills, and the forwards of rounds of one row and, through graphs, of more.

    Collective over the engine's tensor-parallel group. The rows' tables hold no block, so that all that is written goes
    to the null block.

    Args:
        engine: freshly made; no request has run on it.
        draft_lens: how many tokens rounds will draft: the numbers that are sure to come; 0 alone without speculation.
        max_tokens: of a round: no forward here is larger than those that memory was set aside for.
        max_rows: of a round.
        verifies: whether it is a target engine; others draft.
        num_ranked: tokens of each drafted place that its drafter wants ranked: graphs are told apart by it.
    """
    # Rows of two zero tokens stand in for requests.
    engine.rows.lengths[:max_rows].fill_(2)
    longest = engine.rows.token_ids.shape[1] - engine.rows.max_draft_len - 2
    lengths = (2, MOST_PROMPT_TOKENS) if engine.has_graphs else (2,)
    for length in sorted({min(length, longest, max_tokens) for length in lengths}):
        engine.prefill([_chunk(0, length)])
    shapes = engine.prompt_shapes()
    widest = max((width for _, width in shapes), default=0)
    for tiles, width in shapes:
        rows = min(tiles, max_rows)
        # A row has several tiles only of the widest: a longer chunk is cut into wider ones where there are any.
        of_each = [width * (len(range(row, tiles, rows)) if width == widest else 1) for row in range(rows)]
        if sum(of_each) <= max_tokens and of_each[0] <= longest:
            engine.prefill([_chunk(row, length) for row, length in enumerate(of_each)])
    if engine.has_graphs:
        for context in sorted({min(context, longest) for context in _CONTEXTS}):
            engine.catch_up(torch.zeros(1, dtype=torch.int64, device=engine.device), [2], context=context)
            if verifies and max(draft_lens) < max_tokens:
                _verify(engine, 1, max(draft_lens), context)
    for rows in _numbers_of_rows(engine, max_rows):
        if verifies:
            for length in _lens_of(rows, {0, *draft_lens}):
                if rows == 1 or rows * (length + 1) <= max_tokens:
                    _verify(engine, rows, length)
        else:
            for length in _lens_of(rows, draft_lens):
                if length:
                    _draft(engine, rows, length, num_ranked)
    engine.rows.lengths[:max_rows].zero_()


def _numbers_of_rows(engine: Engine, max_rows: int) -> list[int]:
    """One for each graph, the largest first: smaller ones then find the memory of the pool there."""
    if not engine.has_graphs:
        return [1]
    return sorted({min(1 << power, max_rows) for power in range(max_rows.bit_length() + 1)}, reverse=True)


def _lens_of(rows: int, draft_lens: Collection[int]) -> list[int]:
    """The largest first. Of one row short ones, too: the last rounds of a request draft no more than it may have."""
    last = range(min(max(draft_lens), _LAST_ROUNDS) + 1) if rows == 1 else ()
    return sorted({*draft_lens, *last}, reverse=True)


def _chunk(row: int, length: int) -> PrefillChunk:
    return PrefillChunk(row=row, start=0, length=length, is_last=False, followed=True)


def _verify(engine: Engine, rows: int, length: int, context: int = 0) -> None:
    plan = RoundPlan(
        round_index=-1,
        dropped_rows=(),
        admissions=(),
        block_updates=np.zeros((0, 3), dtype=np.int32),
        prefill=(),
        decode_rows=np.arange(rows, dtype=np.int32),
        draft_lens=np.full(rows, length, dtype=np.int32),
        catch_up=np.full(rows, 2, dtype=np.int32),
        max_context=max(2 + length, context),
    )
    lens, paths = torch.full((rows,), length, device=engine.device), engine.most_paths
    nodes = torch.arange(paths * length, device=engine.device).view(paths, length).expand(rows, -1, -1)
    tokens = torch.zeros((rows, paths * length), dtype=torch.int64, device=engine.device)
    engine.verify_forward(plan, Draft(tokens, lens, paths=nodes if paths > 1 and length else None))


def _draft(engine: Engine, rows: int, draft_len: int, num_ranked: int) -> None:
    places = torch.arange(rows, device=engine.device)
    context = 2 + draft_len
    engine.catch_up(places, [2] * rows, context=context)
    positions = torch.ones((rows, draft_len - 1), dtype=torch.int64, device=engine.device)
    tables = engine.tables(places, context)
    first = torch.zeros(rows, dtype=torch.int64, device=engine.device)
    # As the drafter calls it: a graph keeps the number of ids to choose from.
    vocab_size = engine.rows.sampling.vocab_size
    ranked = min(num_ranked, vocab_size)
    if draft_len > 1 and engine.rank_steps(first, positions, tables, vocab_size, ranked) is None:
        engine.decode(engine.prepare_steps(tables, positions)[0], first)
