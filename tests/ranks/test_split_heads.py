"""Medusa's heads over the ranks of a split target: matrices cut over the vocabulary, drafts the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from jobs import HERE, configuration, prompts, run_job, sampling
from medusa_heads import SHARED, fitted, make_heads, write_heads
from meeting import meet
from mpi4py import MPI
from pipelines import tokens_of

from trtrun import LLM
from trtrun.core.nouns import Draft, RoundPlan
from trtrun.speculation.drafters.medusa import MedusaDrafter

pytestmark = pytest.mark.mpi
SPLIT = [name for name, devices in HERE.items() if not devices[0] and len(devices[1]) > 1]


def use(llm: LLM) -> tuple[list[Any], float]:
    return tokens_of(llm.generate(prompts(), sampling())), llm.statistics()["num_accepted_draft_tokens"]


def sections_of(name: str, dtype: str) -> dict[str, Any]:
    """Few blocks, so that rows are preempted."""
    return {
        "devices": HERE[name],
        "dtype": dtype,
        "scheduler": {"max_batch_size": 4, "max_num_tokens": 300, "plans_ahead": 1},
        "kv_cache": {"max_tokens": 160, "block_size": 8},
    }


@cache
def plain_texts(folder: Path, name: str, dtype: str) -> Any:
    """What rows say without heads, at rank 0. Collective, the first time."""
    plain = run_job(configuration(folder / "target", None, **sections_of(name, dtype)), use)
    return None if plain is None else plain[0]


@pytest.mark.parametrize(
    ("layout", "choices", "dtype", "fewest"),
    [
        ("fasterdecoding", None, "float32", 20),
        ("vllm", "mc_sim_7b_63", "bfloat16", 40),
        ("version 2", [[0], [1], [0, 0]], "float32", 0),
    ],
)
@pytest.mark.parametrize("name", SPLIT)
def test_texts_are_plain_decodings_on_a_split_target(
    folder: Path, name: str, layout: str, choices: Any, dtype: str, fewest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that are sampled, penalised, preempted, with prompts beside them."""
    proposed: list[Any] = []
    original = MedusaDrafter.propose

    def propose(drafter: MedusaDrafter, plan: RoundPlan, probability_rows: Sequence[int]) -> Draft:
        draft = original(drafter, plan, probability_rows)
        proposed.append((plan.round_index, draft.tokens.tolist(), draft.draft_lens.tolist()))
        return draft

    monkeypatch.setattr(MedusaDrafter, "propose", propose)
    target, path = folder / "target", folder / f"{layout} {dtype}"
    plain = plain_texts(folder, name, dtype)
    if plain is not None:
        texts = [[*prompt, *text] for prompt, found in zip(prompts(), plain, strict=True) for text in found]
        heads = make_heads(target, shared=layout in SHARED)
        write_heads(path, heads if layout in SHARED else fitted(heads, target, texts), layout)
    meet()
    speculation = {"method": "medusa"} | ({} if choices is None else {"medusa_choices": choices})
    sections = sections_of(name, dtype)
    found = run_job(configuration(target, None, heads=path, speculation=speculation, **sections), use)
    every = MPI.COMM_WORLD.gather(proposed)
    if plain is not None and found is not None:
        assert found[0] == plain and found[1] >= fewest
        drafting = [of_rank for of_rank in every if of_rank]
        assert len(drafting) == len(HERE[name][1]) and all(one == drafting[0] for one in drafting)
