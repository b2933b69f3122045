"""Heads for multi-token prediction in the target's own files: what they propose is what the layer of transformers says,
and no text depends on it."""

from __future__ import annotations

from pathlib import Path

import pytest
from decoder_heads import check_drafts
from family_checkpoints import write_family
from medusa_heads import Proposals
from mtp_heads import FAMILIES, MTPHead
from pipelines import make_llm, prompt_of

from trtrun import SamplingParams
from trtrun.speculation.drafters.eagle import EagleDrafter

PROMPTS = [prompt_of(length, seed=length) for length in (3, 20, 33)]


@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_are_what_transformers_layer_says(tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of greedy rows and sampled ones, more tokens than there are layers, prompts in chunks."""
    target = write_family(tmp_path, family, seed=1)
    head = MTPHead(target)
    head.write(target)
    seen, scheduler = Proposals(monkeypatch, EagleDrafter), {"max_batch_size": 3, "max_num_tokens": 40}
    sampling = [SamplingParams(max_tokens=7, temperature=0.9 * (row % 2), seed=row) for row in range(3)]
    with make_llm(target, speculation={"method": "mtp", "draft_len": 3}, scheduler=scheduler) as llm:
        llm.generate(PROMPTS, sampling)
    assert check_drafts(seen, target, head.draft) > 10
