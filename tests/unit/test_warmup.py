"""What a start captures, on CPU tensors: the shapes that short prompts have, in whatever number they come."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ahead_rounds
import pytest
import torch
from checkpoints import make_checkpoint

from trtrun.attention.backend import HostAttention
from trtrun.engine.graphs import ForwardGraphs
from trtrun.engine.runner import Engine
from trtrun.engine.warmup import _chunk, warm_up

ROWS = 6


@pytest.mark.parametrize("guesses", [0, 8])
def test_graphs_of_short_prompts_are_made_at_the_start_where_rows_are_no_power_of_two(
    guesses: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Draft engines have rows for guesses, too, and so graphs of more rows than there are prompts."""
    made: list[Any] = []
    plain: list[list[int]] = []
    make, by_graph, engine_of = ForwardGraphs._make, Engine._prefill_by_graph, ahead_rounds.Engine

    def logged_make(self: ForwardGraphs, shape: Any, *others: Any) -> Any:
        made.append(shape)
        return make(self, shape, *others)

    def logged_prefill(self: Engine, chunks: Any) -> Any:
        found = by_graph(self, chunks)
        if found is None:
            plain.append([chunk.length for chunk in chunks])
        return found

    monkeypatch.setattr(HostAttention, "tile", 64)  # 32 queries of two heads each
    monkeypatch.setattr(ForwardGraphs, "_make", logged_make)
    monkeypatch.setattr(Engine, "_prefill_by_graph", logged_prefill)
    monkeypatch.setattr(ahead_rounds, "MAX_ROWS", ROWS)
    monkeypatch.setattr(ahead_rounds, "Engine", lambda *a: engine_of(*a, capture=lambda work: work))
    model = ahead_rounds.load(make_checkpoint(tmp_path / "model", "LlamaForCausalLM", seed=1))
    engine = ahead_rounds.make_drafter(model, 4, 200, 600, 4, False, guesses).engine
    with torch.inference_mode():
        warm_up(engine, {4, 2}, 2048, ROWS, verifies=False)
        assert made and not plain
        del made[:]
        for count in range(1, ROWS + 1):
            for length in (3, 16):
                engine.prefill([_chunk(row, length) for row in range(count)])
    assert not made and not plain
