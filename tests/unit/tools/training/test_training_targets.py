"""Targets of all families say what they say in transformers, where drafters learn from them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from family_checkpoints import write_family
from own_drafters import hidden_states
from pipelines import Reference
from training_runs import CPU

from trtrun.tools.training.models import Target, read_config


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "granite", "qwen3_moe"])
def test_logits_and_states_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    """Capped or divided where the family does so, of the text's model where there are several."""
    path = write_family(tmp_path, family)
    reference, tokens = Reference(path), [5, 9, 77, 3, 8]
    target = Target(path, CPU)
    found = target.read(torch.tensor([tokens]), (2, 5))
    logits = found.log_probs(target.vocab_size)[0]
    torch.testing.assert_close(logits, reference.logits(tokens).log_softmax(-1), rtol=1e-4, atol=1e-4)
    if family != "gemma3":  # whose layers lie elsewhere in the reference
        states = hidden_states(reference, tokens)[:, [2, 5]]
        torch.testing.assert_close(torch.stack([one[0] for one in found.tapped], dim=1), states)
    assert read_config(path)["vocab_size"] == target.vocab_size == 203
