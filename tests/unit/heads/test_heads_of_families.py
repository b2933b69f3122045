"""Heads for targets of families that are not Llama's: what they propose is what their authors' formats say, so they tap
the right states, and read of the target's ends what they were trained with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dflash_heads import check_proposals as check_dflash
from dflash_heads import dflash, make_dflash, write_dflash
from eagle3_heads import check_proposals, check_trees, eagle3, make_head, write_head
from eagle_heads import eagle, make_eagle_head, write_eagle_head
from family_checkpoints import write_family
from medusa_heads import Proposals
from pipelines import Reference, make_llm, prompt_of

from trtrun import SamplingParams
from trtrun.speculation.drafters.eagle import EagleDrafter

PROMPTS = [prompt_of(length, seed=length) for length in (3, 20, 33)]
FAMILIES = ("gemma3_text", "qwen3_moe")
OTHERS = ("gpt_oss", "qwen3_5_text", "gemma4_text", "deepseek_v3", "glm4_moe")
"""Of which heads are published, too: sinks, states, two sizes of heads, latents, a router with a bias."""


def propose(target: Path, heads: Path, speculation: dict[str, Any], patch: pytest.MonkeyPatch) -> Proposals:
    """Drafts of greedy rows, prompts in chunks."""
    seen, scheduler = Proposals(patch, EagleDrafter), {"max_batch_size": 3, "max_num_tokens": 40}
    with make_llm(target, heads=heads, speculation=speculation, scheduler=scheduler) as llm:
        llm.generate(PROMPTS, SamplingParams(max_tokens=7))
    return seen


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("targets")
    depth: dict[str, Any] = {"num_hidden_layers": 7, "layer_types": None}
    return {family: write_family(folder / family, family, seed=1, **depth) for family in (*FAMILIES, *OTHERS)}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("layout", "shape", "changes"),
    [
        ("specforge", {"num_tokens": 120}, {}),
        ("speculators", {"num_tokens": 120, "norm_before_residual": True, "hidden_size": 48, "num_layers": 2},
         {"hidden_act": "gelu_pytorch_tanh", "window": 5}),
        ("specforge", {"fc_norm": True, "norm_output": True, "boundaries": (1, 4, 7)}, {}),
    ],
    ids=["as SpecForge writes it", "as speculators does, with the target's activation", "EAGLE-3.1"],
)  # fmt: skip
def test_eagle3_drafts_are_the_papers(
    tmp_path: Path,
    targets: dict[str, Path],
    family: str,
    layout: str,
    shape: dict[str, Any],
    changes: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = targets[family]
    head = replace(make_head(target, **shape), **changes)
    path = write_head(tmp_path, head, layout, target)
    assert check_proposals(propose(target, path, eagle3(draft_len=3), monkeypatch), target, head) > 10
    tree = {"eagle_topk": 2, "max_total_draft_tokens": 6, "draft_len": 3}
    assert check_trees(propose(target, path, eagle3(**tree), monkeypatch), target, head, tree) > 10


@pytest.mark.parametrize("family", FAMILIES)
def test_eagle_reads_the_embedding_as_it_is_stored(
    tmp_path: Path, targets: dict[str, Path], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trainers copy the target's embedding without the factor that Gemma has for it."""
    head = make_eagle_head(targets[family])
    path = write_eagle_head(tmp_path, head, "reference", targets[family])
    seen = propose(targets[family], path, eagle(draft_len=3), monkeypatch)
    assert check_proposals(seen, targets[family], head) > 10


@pytest.mark.parametrize("family", FAMILIES)
def test_dflash_reads_the_embedding_as_the_target_does(
    tmp_path: Path, targets: dict[str, Path], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its authors call the target's own module, which has the factor."""
    embed = Reference(targets[family]).model.get_input_embeddings()
    with torch.inference_mode():
        embedded = embed(torch.arange(203)).clone()
    head = replace(make_dflash(targets[family]), embedding=embedded)
    path = write_dflash(tmp_path, head, "dflash", targets[family])
    assert check_dflash(propose(targets[family], path, dflash(draft_len=3), monkeypatch), targets[family], head) > 10


@pytest.mark.parametrize("family", OTHERS)
def test_chains_of_published_heads(
    tmp_path: Path, targets: dict[str, Path], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = targets[family]
    head, flash = make_head(target, num_tokens=120), make_dflash(target)
    path = write_head(tmp_path / "eagle3", head, "specforge", target)
    assert check_proposals(propose(target, path, eagle3(draft_len=3), monkeypatch), target, head) > 10
    if family != "gemma4_text":  # whose factor of the embedding is Gemma 3's, above
        path = write_dflash(tmp_path / "dflash", flash, "dflash", target)
        assert check_dflash(propose(target, path, dflash(draft_len=3), monkeypatch), target, flash) > 10
