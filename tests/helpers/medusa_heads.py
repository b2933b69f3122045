"""Made-up Medusa heads for tests: of every layout that files have them in, and in plain torch, from the paper's text.

Cai et al. 2024 (arXiv:2401.10774): a head is residual blocks x + SiLU(W x + b) and a matrix to the vocabulary; head h
says what stands 2 + h positions behind that of the hidden state, which is what leaves the final norm.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from own_drafters import hidden_states
from pipelines import Reference
from safetensors.torch import load_file, save_file

from trtrun.configuration.drafting.draft_trees import ChoiceTree
from trtrun.core.nouns import Draft, RoundPlan
from trtrun.kernels.triton.sampling import columns
from trtrun.sampling.random import Stream, gumbel
from trtrun.speculation.drafter import Drafter
from trtrun.speculation.drafters.medusa import MedusaDrafter

LAYOUTS = ("fasterdecoding", "version 2", "whole model", "modelopt", "vllm", "vllm with prefix", "vllm shared")
SHARED = ("version 2", "vllm shared")
"""Those in which heads have no matrices of their own."""

PREFIXES = {"whole model": "medusa_head.", "modelopt": "medusa_heads.", "vllm with prefix": "medusa_heads."}


@dataclass(frozen=True)
class Heads:
    """Blocks of each head as (weight [D, D], bias [D] or None), and the matrix [V, D] of each."""

    blocks: list[list[tuple[torch.Tensor, torch.Tensor | None]]]
    matrices: list[torch.Tensor]
    token_map: torch.Tensor | None = None

    def states(self, hidden: torch.Tensor) -> list[torch.Tensor]:
        """[n, D] of each head, for hidden [n, D]."""
        found = []
        for of_head in self.blocks:
            state = hidden
            for weight, bias in of_head:
                made = state @ weight.T if bias is None else state @ weight.T + bias
                state = state + made * torch.sigmoid(made)
            found.append(state)
        return found

    def logits(self, hidden: torch.Tensor, vocab_size: int) -> torch.Tensor:
        """[n, heads, V] for hidden [n, D]."""
        found = torch.stack(
            [state @ matrix.T for state, matrix in zip(self.states(hidden), self.matrices, strict=True)], dim=1
        )
        if self.token_map is None:
            return found
        every = torch.full((*found.shape[:2], vocab_size), -torch.inf)
        every[:, :, self.token_map] = found
        return every


def make_heads(
    target: Path, count: int = 4, num_blocks: int = 1, *, biases: bool = True, seed: int = 3, shared: bool = False
) -> Heads:
    """Random heads for a target, with its own matrix where that is `shared`."""
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    hidden, vocab_size = config["hidden_size"], config["vocab_size"]
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * hidden**-0.5

    def block() -> tuple[torch.Tensor, torch.Tensor | None]:
        return normal(hidden, hidden), normal(hidden) if biases else None

    blocks = [[block() for _ in range(num_blocks)] for _ in range(count)]
    own = load_file(target / "model.safetensors")["lm_head.weight"].float() if shared else None
    return Heads(blocks, [own if own is not None else normal(vocab_size, hidden) for _ in range(count)])


def fitted(heads: Heads, target: Path, texts: Iterable[Sequence[int]]) -> Heads:
    """Heads whose matrices say by least squares what the texts go on with: right more often than by chance."""
    reference, vocab_size = Reference(target), heads.matrices[0].shape[0]
    listed = [list(text) for text in texts]
    hidden = [hidden_states(reference, text)[:, -1] for text in listed]
    matrices = []
    for head in range(len(heads.matrices)):
        ahead = 2 + head
        states = torch.cat([heads.states(of_text[:-ahead])[head] for of_text in hidden if len(of_text) > ahead])
        wanted = torch.tensor([token for text in listed for token in text[ahead:]])
        one_hot = torch.nn.functional.one_hot(wanted, vocab_size).float()
        matrices.append((torch.linalg.lstsq(states, one_hot, driver="gelsd").solution * 10).T.contiguous())
    return replace(heads, matrices=matrices)


def write_heads(
    path: Path, heads: Heads, layout: str = "fasterdecoding", target: Path | None = None, **config: Any
) -> Path:
    """Write `heads` in a layout, with a config.json that says `config`; returns the directory."""
    path.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, torch.Tensor] = {}
    is_vllm = layout.startswith("vllm")
    prefix = PREFIXES.get(layout, "")
    for head, of_head in enumerate(heads.blocks):
        for place, (weight, bias) in enumerate(of_head):
            block = f"{prefix}blocks.{head}.layers.{place}" if is_vllm else f"{prefix}{head}.{place}.linear"
            tensors[f"{block}.weight"] = weight
            if bias is not None:
                tensors[f"{block}.bias"] = bias
        if layout not in SHARED:
            matrix = f"{prefix}lm_heads.{head}.weight" if is_vllm else f"{prefix}{head}.{len(of_head)}.weight"
            tensors[matrix] = heads.matrices[head]
    if heads.token_map is not None:
        tensors["token_map"] = heads.token_map
    name = "medusa_lm_head.safetensors" if layout in ("fasterdecoding", "version 2") else "model.safetensors"
    if layout == "whole model":
        assert target is not None
        for file in target.glob("*.json"):
            shutil.copy(file, path)
        tensors |= load_file(target / "model.safetensors")
    elif config:
        (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file({key: value.contiguous().clone() for key, value in tensors.items()}, path / name, {"format": "pt"})
    return path


def ranked(logits: torch.Tensor, count: int, temperature: float, seed: int, length: int) -> torch.Tensor:
    """[heads, count]: the tokens of logits [heads, V], the best first, of a row of `length` tokens: the likeliest, or
    those that the target's random numbers favour."""
    return keyed_scores(logits, temperature, seed, length).topk(count, dim=1).indices


def keyed_scores(logits: torch.Tensor, temperature: float, seed: int, length: int) -> torch.Tensor:
    """[heads, V] that `ranked` ranks."""
    if not temperature:
        return logits
    places = length + torch.arange(len(logits))
    noise = gumbel(torch.full_like(places, seed), places, Stream.TARGET, logits.shape[1])
    return torch.log_softmax(logits / temperature, dim=1) + noise


def medusa(**options: Any) -> dict[str, Any]:
    """The section of the method."""
    return {"method": "medusa", **options}


class Proposals:
    """What was proposed: of each row and round its text, temperature and seed, and its draft."""

    def __init__(self, patch: pytest.MonkeyPatch, kind: type[Drafter] = MedusaDrafter) -> None:
        self.seen: list[tuple[list[int], float, int, list[int], int]] = []
        self.paths: list[list[list[int]] | None] = []  # of each draft
        original = kind.propose

        def propose(drafter: Drafter, plan: RoundPlan, probability_rows: Sequence[int]) -> Draft:
            draft = original(drafter, plan, probability_rows)
            state: Any = drafter.rows
            for index, row in enumerate(plan.decode_rows.tolist()):
                text = state.token_ids[row, : int(state.lengths[row])].tolist()
                temperature = float(state.sampling.numbers[row, columns.TEMPERATURE])
                seed = int(state.sampling.integers[row, columns.SEED])
                self.paths.append(None if draft.paths is None else draft.paths[index].tolist())
                self.seen.append((text, temperature, seed, draft.tokens[index].tolist(), int(draft.draft_lens[index])))
            return draft

        patch.setattr(kind, "propose", propose)

    def check(self, target: Path, heads: Heads, tree: ChoiceTree) -> int:
        """Compare all of them with the heads in plain torch; returns how many drafts there were."""
        reference, count = Reference(target), 0
        for text, temperature, seed, tokens, draft_len in self.seen:
            if draft_len <= 0:
                continue
            state = hidden_states(reference, text[:-1])[-1:, -1]
            logits = heads.logits(state, reference.model.config.vocab_size)[0]
            best = ranked(logits[: tree.depth], tree.num_ranks, temperature, seed, len(text)).tolist()
            nodes = [node for node in tree.nodes if len(node) <= len(tree.nodes[len(tokens) - 1])]
            assert tokens == [best[len(node) - 1][node[-1]] for node in nodes]
            count += 1
        return count
