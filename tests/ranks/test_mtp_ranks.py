"""MTP heads over the ranks of a split target, and on a rank of their own, also ahead of verdicts: texts are plain
decoding's, and drafts what the layer of transformers says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from eagle3_heads import check_proposals
from family_checkpoints import write_family
from jobs import HERE, SIZE, alone, configuration, prompts, run_job
from medusa_heads import Proposals
from meeting import meet
from mpi4py import MPI
from mtp_heads import MTPHead
from test_split_eagle import use, use_simply

from trtrun.speculation.drafters.eagle import EagleDrafter

pytestmark = pytest.mark.mpi
CASES = [("no draft, 2", "qwen3_5_text"), ("no draft, 2", "glm4_moe"), ("1+1", "qwen3_5_moe_text")]
TIGHT: dict[str, Any] = {
    "scheduler": {"max_batch_size": 4, "max_num_tokens": 48, "plans_ahead": 1},
    "kv_cache": {"max_tokens": 160, "block_size": 8},
}
"""Few tokens a round, so that prompts come in chunks, and few blocks, so that rows are preempted."""


def plain_texts(target: Path, name: str) -> Any:
    """What rows say without a head, at rank 0. Collective."""
    if name == "1+1":
        one = configuration(target, None, devices=((), ("cpu:0",)), dtype="bfloat16", **TIGHT)
        return alone(one, use)[0] if MPI.COMM_WORLD.rank == 0 else None
    plain = run_job(configuration(target, None, devices=HERE[name], dtype="bfloat16", **TIGHT), use)
    return None if plain is None else plain[0]


@pytest.mark.parametrize(("name", "family"), CASES if SIZE == 3 else [])
def test_texts_are_plain_decodings_and_drafts_the_layers(
    folder: Path, name: str, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16 with a layer that knows some texts by heart; then, in float32, drafts of simpler rows."""
    target = folder / f"mtp {name} {family}"
    if MPI.COMM_WORLD.rank == 0:
        write_family(target, family, seed=1, dtype=torch.bfloat16)
    meet()
    plain, head = plain_texts(target, name), None
    if plain is not None:
        head = MTPHead(target)
        head.learn(target, [[*prompt, *found[0]] for prompt, found in zip(prompts()[:4], plain[:4], strict=True)])
        head.write(target)
    meet()
    drafts_from = target if name == "1+1" else None
    for dtype, ahead in (("bfloat16", "auto"), ("bfloat16", "on"), ("float32", "off")):
        if name != "1+1" and ahead == "on":
            continue
        section = {"method": "mtp", "draft_len": 3, "ahead": ahead}
        own = {"heads": drafts_from, "heads_apart": name == "1+1", "devices": HERE[name], "dtype": dtype}
        own["expert_parallel"] = family == "glm4_moe"
        config = configuration(target, None, speculation=section, **own, **TIGHT)
        with monkeypatch.context() as patch:
            seen = Proposals(patch, EagleDrafter)
            found = run_job(config, use if dtype == "bfloat16" else use_simply)
        proposed = MPI.COMM_WORLD.gather(seen.seen)
        if found is None:
            continue
        assert proposed is not None and head is not None
        drafting = [of_rank for of_rank in proposed if of_rank]
        if dtype == "float32":
            seen.seen = drafting[0]
            assert name != "1+1" or [bool(of_rank) for of_rank in proposed] == [False, True, False]
            assert check_proposals(seen, target, head) > 20
        else:
            assert found[0] == plain and found[1] >= 15, (found[1], ahead)
            if name != "1+1":
                assert len(drafting) == 2 and drafting[0] == drafting[1]
