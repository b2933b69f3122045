"""Padding of forwards on GPUs chooses no expert. Which tokens are padding comes to all layers but the last one, where
tokens are left out behind its attention. Kernels have tests of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from family_checkpoints import write_family
from paged import PagedModel

from trtrun.kernels.torch.experts import Choice
from trtrun.kvcache.segments import AttentionBatch, AttentionSegment
from trtrun.layers.experts import ExpertsMLP
from trtrun.models.experts_plan import ExpertsPlan


@pytest.mark.parametrize("wanted", [None, [1, 4]])
def test_tokens_that_are_none_choose_no_expert(
    tmp_path: Path, wanted: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rows of three tokens: the first has two, the second one, of its third; then a whole one."""
    seen: list[torch.Tensor] = []

    def remember(build: Any) -> Any:
        def built(plan: ExpertsPlan, reader: Any) -> ExpertsMLP:
            made: ExpertsMLP = build(plan, reader)
            made._padding = reader.padding  # as on a GPU
            choose = made._choose

            def chosen(logits: torch.Tensor, *, positions: torch.Tensor | None = None) -> Choice:
                found = choose(logits, positions=positions)
                seen.append((found.experts < 0).all(dim=1))
                # Experts of the CPU leave any numbers where there is none, and add them up.
                return Choice(found.experts.clamp(min=0), found.shares)

            made._choose = chosen
            return made

        return built

    monkeypatch.setattr(ExpertsPlan, "build", remember(ExpertsPlan.build))
    path = write_family(tmp_path, "qwen3_moe")
    model, plain = PagedModel(path), PagedModel(path)
    tokens = torch.tensor([5, 9, 0, 7, 0, 0])
    positions = torch.tensor([[0, 1, -1], [0, -1, -1]])
    results = []
    for one, places in ((model, positions), (plain, positions.clamp(min=0))):
        segment = AttentionSegment(0, 2, 3, torch.tensor([[1], [2]]), positions)
        batch = AttentionBatch([segment], one.block_size)
        chosen = None if wanted is None else torch.tensor(wanted)
        results.append(one.models[0].forward(tokens, places.flatten(), batch, one.stores[0], chosen))
    layers = len(seen) // 2  # that have experts
    is_padding = (positions < 0).flatten()
    assert layers > 1
    for index, found in enumerate(seen):
        is_asked = index < layers - (wanted is not None)
        assert torch.equal(found, is_padding if is_asked else torch.zeros_like(found)), index
    real = torch.arange(6)[~is_padding] if wanted is None else torch.tensor([0])
    assert torch.equal(results[0][real], results[1][real])
    assert model.models[0]._padding.positions is None
