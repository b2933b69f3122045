"""A start makes every graph that a round asks for, and memory is reckoned for them: random mixes of rows and prompts
make no other, whatever bounds rounds have. Captures are played on the CPU, as in test_graphs.py."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint, make_draft
from pipelines import make_llm, prompt_of

from trtrun import SamplingParams
from trtrun.attention.backend import HostAttention
from trtrun.engine.graphs.decode_graphs import MixedGraphs
from trtrun.engine.graphs.graph_cache import GraphCache
from trtrun.engine.graphs.graph_shapes import GraphShapes
from trtrun.engine.start_forwards import StartLimits
from trtrun.memory.working_memory import EngineForm, RoundShape, working_bytes
from trtrun.models.config import read_model_config
from trtrun.speculation.pacing import Pacer
from trtrun.start import engine_maker
from trtrun.weights.weight import Share

LIMITS: dict[str, dict[str, int]] = {
    "contexts beyond those of rows and prompts together": {"max_seq_len": 9000},
    "contexts that end behind the narrow tables": {"max_seq_len": 270},
    "fewer tokens than a graph of prompts has": {"max_num_tokens": 300},
    "hardly more tokens than rows": {"max_num_tokens": 60},
    "two rows": {"max_batch_size": 2, "max_num_tokens": 150},
    "one row": {"max_batch_size": 1, "max_num_tokens": 150},
}


@pytest.mark.parametrize("name", LIMITS)
@pytest.mark.parametrize("method", ["draft_target", "none"])
def test_no_round_makes_a_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, method: str) -> None:
    monkeypatch.setattr(engine_maker, "capture_for", lambda device: lambda work: work)
    monkeypatch.setattr(HostAttention, "tile", 64)  # 32 queries of two heads each
    made: list[Any] = []
    mixed: list[Any] = []
    make, run = GraphCache._make, MixedGraphs.run
    monkeypatch.setattr(GraphCache, "_make", lambda *taken: (made.append(taken[:2]), make(*taken))[-1])
    monkeypatch.setattr(MixedGraphs, "run", lambda *taken: (mixed.append(taken[1]), run(*taken))[-1])
    draft_lens = itertools.cycle([3, 2, 0, 1, 3, 0])
    monkeypatch.setattr(Pacer, "choose", lambda *_: next(draft_lens))
    shape = {"num_hidden_layers": 1, "max_position_embeddings": 9000}
    target = make_checkpoint(tmp_path / "target", "LlamaForCausalLM", seed=1, **shape)
    draft = make_draft(tmp_path / "draft", target, 1) if method == "draft_target" else None
    speculation = {"draft_len": 3, "pacing": "measured"} if draft else {"method": "none"}
    scheduler = {"max_batch_size": 6, **LIMITS[name]}
    numbers = random.Random(1)
    with make_llm(target, draft, speculation=speculation, scheduler=scheduler) as llm:
        assert made
        largest_first = [shape.tokens for graphs, shape in made if isinstance(graphs, MixedGraphs)]
        assert largest_first == sorted(largest_first, reverse=True)
        kinds = [type(graphs) for graphs, _ in made[1:]]  # behind a short prompt
        assert draft is not None or MixedGraphs not in kinds[len(largest_first) :]
        del made[:], mixed[:]
        most = min(scheduler.get("max_seq_len", 400), 400) - 30
        for _ in range(8):
            lengths = [numbers.randint(1, numbers.choice([20, 70, most])) for _ in range(numbers.randint(1, 10))]
            counts = [SamplingParams(max_tokens=numbers.randint(1, 20)) for _ in lengths]
            prompts = [prompt_of(length, seed=numbers.randint(0, 5)) for length in lengths]
            outputs = llm.generate(prompts, counts)
            assert all(output.error is None for output in outputs)
        llm.check_idle()
    assert not made
    assert bool(mixed) == (scheduler["max_batch_size"] > 1 and scheduler.get("max_num_tokens", 300) >= 150)


@pytest.mark.parametrize("longest", [600, 8192, 8193, 100_000])
def test_all_graphs_of_rows_and_prompts_together_are_made_however_long_contexts_may_be(longest: int) -> None:
    shapes = GraphShapes(40, 5, -(-longest // 16), 16, 64, max_mixed_tokens=4000)
    found = list(StartLimits(4000, 40, longest).mixed(shapes))
    assert len(found) == len(shapes.mixed.all) > 10
    assert all(max(one.lengths) <= longest for one in found)


@pytest.mark.parametrize(("max_rows", "lines"), [(1, 32), (2, 2 + 512 // 64)])
def test_logits_behind_tiles_of_prompts_are_reckoned(tmp_path: Path, max_rows: int, lines: int) -> None:
    """Of few rows they are more than those of rows: in the dtype of activations, and twice in float32."""
    shape = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 20_000}
    model = read_model_config(make_checkpoint(tmp_path / "target", "LlamaForCausalLM", num_hidden_layers=1, **shape))
    largest = RoundShape(max_rows, 2048, 0, 600, 16, use_logits=False)
    taken = [
        working_bytes(largest, EngineForm(model, Share(0, 1), torch.bfloat16, "cuda", verifies=True, graphs=graphs))
        for graphs in (False, True)
    ]
    narrow = EngineForm(replace(model, vocab_size=1), Share(0, 1), torch.bfloat16, "cuda", verifies=True)
    without, of_graphs = (working_bytes(largest, replace(narrow, graphs=graphs)) for graphs in (False, True))
    assert taken[1] - taken[0] - (of_graphs - without) >= lines * 19_999 * (2 + 4 + 4)


def test_logits_of_scored_prompts_are_reckoned(tmp_path: Path) -> None:
    """Of one row they are more than anything that sampling takes: in float32, and as log probabilities."""
    model = read_model_config(make_checkpoint(tmp_path / "target", "LlamaForCausalLM", vocab_size=20_000))
    shapes = [RoundShape(1, tokens, 0, 600, 16, use_logits=False) for tokens in (1, 128)]
    form = EngineForm(model, Share(0, 1), torch.float32, "cpu", verifies=True)
    one, many = (working_bytes(shape, form) for shape in shapes)
    drafts = [working_bytes(shape, replace(form, verifies=False)) for shape in shapes]
    assert many - one - (drafts[1] - drafts[0]) >= 127 * 20_000 * 2 * 4 - 20_000 * 8 * 4
