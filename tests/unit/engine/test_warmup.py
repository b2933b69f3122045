"""What a start runs: graphs of the shapes that short prompts have, in whatever number they come; and without
graphs rounds of all sizes. On CPU tensors."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ahead_rounds
import pytest
import torch
from checkpoints import make_checkpoint
from pipelines import prompt_of

from trtrun.attention.backend import HostAttention
from trtrun.configuration.drafting.speculation_section import DraftSize
from trtrun.core.nouns import RoundPlan
from trtrun.engine import warmup
from trtrun.engine.forwards import EngineShape, Forwards
from trtrun.engine.graphs.decode_graphs import ForwardGraphs
from trtrun.engine.start_forwards import Prompts
from trtrun.engine.warmup import _chunk, warm_up
from trtrun.speculation.ahead.chains import NUM_RANKED

ROWS = 6


@pytest.mark.parametrize("guesses", [0, 8])
def test_graphs_of_short_prompts_are_made_at_the_start_where_rows_are_no_power_of_two(
    guesses: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Draft engines have rows for guesses, too, and so graphs of more rows than there are prompts."""
    made: list[Any] = []
    plain: list[list[int]] = []
    make, by_graph = ForwardGraphs._make, Forwards.prefill_by_graph

    def logged_make(self: ForwardGraphs, shape: Any, *others: Any) -> Any:
        made.append(shape)
        return make(self, shape, *others)

    def logged_prefill(self: Forwards, chunks: Any) -> Any:
        found = by_graph(self, chunks)
        if found is None:
            plain.append([chunk.length for chunk in chunks])
        return found

    monkeypatch.setattr(HostAttention, "tile", 64)  # 32 queries of two heads each
    monkeypatch.setattr(ForwardGraphs, "_make", logged_make)
    monkeypatch.setattr(Forwards, "prefill_by_graph", logged_prefill)
    monkeypatch.setattr(ahead_rounds, "MAX_ROWS", ROWS)
    monkeypatch.setattr(ahead_rounds, "EngineShape", lambda **b: EngineShape(capture=lambda work: work, **b))
    model = ahead_rounds.load(make_checkpoint(tmp_path / "model", "LlamaForCausalLM", seed=1))
    engine = ahead_rounds.make_drafter(model, 4, 200, 600, 4, False, guesses)._engine
    with torch.inference_mode():
        warm_up(engine, {4, 2}, 2048, ROWS, verifies=False)
        assert made and not plain
        del made[:]
        for count in range(1, ROWS + 1):
            for length in (3, 16):
                engine.prefill([_chunk(row, length) for row in range(count)])
    assert not made and not plain


@pytest.mark.parametrize("mask_token", [None, 198])
def test_draft_ranks_of_their_own_capture_what_their_rounds_replay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mask_token: int | None
) -> None:
    """They draft with ranked candidates, and guess with any draft_len."""
    draft_len, half, guesses = 4, 2, 24
    made: list[Any] = []
    make = ForwardGraphs._make

    def logged_make(self: ForwardGraphs, shape: Any, *others: Any) -> Any:
        if self is rounds.drafter._engine._forwards.graphs:  # and not the drafts that these are compared with
            made.append(shape)
        return make(self, shape, *others)

    monkeypatch.setattr(ForwardGraphs, "_make", logged_make)
    monkeypatch.setattr(ahead_rounds, "EngineShape", lambda **b: EngineShape(capture=lambda work: work, **b))
    model = ahead_rounds.load(make_checkpoint(tmp_path / "model", "LlamaForCausalLM", seed=1))
    rounds = ahead_rounds.AheadRounds(model, draft_len=draft_len, mask_token=mask_token)
    with torch.inference_mode():
        engine, most = rounds.drafter._engine, ahead_rounds.MAX_ROWS
        in_parallel = mask_token is not None
        warm_up(
            engine, {2, draft_len}, 400, most, verifies=False, num_ranked=NUM_RANKED, most_catch_up=draft_len + 1,
            in_parallel=in_parallel,
        )  # fmt: skip
        rounds.drafter._guess_steps = [guesses]
        rounds.drafter.warm_up()
    steps = [shape for shape in made if (shape.num_last > 1 if in_parallel else shape.num_ranked)]
    assert {shape.num_ranked for shape in steps} == {0 if in_parallel else NUM_RANKED}
    assert any(shape.rows >= guesses for shape in steps)

    def schedule(always: bool) -> RoundPlan | None:
        plan = rounds.scheduler.schedule(rounds.random.choice((draft_len, half)))
        return None if plan is None else replace(plan, num_guesses=guesses, redraft_threshold=1 << 30)

    monkeypatch.setattr(rounds, "_schedule", schedule)
    del made[:]
    for number in range(most):
        rounds.add(prompt_of(9 + number, seed=number), max_tokens=60, ignore_eos=True)
    rounds.run(200)
    assert not made


@pytest.mark.parametrize("is_tree", [False, True], ids=["chains", "trees"])
def test_without_graphs_a_start_on_a_gpu_runs_rounds_of_every_size_that_has_kernels_of_its_own(
    is_tree: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By how many places are written, and by how queries are dealt out: kernels are compiled for both."""
    pytest.importorskip("triton")
    from trtrun.kernels.triton.attention.attention_tiles import choose_tiling
    from trtrun.kernels.triton.attention.paged_store import _tokens_at_once

    heads, kv_heads, max_tokens, max_rows, longest, depth = 24, 8, 3000, 40, 1500, 4
    paths, nodes = (22, 40) if is_tree else (1, depth)

    def kinds(rows: int, queries: int, context: int, beside: bool) -> set[Any]:
        at_once = _tokens_at_once(rows * queries * (heads + 2 * kv_heads))
        shares = min(2, -(-context // 256))
        tiling = choose_tiling(queries * heads // kv_heads, rows * kv_heads, shares, 132, has_prompt_kernel=True)
        return {(at_once, is_tree and beside), tiling}

    of_start: set[Any] = set()

    def verified(engine: Any, rows: int, length: int, context: int = 0, prompts: Collection[int] = ()) -> None:
        assert rows * (nodes + 1) + sum(prompts) <= max_tokens
        of_start.update(kinds(rows * (paths if length else 1), length + 1, max(context, 2 + length), length > 0))
        for width in prompts:
            of_start.update(kinds(1, width, width, True))
        assert not prompts or not engine.rows.token_ids.any()
        engine.rows.token_ids.fill_(-1)  # what is behind a row need be no tokens, which prompts read

    def prefilled(engine: Any, prompts: Prompts) -> None:
        rows, width = len(prompts.lengths), prompts.lengths[0]
        assert rows <= max_rows and rows * width <= max_tokens and prompts.start + width <= longest
        of_start.update(kinds(rows, width, prompts.start + width, False))
        assert not engine.rows.token_ids.any()

    monkeypatch.setattr(warmup, "_verify", verified)
    monkeypatch.setattr(warmup, "_prefill", prefilled)
    monkeypatch.setattr(warmup, "_rank", lambda engine: None)
    rows = SimpleNamespace(lengths=torch.zeros(max_rows), token_ids=torch.zeros(1, longest + depth + 2))
    engine: Any = SimpleNamespace(
        device=torch.device("cuda"), graph_shapes=None, has_trees=is_tree, rows=rows,
        draft_size=lambda length: DraftSize(paths, nodes),
    )  # fmt: skip
    rows.max_draft_len = depth
    warm_up(engine, {depth}, max_tokens, max_rows, verifies=True)
    for count in range(1, max_rows + 1):
        for context in (9, 900):
            if count * (nodes + 1) <= max_tokens:
                assert kinds(count * paths, depth + 1, context, True) <= of_start
            for width in (1, 3, 16, 40):
                assert kinds(count, width, context, False) <= of_start
    for width in range(1, max_tokens - nodes - 1, 7):
        assert kinds(1, min(width, longest), 900, False) <= of_start
        assert (_tokens_at_once(min(width, longest) * (heads + 2 * kv_heads)), is_tree) in of_start
