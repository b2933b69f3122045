#!/usr/bin/env python3
"""Random jobs: an engine that drafts for many requests at once, beside each request alone without drafts.

Tokens, and the logits that each was chosen from, must be the same to the bit.

    python scripts/soak/random_jobs.py [--jobs 500] [--seed 0] [--dtype float32] [--device cpu:0] [--target DIR]
                                  [--heads METHOD=DIR ...] [--first N] [--seconds S]

A job draws a drafting method (chains, trees, several paths), how keys and values are kept, blocks, how prompts are cut,
how many rows run, whether blocks run out, and requests: greedy and sampled, with penalties, guides, budgets for
thoughts, bad words and LoRA adapters.
Models are the shipped ones, with their heads; or --target, whose heads are what --heads names. Adapters are made up.
TRTRUN_MAX_CPU_ISA=avx2 has it all computed as on a processor with less. Job N alone is --first N --jobs 1. The last
line is JSON. Exit status 1 where a job differs.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

# isort: off
import trtrun  # noqa: F401  before torch, which reads how its threads wait when it loads
import torch
# isort: on

import numpy as np
from safetensors.torch import load_file, save_file

from trtrun import LLM, SamplingParams
from trtrun.configuration.config import make_config
from trtrun.configuration.model_paths import ASSETS
from trtrun.core.outputs import RequestOutput

STARTS = ("def main(", "import os\n", "class Node:\n    def __init__(self", "for i in range(", "# Reads\n", "try:\n")
GUIDES = (
    {"regex": "[a-z]{3,12}( [a-z]{2,9}){2,5}"},
    {"choice": ["self.a = b", "self.a = c", "return None"]},
    {"json": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string", "maxLength": 9}}}},
)
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ADAPTERS = ("one", "two")
SHIPPED_HEADS = {name: f"asset:{name}" for name in ("medusa", "eagle3")}
SHIPPED_MEDUSA_HEADS = 4
DRAFTS = ("asset:draft", "asset:pard_draft")


def make_adapter(path: Path, target: Path, seed: int, rank: int) -> Path:
    """A LoRA adapter of all layers of a checkpoint, in PEFT's form, with random numbers."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for file in sorted(target.glob("*.safetensors")):
        for name, weight in load_file(file).items():
            module = name.removesuffix(".weight")
            if module.endswith(MODULES):
                down = torch.randn(rank, weight.shape[1], generator=generator) * weight.shape[1] ** -0.5
                up = torch.randn(weight.shape[0], rank, generator=generator) * 0.02
                tensors[f"base_model.model.{module}.lora_A.weight"] = down
                tensors[f"base_model.model.{module}.lora_B.weight"] = up
    path.mkdir()
    save_file(tensors, path / "adapter_model.safetensors", {"format": "pt"})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(MODULES), "bias": "none"}
    (path / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return path


def choose_method(chance: random.Random, heads: dict[str, str]) -> tuple[dict[str, Any], str | None]:
    """What `speculation` says, and the draft model or heads."""
    length = chance.randint(1, 6)
    texts = ["ngram", "suffix", "lookahead", "token_recycling"]
    method = chance.choice(["draft_target", *heads, *texts, *heads])
    options: dict[str, Any] = {"method": method, "pacing": chance.choice(["fixed", "fixed", "measured"])}
    if method not in ("lookahead", "token_recycling"):
        options["draft_len"] = length
    if method in ("ngram", "suffix"):
        options["max_paths"] = chance.choice([1, 2, 4])
    elif method in ("eagle", "eagle3") and chance.random() < 0.6:
        options["eagle_topk"] = chance.randint(2, 4)
        options["max_total_draft_tokens"] = max(options["eagle_topk"], chance.randint(length, 4 * length))
    elif method == "medusa":
        options["draft_len"] = min(length, SHIPPED_MEDUSA_HEADS)
        if chance.random() < 0.5:
            options["medusa_choices"] = [[0], [1], [2], [0, 0], [0, 1], [1, 0]]
            options["draft_len"] = min(length, 2)
    return options, chance.choice(DRAFTS) if method == "draft_target" else heads.get(method)


def choose_requests(chance: random.Random, vocabulary: int | None, with_adapters: bool) -> list[tuple[Any, Any]]:
    """Prompts with their sampling parameters."""
    requests = []
    for index in range(chance.randint(2, 7)):
        if vocabulary is None:
            names = "abcd"
            lines = [
                f"    self.{chance.choice(names)} = {chance.choice(names)}\n" for _ in range(chance.randint(0, 20))
            ]
            prompt: Any = chance.choice(STARTS) + "".join(lines)
        else:
            prompt = [chance.randrange(vocabulary) for _ in range(chance.choice([1, 3, 17, 40, 90]))]
        values: dict[str, Any] = {"max_tokens": chance.randint(1, 48), "seed": index, "ignore_eos": True}
        values["return_generation_logits"] = True
        if chance.random() < 0.5:
            values |= {"temperature": chance.choice([0.5, 0.8, 1.3]), "top_p": chance.choice([0.9, 1.0])}
            values["top_k"] = chance.choice([0, 20])
        if chance.random() < 0.2:
            values |= {"repetition_penalty": 1.2, "frequency_penalty": 0.3}
        if vocabulary is None and chance.random() < 0.25:
            values |= {"guided": chance.choice(GUIDES), "ignore_eos": False}
        elif vocabulary is None and chance.random() < 0.25:
            values |= {"thinking_token_budget": chance.randint(0, 20), "thinking_marks": ("", "</think>")}
            values["bad_words"] = chance.choice([(), ("self", "return")])
        if with_adapters:
            values["lora_name"] = chance.choice([None, *ADAPTERS])
        requests.append((prompt, SamplingParams(**values)))
    return requests


def make_job(chance: random.Random, options: argparse.Namespace, heads: dict[str, str]) -> dict[str, Any]:
    """The configuration of the engine that drafts."""
    speculation, draft = choose_method(chance, heads)
    rows = chance.choice([2, 4, 8])
    target = {"model": options.target or "asset:target", "devices": [options.device], "dtype": options.dtype}
    kv_cache = {"dtype": chance.choice(["plain", "fp8", "int8"]), "block_size": chance.choice([4, 8, 16, 32])}
    kv_cache |= {"max_tokens": chance.choice([1024, 2048, 8192])}  # of few, rows are preempted
    scheduler = {"max_batch_size": rows, "max_num_tokens": chance.choice([64, 256, 2048]) + 40 * rows}
    values = {"target": target, "speculation": speculation, "kv_cache": kv_cache, "scheduler": scheduler}
    if draft is not None:
        values["draft"] = {"model": draft}
        if speculation["method"] == "draft_target":
            values["draft"] |= {"devices": [options.device], "dtype": options.dtype}
    return values


def run_job(number: int, options: argparse.Namespace, heads: dict[str, str], adapters: dict[str, str]) -> list[str]:
    """Both engines; returns what differs, a line each."""
    chance = random.Random(f"{options.seed} {number}")
    values = make_job(chance, options, heads)
    with_adapters = chance.random() < 0.3
    requests = choose_requests(chance, options.vocabulary, with_adapters)
    if with_adapters:
        values["adapters"] = adapters
    prompts, sampling = [prompt for prompt, _ in requests], [parameters for _, parameters in requests]
    with LLM(config=make_config(values)) as llm:
        together = llm.generate(prompts, sampling)
    plain = {**values, "speculation": {"method": "none"}, "scheduler": {"max_num_tokens": 4096}}
    plain["kv_cache"] = {**values["kv_cache"], "max_tokens": 8192}
    plain.pop("draft", None)
    with LLM(config=make_config(plain)) as llm:
        alone = [llm.generate([prompt], parameters)[0] for prompt, parameters in requests]
    kept = values["kv_cache"]
    told = f"{values['speculation']['method']}, {kept['dtype']}, blocks of {kept['block_size']}"
    return [
        f"job {number} ({told}), request {index}: {what}"
        for index, (one, other) in enumerate(zip(together, alone, strict=True))
        if (what := difference(one, other))
    ]


def difference(found: RequestOutput, expected: RequestOutput) -> str:
    """How two outputs of a request differ; empty where they do not."""
    if found.error or expected.error:
        return "" if found.error == expected.error else f"{found.error} beside {expected.error}"
    one, other = found.completions[0], expected.completions[0]
    if one.token_ids != other.token_ids:
        same = sum(np.cumprod([a == b for a, b in zip(one.token_ids, other.token_ids, strict=False)]))
        return f"other tokens from place {same} on"
    assert one.generation_logits is not None and other.generation_logits is not None
    apart = np.abs(one.generation_logits - other.generation_logits).max()
    return f"logits apart by {apart:.1e}" if apart else ""


def main() -> int:
    """Run the jobs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu:0")
    parser.add_argument("--target", help="a checkpoint; its prompts are random tokens")
    parser.add_argument("--heads", action="append", default=[], metavar="METHOD=DIR", help="of --target")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="behind which no job begins")
    parser.add_argument("--first", type=int, default=0, help="the number of the first job")
    options = parser.parse_args()
    heads = dict(part.split("=", 1) for part in options.heads) if options.target else SHIPPED_HEADS
    folder = Path(options.target) if options.target else ASSETS / "target"
    options.vocabulary = None
    if options.target:
        options.vocabulary = json.loads((folder / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name:
        made = enumerate(ADAPTERS)
        adapters = {key: str(make_adapter(Path(name, key), folder, seed, 3 + 5 * seed)) for seed, key in made}
        until = time.monotonic() + options.seconds
        for number in range(options.first, options.first + options.jobs):
            if time.monotonic() > until:
                break
            differences = run_job(number, options, heads, adapters)
            counts["jobs"] += 1
            counts["different tokens"] += any("other tokens" in line for line in differences)
            counts["different"] += bool(differences)
            print(*differences, sep="\n", end="\n" if differences else "", flush=True)
    print(json.dumps({"dtype": options.dtype, "device": options.device, "seed": options.seed, **counts}))
    return 1 if counts["different"] else 0


if __name__ == "__main__":
    sys.exit(main())
