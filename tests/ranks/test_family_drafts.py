"""Texts of families other than Llama's on a split target are plain decoding's to the bit in bfloat16, whatever drafts
for them."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from family_checkpoints import write_family
from family_drafts import METHODS, models_of, write_drafter
from jobs import HERE, configuration, place, run_job
from meeting import from_rank_0, meet
from mixed_rows import PROMPTS, mixed_sampling, whole_texts
from mpi4py import MPI
from pipelines import tokens_of

from trtrun import LLM

pytestmark = pytest.mark.mpi
TWO = [name for name, devices in HERE.items() if devices == place("", "ab")]
SAMPLING = mixed_sampling(16)
CASES = [
    *(("qwen3_moe", method) for method in METHODS),
    *(("gemma3_text", method) for method in ("EAGLE-1", "EAGLE-3", "EAGLE-3, dynamic tree", "DFlash")),
    *(
        (family, method)
        for family in ("deepseek_v3", "mixtral")
        for method in ("a draft model", "EAGLE-3, dynamic tree")
    ),
    ("gemma4_small", "a draft model"),
]
"""Every method for one family, and for others what meets their layers and ends; in one process all meet all
(test_lossless_families.py)."""


def use(llm: LLM) -> tuple[list[Any], float]:
    """Eight rows at once, then one."""
    texts = [*tokens_of(llm.generate(PROMPTS, SAMPLING)), *tokens_of(llm.generate(PROMPTS[:1], SAMPLING[:1]))]
    return texts, llm.statistics()["num_accepted_draft_tokens"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same folder for all ranks."""
    return from_rank_0(tmp_path_factory.mktemp("families") if MPI.COMM_WORLD.rank == 0 else None)


@cache
def plain(root: Path, family: str) -> Any:
    """What the target of a family, split over two ranks, says alone, at rank 0. Collective, the first time."""
    if MPI.COMM_WORLD.rank == 0:
        write_family(root / family / "target", family, seed=1, dtype=torch.bfloat16)
    meet()
    found = run_job(configuration(root / family / "target", None, devices=place("", "ab")), use)
    return None if found is None else found[0]


@pytest.mark.parametrize("name", TWO)
@pytest.mark.parametrize(("family", "method"), CASES)
def test_texts_are_plain_ones_on_a_split_target(root: Path, name: str, family: str, method: str) -> None:
    folder, texts, drafting = root / family, plain(root, family), METHODS[method]
    if texts is not None and drafting.kind:
        write_drafter(folder / drafting.kind, drafting.kind, folder / "target", whole_texts(texts[:-1]))
    meet()
    models = models_of(folder, drafting)
    devices = place("a", "ab") if "draft" in models else HERE[name]
    found = run_job(
        configuration(
            folder / "target", models.get("draft"), heads=models.get("heads"), devices=devices,
            speculation=drafting.section,
        ),
        use,
    )  # fmt: skip
    if found is not None:
        assert found[0] == texts
        assert found[1] > drafting.least // 2


@pytest.mark.parametrize("name", [name for name in HERE if name in ("a+ab", "ab+ba")])
def test_texts_of_experts_that_lie_whole_on_ranks_are_plain_ones(root: Path, name: str) -> None:
    """Of 7 experts, with one of all tokens beside."""
    folder = root / "qwen2_moe"
    if MPI.COMM_WORLD.rank == 0 and not folder.exists():
        write_family(folder / "target", "qwen2_moe", seed=1, dtype=torch.bfloat16)
        write_drafter(folder / "model", "model", folder / "target", [])
    meet()
    draft, target = HERE[name]
    plain = configuration(folder / "target", None, devices=((), target), expert_parallel=True)
    texts = run_job(plain, use)
    drafting = configuration(folder / "target", folder / "model", devices=(draft, target), expert_parallel=True)
    found = run_job(drafting, use)
    if found is not None and texts is not None:
        assert found[0] == texts[0]
        assert found[1] > 15
