"""Steps of a head ahead of verdicts: what a start warms up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from sampling_reference import admission, seeded

from trtrun.sampling.row_sampling import RowSampling
from trtrun.speculation.ahead.heads import HeadChains
from trtrun.speculation.ahead.policy import GuessSpace


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_warming_up_does_not_care_what_row_0_was_last(temperature: float) -> None:
    """A start runs warm-up rounds first, whose rows are sampled on GPUs."""
    sampling = RowSampling(5, 30, "cpu")
    sampling.admit([admission(0, [1, 2, 3], seeded(seed=1, temperature=temperature))])
    copied: list[tuple[list[int], list[int]]] = []
    heads = SimpleNamespace(
        rows=SimpleNamespace(sampling=sampling, lengths=torch.zeros(5, dtype=torch.int64)),
        hidden_size=4,
        dtype=torch.float32,
        logits=lambda hidden: torch.randn(len(hidden), 30),
        copy_blocks=lambda source, target: copied.append((source.tolist(), target.tolist())),
    )
    space = GuessSpace(most_guesses=3, first_row=2, first_block=7, blocks_per_guess=2)
    HeadChains(cast(Any, heads), 30, space).warm_up(3)
    assert copied == [([0, 0, 0], [7, 9, 11])]
