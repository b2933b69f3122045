"""scripts/pair/drafter_material.py: what the shipped drafters are made of."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from trtrun.configuration.model_paths import ASSETS

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from scripts.pair.drafter_material import TOKENIZER_FILES, restack, write_heldout_prompts


def load(path: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(path, dtype=torch.float32)


@torch.no_grad()
def test_a_draft_with_silent_layers_behind_its_own_computes_the_same(tmp_path: Path) -> None:
    restack(ASSETS / "draft", [0, 1, 0, 1, 0], 2, tmp_path / "deep")
    deep, draft = load(tmp_path / "deep"), load(ASSETS / "draft")
    tokens = torch.arange(40)[None] * 7
    assert len(deep.model.layers) == 5
    torch.testing.assert_close(deep(tokens).logits, draft(tokens).logits)
    assert torch.equal(deep.model.layers[3].mlp.up_proj.weight, draft.model.layers[1].mlp.up_proj.weight)
    assert {name for name in TOKENIZER_FILES if (tmp_path / "deep" / name).is_file()} == set(TOKENIZER_FILES)


def test_layers_of_the_target_are_its_own(tmp_path: Path) -> None:
    restack(ASSETS / "target", [0, 11], 2, tmp_path / "some")
    some, target = load(tmp_path / "some"), load(ASSETS / "target")
    for mine, layer in ((0, 0), (1, 11)):
        theirs = target.model.layers[layer].state_dict()
        for name, value in some.model.layers[mine].state_dict().items():
            assert torch.equal(value, theirs[name]), name


def test_held_out_prompts_are_those_of_the_record(tmp_path: Path) -> None:
    write_heldout_prompts(ASSETS, tmp_path / "prompts.jsonl")
    rows = [json.loads(line)["prompt"] for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    assert len(rows) == 40 and rows[0].startswith("    def __new__(cls, *args, **kwargs):\n")
