"""Held-out loss and acceptance of an exported pair, computed with transformers alone.

Used by train_pair.py --evaluate. It knows nothing of trtrun, so that its figures are an
independent check.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy
import torch
from torch.nn import functional
from transformers import AutoTokenizer, LlamaForCausalLM

ROLES = ("target", "draft")


def heldout_loss(model: LlamaForCausalLM, tokens: numpy.ndarray, length: int) -> float:
    """Mean next-token loss in nats over consecutive windows of the held-out files."""
    windows = tokens[: len(tokens) // length * length].reshape(-1, length).astype(numpy.int64)
    losses = []
    for batch in torch.from_numpy(windows).split(4):
        logits = model(batch, use_cache=False).logits[:, :-1].float().flatten(0, 1)
        losses.append(functional.cross_entropy(logits, batch[:, 1:].flatten(), reduction="sum"))
    return float(sum(losses)) / (len(windows) * (length - 1))


def propose(draft: LlamaForCausalLM, tokens: list[int], draft_length: int) -> list[int]:
    """Greedy draft tokens, one forward each."""
    proposed: list[int] = []
    for _ in range(draft_length):
        logits = draft(torch.tensor([[*tokens, *proposed]]), logits_to_keep=1).logits
        proposed.append(int(logits[0, -1].argmax()))
    return proposed


def speculate(
    target: LlamaForCausalLM, draft: LlamaForCausalLM, prompt: list[int], new_tokens: int, draft_length: int
) -> tuple[list[int], int]:
    """Greedy speculative decoding without caches; returns the text's tokens and the rounds."""
    output, rounds = list(prompt), 0
    while len(output) < len(prompt) + new_tokens:
        proposed = output + propose(draft, output, draft_length)
        logits = target(torch.tensor([proposed]), logits_to_keep=draft_length + 1).logits[0]
        chosen = logits.argmax(-1).tolist()
        accepted = 0
        while accepted < draft_length and proposed[len(output) + accepted] == chosen[accepted]:
            accepted += 1
        output += chosen[: accepted + 1]
        rounds += 1
    return output, rounds


def evaluate(work: Path, out: Path, prompt_count: int) -> None:
    """Report held-out losses and acceptance of the exported weights, in fp32 and in bf16."""
    record = json.loads((out / "heldout.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(out / "target")
    tokens = numpy.load(work / "heldout.npy")
    report: dict[str, float | int] = {}
    for data_type in (torch.float32, torch.bfloat16):
        label = str(data_type).removeprefix("torch.")
        pair = [LlamaForCausalLM.from_pretrained(out / name, dtype=data_type) for name in ROLES]
        produced = rounds = 0
        for index, prompt in enumerate(record["prompts"][:prompt_count]):
            identifiers = tokenizer(prompt["text"])["input_ids"]
            output, used = speculate(pair[0], pair[1], identifiers, 96, 4)
            produced, rounds = produced + len(output) - len(identifiers), rounds + used
            if index % 8 == 0 and data_type is torch.float32:
                print("=" * 30, prompt["source"], f"{(len(output) - len(identifiers)) / used:.2f}")
                print(tokenizer.decode(output), flush=True)
        report[f"acceptance_{label}"] = round(produced / rounds, 3)
        if data_type is torch.bfloat16:
            for name, model in zip(ROLES, pair, strict=True):
                report[f"{name}_parameters"] = model.num_parameters()
                for length in (256, 1024):
                    report[f"{name}_heldout_loss_{length}"] = round(heldout_loss(model, tokens, length), 4)
    print(json.dumps(report, indent=1))
