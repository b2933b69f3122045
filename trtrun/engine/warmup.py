"""First use of every kernel, before the first request: nothing initialises under load.

oneDNN and cuBLAS choose or compile kernels at the first call of each shape, which costs milliseconds, and a CUDA graph
takes up to a tenth of a second to capture. Where there are graphs this makes all of them, so that no round has to wait
for one. Elsewhere it runs the shapes of rounds of one row, and on GPUs those by whose sizes kernels are told apart. It
writes to the null block only, so it leaves no trace in the KV store's owners.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import islice

import numpy as np
import torch

from trtrun.core.nouns import Draft, PrefillChunk, RoundPlan
from trtrun.core.sampling_params import MOST_LOGPROBS
from trtrun.engine.graphs.graph_shapes import GraphShapes
from trtrun.engine.runner import Engine
from trtrun.engine.start_forwards import Mixed, Prompts, StartLimits, Steps, draft_steps
from trtrun.sampling.distributions import KeyedRanks
from trtrun.sampling.random import Stream

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
    most_catch_up: int = 2,
    samples_steps: bool = True,
    in_parallel: bool = False,
    leaves_graphs: bool = False,
) -> None:
    """Run prefills and the forwards of rounds: of one row, or through each of the graphs that rounds may need.

    Collective over the engine's tensor-parallel group. The rows' tables hold no block, so that all that is written goes
    to the null block.

    Args:
        engine: freshly made; no request has run on it.
        draft_lens: how many tokens rounds will draft: the numbers that are sure to come; 0 alone without speculation.
        max_tokens: of a round: no forward here is larger than those that memory was set aside for.
        max_rows: of a round.
        verifies: whether it is a target engine; others draft.
        num_ranked: tokens of each drafted place that its drafter wants ranked: graphs are told apart by it. 0 where it
            never has steps chosen by a graph.
        most_catch_up: tokens of a row that a draft engine feeds after rounds that it sat out, at most.
        samples_steps: whether steps of sampled rows are chains, too.
        in_parallel: whether a draft engine drafts all tokens in one forward: then it makes no steps.
        leaves_graphs: whether rounds make most graphs when they need them first, so that the first ones come sooner.
    """
    # Rows of two zero tokens stand in for requests.
    engine.rows.lengths[:max_rows].fill_(2)
    limits = _limits(engine, max_tokens, max_rows)
    _prefill(engine, limits.first_prompt())
    shapes = engine.graph_shapes
    if verifies and engine.device.type == "cuda":
        _rank(engine)
    if shapes is None:
        for length in _lens_of_one_row(draft_lens):
            if verifies:
                _verify(engine, 1, length)
            elif length:
                _draft(engine, 1, length, in_parallel=in_parallel)
        if engine.device.type == "cuda":
            _run_sizes(engine, max(draft_lens), limits, verifies=verifies, in_parallel=in_parallel)
    else:
        # The largest graphs of a kind first: smaller ones find the memory of the pool there.
        most = 1 if leaves_graphs else None
        for of_both in islice(limits.mixed(shapes), most) if verifies else ():
            _verify_mixed(engine, of_both)
        for prompts in islice(limits.prompts(shapes), most):
            _prefill(engine, prompts)
        if verifies:
            found = limits.verifications(shapes, draft_lens, has_trees=engine.has_trees)
            for rows, length, blocks in islice(found, most):
                _verify(engine, rows, length, engine.block_size * blocks)
        else:
            steps = islice(draft_steps(shapes, most_catch_up), most)
            _draft_all(engine, shapes, num_ranked, steps, samples_steps=samples_steps)
    engine.rows.lengths[:max_rows].zero_()


def warm_up_largest_mixed(engine: Engine, max_tokens: int, max_rows: int) -> None:
    """Run the largest forward of rows and prompts together that has a graph, as `warm_up` does; nothing where none has.

    Args:
        engine: of a target.
        max_tokens, max_rows: of a round.
    """
    shapes = engine.graph_shapes
    largest = None if shapes is None else next(_limits(engine, max_tokens, max_rows).mixed(shapes), None)
    if largest is not None:
        engine.rows.lengths[:max_rows].fill_(2)
        _verify_mixed(engine, largest)
        engine.rows.lengths[:max_rows].zero_()


def _limits(engine: Engine, max_tokens: int, max_rows: int) -> StartLimits:
    return StartLimits(max_tokens, max_rows, engine.rows.token_ids.shape[1] - engine.rows.max_draft_len - 2)


def _draft_all(
    engine: Engine,
    shapes: GraphShapes,
    num_ranked: int,
    steps: Iterable[Steps],
    *,
    samples_steps: bool,
) -> None:
    """What rows lack, and one step of each kind, or drafts in one forward."""
    # As the drafter calls it: a graph keeps the number of ids to choose from.
    vocab_size = engine.rows.sampling.vocab_size
    for rows, blocks, widths, masked in steps:
        places = torch.arange(rows, device=engine.device)
        tables = engine.tables(places, engine.block_size * blocks)
        for width in widths:
            nowhere = torch.full((rows, width), -1, dtype=torch.int64, device=engine.device)
            engine.feed(torch.zeros_like(nowhere), nowhere, tables)
        for count, drafts in masked:
            nowhere = torch.full((rows, count + drafts - 1), -1, dtype=torch.int64, device=engine.device)
            engine.feed(torch.zeros_like(nowhere), nowhere, tables, drafts)
        if shapes.drafts_in_parallel or not num_ranked:
            continue
        first, nowhere = torch.zeros_like(places), torch.full_like(places, -1).unsqueeze(1)
        sampled = KeyedRanks.kinds(engine.rows.sampling, range(rows), first, Stream.TARGET) if samples_steps else []
        for keyed in (*sampled, None):
            engine.rank_steps(first, nowhere, tables, vocab_size, min(num_ranked, vocab_size), keyed)


def _rank(engine: Engine) -> None:
    """Rank alternatives for log probabilities, in each number that kernels are compiled for."""
    logits = torch.zeros((1, 1, engine.vocab_size), device=engine.device)
    tokens = torch.zeros((1, 1), dtype=torch.int64, device=engine.device)
    for place in range((MOST_LOGPROBS - 1).bit_length() + 1):
        engine.rows.sampling.top_logprobs(logits, tokens, min(1 << place, MOST_LOGPROBS, engine.vocab_size))


def _run_sizes(engine: Engine, length: int, limits: StartLimits, *, verifies: bool, in_parallel: bool) -> None:
    """Rounds of each size by which kernels are told apart: of few rows and many, and prompts alike, in short contexts
    and long ones; of trees prompts beside them, too, which then are read by other kernels."""
    of_row = 1 + (engine.draft_size(length).nodes if verifies else length)
    has_trees = verifies and length > 0 and engine.has_trees
    for rows in limits.doubled_rows(of_row):
        _put_back(engine, limits)
        if verifies:
            _verify(engine, rows, length)
        elif length:
            _draft(engine, rows, length, in_parallel=in_parallel)
    for prompts in limits.doubled_prompts():
        _put_back(engine, limits)
        _prefill(engine, prompts)
        has_room = of_row + sum(prompts.lengths) <= limits.max_tokens
        if has_trees and len(prompts.lengths) == 1 and has_room and not prompts.start:
            _verify(engine, 1, length, prompts=prompts.lengths)


def _put_back(engine: Engine, limits: StartLimits) -> None:
    """Rows of two zero tokens again. What ran before has written behind them, and prompts in the middle of a context
    read from there; where kernels are skipped (trtrun.kernels.triton.compilation.launches) these are no tokens."""
    engine.rows.token_ids.zero_()
    engine.rows.lengths[: limits.max_rows].fill_(2)


def _lens_of_one_row(draft_lens: Collection[int]) -> list[int]:
    """The largest first, and short ones, too: the last rounds of a request draft no more than it may have."""
    return sorted({*draft_lens, *range(min(max(draft_lens), _LAST_ROUNDS) + 1)}, reverse=True)


def _prefill(engine: Engine, prompts: Prompts) -> None:
    engine.prefill([_chunk(row, length, prompts.start) for row, length in enumerate(prompts.lengths)])


def _chunk(row: int, length: int, start: int = 0) -> PrefillChunk:
    return PrefillChunk(row=row, start=start, length=length, is_last=False, has_draft_kv=True)


def _verify_mixed(engine: Engine, of_both: Mixed) -> None:
    _verify(engine, of_both.rows, of_both.length, prompts=of_both.lengths)


def _verify(engine: Engine, rows: int, length: int, context: int = 0, prompts: Collection[int] = ()) -> None:
    plan = RoundPlan(
        round_index=-1,
        dropped_rows=(),
        admissions=(),
        block_updates=np.zeros((0, 3), dtype=np.int32),
        prefill=tuple(_chunk(row, tokens) for row, tokens in enumerate(prompts)),
        decode_rows=np.arange(rows, dtype=np.int32),
        draft_lens=np.full(rows, length, dtype=np.int32),
        catch_up=np.full(rows, 2, dtype=np.int32),
        max_context=max(2 + length, context),
    )
    lens, size = torch.full((rows,), length, device=engine.device), engine.draft_size(length)
    tokens = torch.zeros((rows, size.nodes), dtype=torch.int64, device=engine.device)
    paths = None
    if engine.has_trees and length:
        # Which nodes are on which path does not matter: shapes do.
        nodes = torch.arange(size.paths * length, device=engine.device).remainder(size.nodes)
        paths = nodes.view(size.paths, length).expand(rows, -1, -1)
    engine.verify_forward(plan, Draft(tokens, lens, paths=paths))


def _draft(engine: Engine, rows: int, draft_len: int, *, in_parallel: bool) -> None:
    """Draft as the drafter does."""
    places = torch.arange(rows, device=engine.device)
    context = 2 + draft_len
    if in_parallel:
        engine.look_ahead(places, [1] * rows, [draft_len] * rows, 0, context)
        return
    engine.catch_up(places, [2] * rows, context=context)
    if draft_len > 1:
        positions = torch.ones((rows, draft_len - 1), dtype=torch.int64, device=engine.device)
        engine.decode(engine.prepare_steps(engine.tables(places, context), positions)[0], torch.zeros_like(places))
