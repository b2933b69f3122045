"""Hidden states of verification, at every boundary, against transformers; where nobody asks, nothing is done."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from own_drafters import Recalling, check_watched, own_methods
from pipelines import Reference, make_llm, prompt_of
from torch.utils._python_dispatch import TorchDispatchMode

from trtrun import SamplingParams
from trtrun.attention.backend import HostAttention
from trtrun.engine import forwards
from trtrun.engine.graphs import graph_shapes
from trtrun.engine.graphs import graph_shapes as mixed_shapes
from trtrun.engine.graphs.decode_graphs import MixedGraphs
from trtrun.engine.graphs.graph_shapes import GraphShapes
from trtrun.errors import ConfigError
from trtrun.models.decoder import check_boundaries
from trtrun.start import engine_maker

SLIDING: dict[str, dict[str, Any]] = {
    "MistralForCausalLM": {"sliding_window": 7},
    "Qwen2ForCausalLM": {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
}
LENGTHS = (1, 5, 17, 33, 64, 70, 40)
"""Of prompts; the budget of a round cuts the long ones into chunks, beside rows that decode."""


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [
        ("LlamaForCausalLM", "plain"),
        ("LlamaForCausalLM", "graphs"),
        ("MistralForCausalLM", "graphs and tiles"),
        ("Qwen2ForCausalLM", "plain"),
        ("Qwen2ForCausalLM", "graphs and tiles"),
        ("Qwen2ForCausalLM", "graphs of rows and tiles together"),
        ("LlamaForCausalLM", "graphs of tiles in parts"),
        ("Qwen3ForCausalLM", "graphs"),
    ],
)
def test_every_boundary_is_that_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str, kind: str
) -> None:
    if kind != "plain":
        monkeypatch.setattr(engine_maker, "capture_for", lambda device: lambda work: work)
    mixed: list[Any] = []
    if "together" in kind:
        monkeypatch.setattr(mixed_shapes, "_PROMPT_TOKENS", (32,))
        run = MixedGraphs.run
        monkeypatch.setattr(MixedGraphs, "run", lambda *arguments: (mixed.append(0), run(*arguments))[-1])
    parts: list[int] = []
    if "parts" in kind:
        monkeypatch.setattr(graph_shapes, "MOST_PROMPT_TOKENS", 32)
        monkeypatch.setattr(forwards, "MOST_PROMPT_TOKENS", 32)
        cut = GraphShapes.parts_of_tiles

        def logged(self: GraphShapes, tiles: int, width: int) -> list[slice] | None:
            found = cut(self, tiles, width)
            parts.append(len(found or ()))
            return found

        monkeypatch.setattr(GraphShapes, "parts_of_tiles", logged)
    if "tiles" in kind:
        monkeypatch.setattr(HostAttention, "tile", 64)  # 32 queries of two heads each
    path = make_checkpoint(tmp_path / "target", architecture, seed=1, **SLIDING.get(architecture, {}))
    reference = Reference(path)
    prompts = [prompt_of(length, seed=length) for length in LENGTHS]
    sections = {
        "speculation": {"method": "recalling", "draft_len": 3},
        "scheduler": {"max_batch_size": 3, "max_num_tokens": 48},
        "kv_cache": {"max_tokens": 224, "block_size": 8, "enable_block_reuse": False},
    }
    with own_methods(), make_llm(path, None, **sections) as llm:
        outputs = llm.generate(prompts, SamplingParams(max_tokens=30, ignore_eos=True))
        statistics = llm.statistics()
    texts = [list(output.completions[0].token_ids) for output in outputs]
    assert texts == [list(reference.greedy(prompt, 30)) for prompt in prompts]
    assert statistics["num_accepted_draft_tokens"] > 0
    tokens = dict(enumerate([*prompt, *text] for prompt, text in zip(prompts, texts, strict=True)))
    assert sorted(Recalling.watched) == sorted(tokens)
    assert check_watched(reference, tokens) == sum(LENGTHS) + 29 * len(LENGTHS)
    assert bool(mixed) == ("together" in kind) and (2 in parts) == ("parts" in kind)


class Operations(TorchDispatchMode):
    """Lists the operations that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def test_a_forward_without_taps_copies_nothing_and_with_them_nothing_else(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "target", seed=1)
    lists = []
    for method in ("repeating", "recalling"):
        with own_methods(), make_llm(path, None, speculation={"method": method, "draft_len": 2}) as llm:
            model = llm.engine.orchestrator._ranks._worker.target._model  # type: ignore[attr-defined]
            forward, found = model.forward, []

            def listed(*arguments: Any, forward: Any = forward, found: list[list[str]] = found) -> torch.Tensor:
                with Operations() as operations:
                    result: torch.Tensor = forward(*arguments)
                found.append(operations.names)
                return result

            model.forward = listed
            llm.generate([prompt_of(9)], SamplingParams(max_tokens=1))
            lists.append(found[0])
    without, tapped = lists
    assert "aten.copy_.default" not in without
    copies = {"aten.copy_.default", "aten.select.int", "aten.slice.Tensor", "aten.index_select.default"}
    assert [name for name in tapped if name not in copies] == [name for name in without if name not in copies]
    assert tapped.count("aten.copy_.default") == 2 + 2


@pytest.mark.parametrize(
    ("boundaries", "said"), [((0, 9), "boundary 9, but a target of 2 layers has 0 to 3"), ((1, 1), "twice")]
)
def test_boundaries_that_are_not_there_are_refused(boundaries: tuple[int, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_boundaries(boundaries, 2)
