"""Made-up DFlash and DSpark heads for tests: of every layout that files have them in, and in plain torch, from what
their authors say of them (DFlash: arXiv:2602.06036; DSpark: github.com/deepseek-ai/DeepSpec).

A draft is a block: the row's newest token, and mask tokens behind it. Layers run over the block; the keys and values
that its queries meet are those of the block, and those that the same projections make of the target's states, fused and
normed. Nothing is masked. There is no cache: each draft takes the whole text anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from decoder_heads import (
    NUM_HEADS,
    DecoderHead,
    RandomTensors,
    check_drafts,
    layer_values,
    read_config,
    token_tables,
    write_files,
)
from medusa_heads import Proposals, ranked
from own_drafters import hidden_states
from pipelines import Reference
from safetensors.torch import load_file
from torch import Tensor

MASK_TOKEN = 198
BLOCK = 6
LAYOUTS = ("dflash", "speculators", "dspark", "speculators dspark")


@dataclass(frozen=True)
class DFlash(DecoderHead):
    """A head.

    Attributes:
        embedding, head: its own or the target's.
        token_ids: the target's id of each line of `head`; None where they are the same.
        from_newest: whether what stands at the newest token says the first draft token.
    """

    head: Tensor
    token_ids: Tensor | None
    from_newest: bool
    is_causal: bool = False

    def states(self, text: Sequence[int], hidden: Tensor, count: int) -> Tensor:
        """[count, hidden]: what says the tokens behind a text, of the target's states [text - 1, boundaries, size]."""
        context = self.norm(self.linear(hidden[:, list(self.boundaries)].flatten(1), "fc"), "hidden_norm")
        first = 0 if self.from_newest else 1
        stream = self.embedding[[text[-1], *[MASK_TOKEN] * (count + first - 1)]]
        for layer in range(self.num_layers):
            name = f"layers.{layer}"
            normed = self.norm(stream, f"{name}.input_layernorm")
            stream = stream + self.attend(normed, f"{name}.self_attn", context=context, is_causal=self.is_causal)
            stream = stream + self.linear(self.gated(stream, name), f"{name}.mlp.down_proj")
        return self.norm(stream, "norm")[first:]

    @torch.inference_mode()
    def draft(self, target: Reference, text: list[int], count: int, temperature: float, seed: int) -> list[int]:
        """Tokens behind a text, each chosen as a row with such parameters chooses."""
        states = self.states(text, hidden_states(target, text[:-1]), count)
        drafted: list[int] = []
        for state in states:
            found = self.head @ state
            if "markov_head.markov_w1.weight" in self.tensors:
                before = self.tensors["markov_head.markov_w1.weight"][(text + drafted)[-1]]
                if "markov_head.gate_proj.weight" in self.tensors:
                    before = before * torch.sigmoid(self.linear(torch.cat((state, before)), "markov_head.gate_proj"))
                found = found + self.tensors["markov_head.markov_w2.weight"] @ before
            if self.token_ids is not None:
                found = torch.full((len(self.embedding),), -torch.inf).index_copy_(0, self.token_ids, found)
            drafted.append(int(ranked(found.unsqueeze(0), 1, temperature, seed, len(text) + len(drafted))))
        return drafted


def make_dflash(
    target: Path,
    layout: str = "dflash",
    *,
    boundaries: Sequence[int] = (1, 0, 3),
    num_layers: int = 2,
    num_tokens: int | None = None,
    is_causal: bool = False,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    is_gated: bool = False,
    seed: int = 3,
) -> DFlash:
    """A random head for a target; for `num_tokens` of its tokens where it has a head of its own."""
    size = read_config(target)["hidden_size"]
    weights = load_file(target / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"].float()
    head = weights.get("lm_head.weight", embedding).float()
    random = RandomTensors(seed)
    tensors, matrix, norm = random.tensors, random.matrix, random.norm
    matrix("fc", size, len(boundaries) * size)
    for layer in range(num_layers):
        name = f"layers.{layer}"
        random.layer(name, size, inputs=size, num_kv_heads=num_kv_heads, head_dim=head_dim, head_norms=True)
        for one in ("input_layernorm", "post_attention_layernorm"):
            norm(f"{name}.{one}", size)
    norm("hidden_norm", size)
    norm("norm", size)
    if layout != "dflash":
        matrix("lm_head", num_tokens or len(embedding), size)
        head = tensors["lm_head.weight"]
        tensors["embed_tokens.weight"] = embedding
    token_ids = random.token_ids(len(embedding), num_tokens)
    if layout.endswith("dspark"):
        matrix("markov_head.markov_w1", len(embedding), 8)
        matrix("markov_head.markov_w2", len(head), 8)
        if is_gated:
            matrix("markov_head.gate_proj", 8, size + 8)
            tensors["markov_head.gate_proj.bias"] = torch.randn(8, generator=random.generator)
        matrix("confidence_head.proj", 1, size + 8)
        tensors["confidence_head.proj.bias"] = torch.zeros(1)
    shape = (NUM_HEADS, num_kv_heads, head_dim)
    from_newest = layout.endswith("dspark")
    return DFlash(tensors, tuple(boundaries), *shape, embedding, head, token_ids, from_newest, is_causal)


def fitted_dflash(head: DFlash, target: Path, texts: Iterable[Sequence[int]], count: int = 3) -> DFlash:
    """The head with an lm_head that says by least squares what the texts go on with, where it knows the token."""
    reference, listed = Reference(target), [list(text) for text in texts]
    read, wanted = list[Tensor](), list[int]()
    with torch.inference_mode():
        for text in listed:
            hidden = hidden_states(reference, text)
            for end in range(2, len(text) - count):
                read.append(head.states(text[:end], hidden[: end - 1], count))
                wanted += text[end : end + count]
    expected = torch.nn.functional.one_hot(torch.tensor(wanted), len(head.embedding)).float()
    solution = torch.linalg.lstsq(torch.cat(read), expected, driver="gelsd").solution.T * 10
    lines = (solution if head.token_ids is None else solution[head.token_ids]).contiguous()
    return replace(head, tensors={**head.tensors, "lm_head.weight": lines}, head=lines)


def write_dflash(path: Path, head: DFlash, layout: str, target: Path, **changes: Any) -> Path:
    """Write a head in a layout; `changes` are values of config.json, None leaves one out. Returns the directory."""
    of_target = read_config(target)
    vocab_size = of_target["vocab_size"]
    tensors = {**head.tensors, **token_tables(head.token_ids, vocab_size)}
    layers = {"model_type": "qwen3", **layer_values(head, vocab_size)}
    layers["layer_types"] = ["full_attention"] * head.num_layers
    outputs = [one - 1 for one in head.boundaries]
    of_block = {"block_size": BLOCK, "mask_token_id": MASK_TOKEN}
    kind = "gated" if "markov_head.gate_proj.weight" in tensors else "vanilla"
    markov = {"markov_rank": 8, "markov_head_type": kind, "enable_confidence_head": True}
    if layout == "dflash":
        nested = {"mask_token_id": MASK_TOKEN, "target_layer_ids": outputs, "causal": head.is_causal}
        of_block = {"block_size": BLOCK, "dflash_config": nested, "num_target_layers": of_target["num_hidden_layers"]}
        config = {"architectures": ["DFlashDraftModel"], **layers, **of_block}
    elif layout == "dspark":
        config = {"architectures": ["Qwen3DSparkModel"], **layers, **of_block, "target_layer_ids": outputs, **markov}
    else:
        kind = layout.removeprefix("speculators").strip() or "dflash"
        ids = {"aux_hidden_state_layer_ids": list(head.boundaries), "draft_vocab_size": len(head.head)}
        config = {"speculators_model_type": kind, "transformer_layer_config": layers, **of_block, **ids}
        config |= {**markov, "sample_from_anchor": True} if kind == "dspark" else {}
    return write_files(path, tensors, config, changes)


def check_proposals(seen: Proposals, target: Path, head: DFlash) -> int:
    """Compare what was proposed with the head in plain torch; returns how many drafts there were."""
    return check_drafts(seen, target, head.draft)


def method_of(layout: str) -> str:
    """Which method drafts with heads of a layout."""
    return "dspark" if layout.endswith("dspark") else "dflash"


def dflash(layout: str = "dflash", **options: Any) -> dict[str, Any]:
    """The section of the method."""
    return {"method": method_of(layout), **options}
