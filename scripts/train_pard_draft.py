"""Train the PARD draft that ships in ``trtrun/assets/pard_draft``, by trtrun's own commands.

The prompts are pieces of the corpus of the shipped pair (pair_corpus.py). Stages: ``prompts``, ``data`` (trtrun
generate-data), ``start`` (the shipped draft with more layers), ``train`` (trtrun train-drafter) and ``export``. A run
that was killed goes on from its last row or checkpoint. ``--evaluate`` measures what was exported, with transformers
alone.

    python scripts/train_pard_draft.py --work-dir build/train_pard_draft --out trtrun/assets
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import numpy
import torch
from pair_corpus import corpus_files
from pair_evaluation import acceptance
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

PARD_TOKEN = 125
"""Stands for the byte 0xC0, which no UTF-8 text has."""

DRAFT_LENGTH, SAMPLED_SHARE = 4, 0.25
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def write_prompts(work: Path, out: Path, rows: int, seed: int) -> None:
    """Cut prompts of 32 to 96 tokens out of the training files."""
    root = Path(sysconfig.get_paths()["stdlib"])
    tokenizer = PreTrainedTokenizerFast.from_pretrained(out / "target")
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
    (work / "prompts.jsonl").write_text("".join(lines), encoding="utf-8")


def write_config(work: Path, out: Path) -> Path:
    """The shipped pair in one process."""
    path = work / "pair.yaml"
    sections = {name: {"model": str((out / name).resolve()), "devices": ["cpu:0"]} for name in ("target", "draft")}
    path.write_text(json.dumps({**sections, "scheduler": {"max_batch_size": 64}, "threads": 1}), encoding="utf-8")
    return path


def trtrun(*words: object) -> None:
    """Run a command of trtrun."""
    subprocess.run([sys.executable, "-m", "launch.cli", *map(str, words)], check=True)


def generate(work: Path, out: Path, seed: int) -> None:
    """Let the target answer the prompts; most rows are greedy, as the text that acceptance is measured on."""
    given = ("--prompts", work / "prompts.jsonl", "--output", work / "data.jsonl", "--resume")
    sampling = ("--max-tokens", 160, "--sampled-share", SAMPLED_SHARE, "--temperature", 0.8, "--seed", seed)
    # The draft does not pay for 64 rows on a CPU.
    trtrun("generate-data", "--config", write_config(work, out), "--speculation", "none", *given, *sampling)


def deepen(draft: Path, layers: int, start: Path) -> None:
    """The draft with copies of its layers behind them, whose outputs are zero: it still computes the same.

    One forward that guesses several tokens has as many layers for all of them as the draft has for each.
    """
    model = LlamaForCausalLM.from_pretrained(draft, dtype=torch.bfloat16)
    config, own = model.config, model.config.num_hidden_layers
    config.num_hidden_layers = layers
    deep, weights = LlamaForCausalLM(config).to(torch.bfloat16), model.state_dict()
    for name, value in deep.state_dict().items():
        parts = name.split(".")
        index = int(parts[2]) if parts[1] == "layers" else 0
        if parts[1] == "layers":
            parts[2] = str(index % own)
        value.copy_(weights[".".join(parts)])
        if index >= own and parts[-2] in ("o_proj", "down_proj"):
            value.zero_()
    deep.save_pretrained(start)
    for name in TOKENIZER_FILES:
        shutil.copyfile(draft / name, start / name)


def train(work: Path, out: Path, steps: int, seed: int) -> None:
    """Teach it to guess several tokens at once."""
    files = ("--from", work / "start", "--data", work / "data.jsonl", "--output", work / "trained", "--resume")
    sizes = ("--num-tokens", DRAFT_LENGTH, "--steps", steps, "--batch-size", 4, "--max-length", 256)
    rates = ("--learning-rate", 0.001, "--retention", 0.7, "--divergence", 0, "--cross-entropy", 1)
    others = ("--pard-token", PARD_TOKEN, "--heldout-rows", 32, "--evaluation-steps", 100, "--seed", seed)
    trtrun("train-drafter", "--config", write_config(work, out), *files, *sizes, *rates, *others)


def export(work: Path, out: Path) -> None:
    """Put the drafter in place; it appears complete by a rename."""
    incoming, retired, final = out / ".pard_draft.incoming", out / ".pard_draft.retired", out / "pard_draft"
    shutil.rmtree(incoming, ignore_errors=True)
    shutil.copytree(work / "trained", incoming, ignore=shutil.ignore_patterns("training"))
    if final.exists():
        os.rename(final, retired)
    os.rename(incoming, final)
    shutil.rmtree(retired, ignore_errors=True)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--work-dir", type=Path, default=Path("build/train_pard_draft"), help="data and checkpoints")
    parser.add_argument("--out", type=Path, default=Path("trtrun/assets"), help="holds the pair; takes the draft")
    parser.add_argument("--stages", nargs="+", default=["prompts", "data", "start", "train", "export"])
    parser.add_argument("--evaluate", action="store_true", help="only measure the exported draft beside the pair's")
    parser.add_argument("--prompts", type=int, default=40, help="held-out prompts to evaluate")
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=17)
    return parser.parse_args()


def main() -> None:
    """Run the stages asked for, in order."""
    arguments = parse_arguments()
    work, out = arguments.work_dir, arguments.out
    if arguments.evaluate:
        for data_type in (torch.float32, torch.bfloat16):
            with torch.no_grad():
                found = acceptance(out, ["draft", "pard_draft"], arguments.prompts, DRAFT_LENGTH, data_type)
            print(json.dumps({"dtype": str(data_type).removeprefix("torch."), **found}), flush=True)
        return
    work.mkdir(parents=True, exist_ok=True)
    stages: dict[str, Callable[[], None]] = {
        "prompts": lambda: write_prompts(work, out, arguments.rows, arguments.seed),
        "data": lambda: generate(work, out, arguments.seed),
        "start": lambda: deepen(out / "draft", arguments.layers, work / "start"),
        "train": lambda: train(work, out, arguments.steps, arguments.seed),
        "export": lambda: export(work, out),
    }
    for name in arguments.stages:
        stages[name]()


if __name__ == "__main__":
    main()
