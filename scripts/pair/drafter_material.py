"""What drafters for the shipped target begin with: prompts for their data, and models to make PARD drafts of.

Used by train_shipped_drafters.py. It knows the corpus and checkpoints, and nothing of training.
"""

from __future__ import annotations

import json
import shutil
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import numpy
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from scripts.pair.pair_corpus import corpus_files

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def write_prompts(assets: Path, path: Path, rows: int, seed: int) -> None:
    """Cut prompts of 32 to 96 tokens out of the training files."""
    root = Path(sysconfig.get_paths()["stdlib"])
    tokenizer = PreTrainedTokenizerFast.from_pretrained(assets / "target")
    tokens: list[int] = []
    for name in corpus_files(root)[0]:
        text = (root / name).read_text(encoding="utf-8", errors="replace")
        tokens += [tokenizer.eos_token_id, *tokenizer(text)["input_ids"]]
    generator = numpy.random.default_rng([seed, 2])
    lines = []
    for _ in range(rows):
        length = int(generator.integers(32, 97))
        start = int(generator.integers(0, len(tokens) - length))
        lines.append(json.dumps({"prompt_token_ids": tokens[start : start + length]}) + "\n")
    path.write_text("".join(lines), encoding="utf-8")


def write_heldout_prompts(assets: Path, path: Path) -> None:
    """The prompts that no model was trained on."""
    record = json.loads((assets / "heldout.json").read_text(encoding="utf-8"))
    heldout = [json.dumps({"prompt": prompt["text"]}) + "\n" for prompt in record["prompts"]]
    path.write_text("".join(heldout), encoding="utf-8")


def restack(source: Path, layers: Sequence[int], num_loud: int, start: Path) -> None:
    """A model of some layers of another, in this order. The outputs of those behind the first `num_loud` are zero.

    One forward that guesses several tokens needs more layers than a draft has for each of them.
    """
    model = LlamaForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    config, weights = model.config, model.state_dict()
    config.num_hidden_layers = len(layers)
    stacked = LlamaForCausalLM(config).to(torch.bfloat16)
    for name, value in stacked.state_dict().items():
        parts = name.split(".")
        index = int(parts[2]) if parts[1] == "layers" else 0
        if parts[1] == "layers":
            parts[2] = str(layers[index])
        value.copy_(weights[".".join(parts)])
        if index >= num_loud and parts[-2] in ("o_proj", "down_proj"):
            value.zero_()
    stacked.save_pretrained(start)
    for name in TOKENIZER_FILES:
        shutil.copyfile(source / name, start / name)
