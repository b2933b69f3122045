"""An expert of all tokens that goes through products with the others, as on GPUs: logits are those of one that stands
apart. With torch's own operations, in float32."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from family_checkpoints import write_family
from paged import PagedModel
from test_model_logits import prompt_of

from trtrun.models.experts_plan import ExpertsPlan
from trtrun.weights.weight_reader import WeightReader


class ForGpu:
    """A reader that says that it builds for a GPU."""

    device = SimpleNamespace(type="cuda")

    def __init__(self, reader: WeightReader) -> None:
        self._reader = reader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("deepseek_v3", {}),
        ("qwen2_moe", {"shared_expert_intermediate_size": 20}),
        ("qwen3_5_moe_text", {"shared_expert_intermediate_size": 40}),
    ],
)
def test_logits_are_those_of_one_that_stands_apart(
    tmp_path: Path, family: str, sizes: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one expert more, or as two where it has twice the features; with a gate, and without."""
    path, batch = write_family(tmp_path, family, **sizes), [[(0, 0, prompt_of(9))]]
    expected, build = PagedModel(path).forward(batch), ExpertsPlan.build
    monkeypatch.setattr(ExpertsPlan, "build", lambda plan, reader: build(plan, ForGpu(reader)))  # type: ignore[arg-type]
    for tp_size in (1, 2):
        model = PagedModel(path, tp_size=tp_size)
        layers = [layer.mlp for layer in model.models[0]._layers if hasattr(layer.mlp, "_shared")]  # type: ignore[attr-defined]
        assert layers and all(mlp._shared is None for mlp in layers)
        assert (model.forward(batch) - expected).abs().max() < 1e-4
