#!/usr/bin/env python3
"""Counts speculative texts that are plain decoding's, to the token, for checkpoints of any families.

    python scripts/pair/family_texts.py CHECKPOINT ... [--device cuda:0] [--rows 1,8,32,64] [--max-tokens 60]
        [--max-num-tokens 128]

Each checkpoint is a target in bfloat16. It drafts with a copy of itself whose weights are disturbed, and from n-grams
of the texts, or by the methods that `methods.json` beside it names; greedy and at temperature 0.8 by seed, prompts of
mixed lengths, all rows of a number together. Tiny checkpoints with random weights are the worst case: where
transformers is, `python tests/helpers/family_checkpoints.py FOLDER` writes one of each family, and `python
tests/helpers/family_drafts.py FOLDER FAMILY ...` a target, FOLDER/FAMILY/target, with what drafts for it by every
method. The last line is JSON. Exit status 1 where a text differs, or a draft model or head had nothing accepted.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from trtrun import LLM, SamplingParams
from trtrun.configuration.config import make_config
from trtrun.models.config import read_model_config

NOISE = 0.1


def disturbed_copy(target: Path, folder: Path) -> Path:
    """Write the target with each weight disturbed by a part of its own deviation."""
    shutil.copytree(target, folder)
    generator = torch.Generator().manual_seed(5)
    for file in folder.glob("*.safetensors"):
        weights = load_file(file)
        for name, value in weights.items():
            if value.numel() > 1:
                noise = torch.randn(value.shape, generator=generator) * value.float().std() * NOISE
                weights[name] = (value.float() + noise).to(value.dtype)
        save_file(weights, file, {"format": "pt"})
    return folder


def prompts_of(count: int, vocab_size: int) -> list[list[int]]:
    """Tokens of mixed numbers, which repeat themselves."""
    generator = torch.Generator().manual_seed(count)
    lengths = torch.randint(2, 40, (count,), generator=generator).tolist()
    return [torch.randint(vocab_size, (length,), generator=generator).tolist() * 2 for length in lengths]


def methods_of(target: Path, folder: Path) -> dict[str, dict[str, Any]]:
    """Sections of the configuration by method: what `methods.json` beside a target says, or a disturbed copy of it,
    made in `folder`, and n-grams."""
    known = target.parent / "methods.json"
    if not known.exists():
        speculation = {"pacing": "fixed", "draft_len": 4}
        draft = {"model": str(disturbed_copy(target, folder / "draft")), "dtype": "bfloat16"}
        return {
            "draft": {"speculation": {"method": "draft_target", **speculation}, "draft": draft},
            "ngram": {"speculation": {"method": "ngram", **speculation}},
        }
    methods = {}
    for name, told in json.loads(known.read_text(encoding="utf-8")).items():
        methods[name] = {"speculation": told["speculation"]}
        if told["model"]:
            model = {"model": str(target.parent / told["model"])}
            methods[name]["draft"] = {**model, "dtype": "bfloat16"} if told["has_devices"] else model
    return methods


def compare(
    target: Path, sections: dict[str, Any], device: str, rows: list[int], max_tokens: int, chunk: int | None
) -> dict[str, Any]:
    """How many texts of each number of rows are the same with and without drafts."""
    values: dict[str, Any] = {
        "target": {"model": str(target), "devices": [device], "dtype": "bfloat16"},
        "kv_cache": {"max_tokens": 64 * 256},
        "scheduler": {"max_batch_size": max(rows), "max_seq_len": 240, **({"max_num_tokens": chunk} if chunk else {})},
        **sections,
    }
    if "dtype" in sections.get("draft", {}):
        values["draft"] = {**sections["draft"], "devices": [device]}
    found: dict[str, Any] = {}
    with LLM(config=make_config(values)) as llm:
        for count in rows:
            prompts = prompts_of(count, read_model_config(target).vocab_size)
            kinds = [
                SamplingParams(max_tokens=max_tokens, temperature=0.8 * (row % 2), seed=row, ignore_eos=True)
                for row in range(count)
            ]
            texts = []
            for speculates in (True, False):
                llm.set_speculation(speculates)
                texts.append([output.completions[0].token_ids for output in llm.generate(prompts, kinds)])
            found[str(count)] = f"{sum(one == other for one, other in zip(*texts, strict=True))} of {count}"
        found["accepted"] = llm.statistics()["num_accepted_draft_tokens"]
    return found


def main() -> int:
    """Compare all, and say what differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoints", nargs="+", type=Path)
    parser.add_argument("--device", default="cpu:0")
    parser.add_argument("--rows", default="1,8,32,64")
    parser.add_argument("--max-tokens", type=int, default=60)
    parser.add_argument("--max-num-tokens", type=int, help="of a round: few, so that windows are shorter than rows")
    options = parser.parse_args()
    rows, results, is_right = [int(count) for count in options.rows.split(",")], {}, True
    for target in options.checkpoints:
        with tempfile.TemporaryDirectory() as folder:
            for method, sections in methods_of(target, Path(folder)).items():
                found = compare(target, sections, options.device, rows, options.max_tokens, options.max_num_tokens)
                name = target.parent.name if target.name == "target" else target.name
                results[f"{name} {method}"] = found
                is_right &= all(found[str(count)] == f"{count} of {count}" for count in rows)
                is_right &= "draft" not in sections or found["accepted"] > 0
                print(name, method, json.dumps(found), flush=True)
    print(json.dumps(results))
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
