"""Graphs of forwards: the same tokens as without them, few shapes, and inputs read from where the graph looks.

Without a GPU a capture is played by running the captured work again: it reads the same fixed tensors as a CUDA graph
would, so buckets, padding and copies are tested here, and capturing itself where there is a GPU.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint, make_draft
from gpus import DEVICES
from pipelines import Reference, make_llm, prompt_of, tokens_of

from trtrun import SamplingParams
from trtrun.attention.backend import HostAttention
from trtrun.engine import forwards
from trtrun.engine.batch import BatchBuilder
from trtrun.engine.graphs import graph_shapes
from trtrun.engine.graphs import graph_shapes as mixed_shapes
from trtrun.engine.graphs.decode_graphs import ForwardGraphs, GraphMemory, MixedGraphs, RowForward
from trtrun.engine.graphs.graph_shapes import GraphShapes
from trtrun.speculation.pacing import Pacer
from trtrun.start import engine_maker

LENGTHS = (1, 2, 17, 33, 64, 90)
COUNT = 40


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Every replay of a captured forward adds to this list, also on the CPU."""
    replays: list[int] = []
    real = engine_maker.capture_for

    def capture_for(device: torch.device) -> Callable[[Callable[[], None]], Callable[[], None]]:
        capture = real(device) or (lambda work: work)

        def counted(work: Callable[[], None]) -> Callable[[], None]:
            number, replay = len(replays), capture(work)
            return lambda: (replays.append(number), replay())[-1]

        return counted

    monkeypatch.setattr(engine_maker, "capture_for", capture_for)
    return replays


IN_PARALLEL = pytest.mark.parametrize("in_parallel", [False, True], ids=["step by step", "in parallel"])


def draft_of(path: Path, target: Path, num_layers: int, *, in_parallel: bool) -> Path:
    """The target's first layers; with `in_parallel` they are told to draft all tokens in one forward."""
    draft = make_draft(path, target, num_layers)
    if in_parallel:
        config = json.loads((draft / "config.json").read_text())
        (draft / "config.json").write_text(json.dumps({**config, "pard_token": 198}))
    return draft


@IN_PARALLEL
@pytest.mark.parametrize("device", DEVICES)
def test_lossless_greedy_through_graphs_equals_transformers(
    tmp_path: Path, captures: list[int], device: str, in_parallel: bool
) -> None:
    target = make_checkpoint(tmp_path / "target", "LlamaForCausalLM", seed=1, num_hidden_layers=3)
    draft = draft_of(tmp_path / "draft", target, 2, in_parallel=in_parallel)
    reference = Reference(target)
    expected = [reference.greedy(prompt_of(length, seed=length), COUNT) for length in LENGTHS]
    prompts = [prompt_of(length, seed=length) for length in LENGTHS]
    scheduler = {"max_batch_size": 5, "max_num_tokens": 48}
    with make_llm(
        target, draft, devices=([f"{device}:0"],) * 2, speculation={"draft_len": 3}, scheduler=scheduler
    ) as llm:
        alone = [tokens_of(llm.generate([prompt], SamplingParams(max_tokens=COUNT)))[0][0] for prompt in prompts]
        replays = len(captures)
        together = [tokens for (tokens,) in tokens_of(llm.generate(prompts, SamplingParams(max_tokens=COUNT)))]
        llm.check_idle()
    assert (alone, together) == (expected, expected)
    assert 0 < replays < len(captures)


@pytest.mark.parametrize("device", DEVICES)
def test_sampling_through_graphs_is_the_target_alone(tmp_path: Path, captures: list[int], device: str) -> None:
    target = make_checkpoint(tmp_path / "target", "Qwen3ForCausalLM", seed=2)
    draft = make_draft(tmp_path / "draft", target, 1)
    sampling = SamplingParams(max_tokens=24, temperature=0.9, top_p=0.9, seed=4, repetition_penalty=1.2)
    prompts = [prompt_of(length, seed=length) for length in LENGTHS]

    def run(**settings: Any) -> list[Any]:
        with make_llm(target, devices=([f"{device}:0"],) * 2, **settings) as llm:
            return tokens_of(llm.generate(prompts, sampling))

    assert run(draft=draft, speculation={"draft_len": 4}) == run()
    assert captures


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("method", ["draft_target", "none"])
def test_short_prompts_go_through_graphs_and_long_ones_do_not(
    tmp_path: Path, captures: list[int], monkeypatch: pytest.MonkeyPatch, together: bool, method: str
) -> None:
    """Of any lengths, some at a time, beside rows that decode or with them, with blocks that are reused."""
    monkeypatch.setattr(graph_shapes, "MOST_PROMPT_TOKENS", 32)
    monkeypatch.setattr(forwards, "MOST_PROMPT_TOKENS", 32)
    monkeypatch.setattr(mixed_shapes, "_PROMPT_TOKENS", (32,) if together else ())
    monkeypatch.setattr(HostAttention, "tile", 64)  # 32 queries of two heads each
    target = make_checkpoint(tmp_path / "target", "LlamaForCausalLM", seed=1)
    draft = make_draft(tmp_path / "draft", target, 1) if method != "none" else None
    reference = Reference(target)
    shapes: list[tuple[int, int]] = []
    mixed: list[tuple[Any, int]] = []
    plain: list[int] = []
    read, run, add = forwards.read_tiles, MixedGraphs.run, BatchBuilder.add_prompts

    def logged(rows: Any, tiles: Any, width: int) -> Any:
        shapes.append((len(tiles), width))
        return read(rows, tiles, width)

    def logged_run(self: MixedGraphs, shape: Any, decoded: Any, prompts: Any) -> Any:
        mixed.append((shape, len(decoded.tokens)))
        return run(self, shape, decoded, prompts)

    def logged_add(self: BatchBuilder, chunks: Any, tile_width: Any) -> Any:
        plain.append(sum(chunk.length for chunk in chunks))
        return add(self, chunks, tile_width)

    monkeypatch.setattr(forwards, "read_tiles", logged)
    monkeypatch.setattr(MixedGraphs, "run", logged_run)
    monkeypatch.setattr(BatchBuilder, "add_prompts", logged_add)
    prompts = [prompt_of(length, seed=length) for length in (5, 16, 17, 33, 7, 64, 50, 65, 100, 9)]
    prompts.append(prompts[3] + prompt_of(4, seed=1))
    scheduler = {"max_batch_size": 4, "max_num_tokens": 110}
    speculation = {"draft_len": 3} if draft else {"method": "none"}
    with make_llm(target, draft, speculation=speculation, scheduler=scheduler) as llm:
        del shapes[:], mixed[:], plain[:]
        counts = [12 + 7 * number for number in range(len(prompts))]  # so that they end one by one
        parameters = [SamplingParams(max_tokens=count) for count in counts]
        found = [tokens for (tokens,) in tokens_of(llm.generate(prompts, parameters))]
        llm.check_idle()
    assert found == [reference.greedy(prompt, count) for prompt, count in zip(prompts, counts, strict=True)]
    # What more than two graphs take is computed without.
    assert any(count > 64 for count in plain)
    assert bool(mixed) == together
    if together:
        assert all(rows < shape.rows == 4 and shape.tiles == 1 for shape, rows in mixed)
        assert len(shapes) > len(mixed), "what is left of some goes before"
    else:
        assert {width for _, width in shapes} == {16, 32} and max(tiles * width for tiles, width in shapes) == 32


@IN_PARALLEL
@pytest.mark.parametrize("max_rows", [4, 6])
def test_what_requests_that_come_together_need_is_captured_at_the_start(
    tmp_path: Path, captures: list[int], monkeypatch: pytest.MonkeyPatch, max_rows: int, in_parallel: bool
) -> None:
    """Short prompts, however many at a time, rounds of any draft_len, last rounds and long contexts."""
    monkeypatch.setattr(HostAttention, "tile", 64)  # 32 queries of two heads each
    target = make_checkpoint(tmp_path / "target", "LlamaForCausalLM", seed=1, max_position_embeddings=512)
    draft = draft_of(tmp_path / "draft", target, 1, in_parallel=in_parallel)
    made: list[Any] = []
    make = ForwardGraphs._make

    def logged(self: ForwardGraphs, shape: Any, *others: Any) -> Any:
        made.append(shape)
        return make(self, shape, *others)

    monkeypatch.setattr(ForwardGraphs, "_make", logged)
    draft_lens = cycle([4, 2, 0, 0, 1, 3])
    monkeypatch.setattr(Pacer, "choose", lambda *_: next(draft_lens))
    scheduler = {"max_batch_size": max_rows}
    speculation = {"draft_len": 4, "pacing": "measured"}
    with make_llm(target, draft, speculation=speculation, scheduler=scheduler) as llm:
        assert made
        del made[:]
        for count in range(1, max_rows + 1):
            for length in (3, 16, 17, 31, 60):
                prompts = [prompt_of(length, seed=100 * count + number) for number in range(count)]
                llm.generate(prompts, SamplingParams(max_tokens=2))
        llm.generate([prompt_of(8)], SamplingParams(max_tokens=40))
        long = [prompt_of(length, seed=length) for length in (300, 270, 290)]
        for prompts in (long, [[*prompt, 5] for prompt in long]):  # the second time most blocks are there
            outputs = llm.generate(prompts, SamplingParams(max_tokens=20))
            assert all(output.error is None and output.completions[0].token_ids for output in outputs)
    assert not made


def test_no_round_captures_a_graph_that_feeds_many_rows_much(tmp_path: Path, captures: list[int]) -> None:
    """As draft ranks that draft ahead do, where rows that were sat out draft again beside many others."""
    target = make_checkpoint(tmp_path / "target", "LlamaForCausalLM", seed=1)
    draft = make_draft(tmp_path / "draft", target, 1)
    scheduler = {"max_batch_size": 20, "max_num_tokens": 200}
    with make_llm(target, draft, devices=(["cpu:0"],) * 2, speculation={"draft_len": 3}, scheduler=scheduler) as llm:
        engine = llm.engine.orchestrator._ranks._worker.drafter._engine
        made = engine.num_graphs
        for rows, width in ((17, 9), (20, 70), (16, 30), (17, 8), (20, 1)):
            tables = torch.zeros_like(engine.tables(torch.arange(rows), 80))
            nowhere = torch.full((rows, width), -1)
            assert engine.feed(torch.zeros_like(nowhere), nowhere, tables).shape == (rows, engine.vocab_size)
        assert engine.num_graphs == made


def make_graphs(
    forward: RowForward, vocab_size: int, *, max_rows: int = 6, most_queries: int = 1, **settings: Any
) -> tuple[ForwardGraphs, list[Callable[[], None]]]:
    """Graphs over tables of up to 9 blocks of 64 tokens, and what was captured."""
    captured: list[Callable[[], None]] = []

    def capture(work: Callable[[], None]) -> Callable[[], None]:
        captured.append(work)
        return work

    graphs = ForwardGraphs(
        forward,
        capture,
        GraphShapes(max_rows, most_queries, 9, 64),
        GraphMemory.of(max_rows * most_queries, max_rows * 9, vocab_size, torch.device("cpu")),
        **settings,
    )
    return graphs, captured


def test_a_graph_serves_every_input_that_it_holds() -> None:
    """Rows 3 and 4 share a graph, and so do one draft token and four of few rows; what an earlier input left behind
    must not be seen by a smaller one."""

    def forward(tokens: torch.Tensor, positions: torch.Tensor, tables: torch.Tensor, num_last: int) -> torch.Tensor:
        value = torch.where(positions < 0, 0, tokens * 100 + positions * 10 + tables.sum(dim=1, keepdim=True))
        flat = value[:, -num_last:].reshape(-1, 1).float()
        return torch.cat((flat, -flat), dim=1)

    graphs, captured = make_graphs(forward, 2, most_queries=5)
    cases = ((4, 2, 0), (3, 2, 0), (3, 5, 0), (1, 3, 0), (1, 1, 0), (3, 2, 1), (6, 2, 1), (3, 4, 3), (4, 4, 3))
    for rows, queries, num_last in (*cases, *reversed(cases)):
        tokens = torch.arange(rows * queries).view(rows, queries) + rows
        positions = torch.arange(rows * queries).view(rows, queries)
        for width in (4, 9):
            tables = torch.ones((rows, width), dtype=torch.int64) * rows
            expected = forward(tokens, positions, tables, num_last)
            assert torch.equal(graphs.run(tokens, positions, tables, num_last), expected), (rows, queries, num_last)
    # Of 4 x 5, 1 x 5, 1 x 1, the last of 4 x 2 and 6 x 2, and the last three of 4 x 4.
    assert graphs.num_graphs == len(captured) == 6 * 2
    graphs.close()
    assert graphs.num_graphs == 0


def test_what_runs_before_a_capture_is_told() -> None:
    """The run that only warms up is surrounded by what makes it short; what is captured is not."""
    is_short, ran = False, list[bool]()

    @contextmanager
    def shortened() -> Iterator[None]:
        nonlocal is_short
        is_short = True
        yield
        is_short = False

    def forward(tokens: torch.Tensor, positions: torch.Tensor, tables: torch.Tensor, num_last: int) -> torch.Tensor:
        ran.append(is_short)
        return tokens.reshape(-1, 1).float()

    graphs, captured = make_graphs(forward, 1, first_run=shortened)
    given = torch.tensor([[7]]), torch.tensor([[3]]), torch.zeros((1, 4), dtype=torch.int64)
    assert graphs.run(*given, 1).tolist() == [[7.0]] and len(captured) == 1
    assert ran == [True, False]  # the second is the replay, as captures are played
    graphs.run(*given, 1)
    assert ran == [True, False, False]


def test_the_graph_that_was_not_used_for_longest_is_given_back() -> None:
    """Its logits come out right when its shape returns, which captures it again."""
    graphs, captured = make_graphs(
        lambda tokens, positions, tables, num_last: tokens.reshape(-1, 1).float(), 1, max_rows=8, most_graphs=2
    )
    for rows, captures in ((1, 1), (2, 2), (1, 2), (4, 3), (1, 3), (2, 4), (4, 5), (2, 5)):
        tokens = torch.arange(rows).view(rows, 1) + rows
        found = graphs.run(tokens, tokens * 0, torch.zeros((rows, 4), dtype=torch.int64), num_last=0)
        assert torch.equal(found, tokens.float()), rows
        assert (len(captured), graphs.num_graphs) == (captures, min(2, captures)), rows


def chains(max_rows: int = 6) -> tuple[ForwardGraphs, list[Callable[[], None]], dict[tuple[int, int], int]]:
    """Graphs of a forward that keeps each token in its block and draws logits from the row's context there; what was
    captured; and the store by block and place."""
    store: dict[tuple[int, int], int] = {}

    def forward(tokens: torch.Tensor, positions: torch.Tensor, tables: torch.Tensor, num_last: int) -> torch.Tensor:
        logits = torch.zeros((len(tokens), 40))
        for row, (token, position) in enumerate(zip(tokens[:, -1].tolist(), positions[:, -1].tolist(), strict=True)):
            if position >= 0:
                store[int(tables[row, position // 16]), position % 16] = token
                context = [store[int(tables[row, place // 16]), place % 16] for place in range(position + 1)]
                logits[row] = torch.rand(40, generator=torch.Generator().manual_seed(hash(tuple(context)) % 10**9))
        return logits

    return *make_graphs(forward, 40, max_rows=max_rows), store


@pytest.mark.parametrize("vocab_size", [40, 23])
def test_a_chain_is_its_steps_one_by_one(vocab_size: int) -> None:
    """Rows that stop before the others, and buckets with rows that nobody asked for, which keep nothing."""
    graphs, captured, store = chains()
    generator = torch.Generator().manual_seed(3)
    for rows, steps, short in ((4, 3, 0), (3, 3, 1), (1, 3, 0), (6, 2, 2), (5, 2, 0), (3, 3, 0), (1, 40, 0)):
        tables = torch.arange(1, rows * 4 + 1).view(rows, 4)
        store.clear()
        starts = torch.randint(0, 8, (rows, 1), generator=generator)
        for row in range(rows):
            store |= {(row * 4 + 1, place): place for place in range(int(starts[row]))}
        first = torch.randint(0, 40, (rows,), generator=generator)
        positions = starts + torch.arange(steps)
        positions[:short, steps - 1 :] = -1
        before = dict(store)
        found = graphs.run_chain(first, positions, tables, vocab_size, 5).clone()
        after = dict(store)
        store.clear()
        store |= before
        token = first
        for step in range(steps):
            logits = graphs.run(token.unsqueeze(1), positions[:, step : step + 1], tables, 1)[:, :vocab_size]
            expected = logits.topk(5, dim=-1).indices
            there = positions[:, step] >= 0
            assert torch.equal(found[there, step], expected[there]), (rows, step)
            token = expected[:, 0]
        assert found.shape == (rows, steps, 5)
        assert after == store
    # Steps of 4, 1 and 6 rows, beside forwards of 4, 1 and 6 rows.
    assert graphs.num_graphs == len(captured) == 6


def test_steps_of_any_number_share_a_graph_and_candidates_have_their_own() -> None:
    graphs, captured, _ = chains()
    tables = torch.arange(1, 9).view(2, 4)
    first, start = torch.tensor([5, 6]), torch.tensor([[0], [0]])

    def run(steps: int, num_ranked: int) -> torch.Tensor:
        return graphs.run_chain(first, start + torch.arange(steps), tables, 40, num_ranked).clone()

    long, few, short = run(4, 3), run(4, 2), run(2, 3)
    assert len(captured) == graphs.num_graphs == 2
    assert torch.equal(short, long[:, :2]) and torch.equal(few, long[:, :, :2])
    assert torch.equal(run(4, 3), long) and len(captured) == 2
