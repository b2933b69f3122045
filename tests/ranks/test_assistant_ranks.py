"""An assistant of Gemma 4 over the ranks of a split target, in whose keys and values it attends: texts are plain
decoding's, and drafts what the modules of transformers say, the same on both ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from assistant_heads import Assistant
from decoder_heads import check_drafts
from family_checkpoints import write_family
from jobs import HERE, SIZE, configuration, prompts, run_job
from medusa_heads import Proposals
from meeting import meet
from mpi4py import MPI
from test_split_eagle import use, use_simply

from trtrun.speculation.drafters.assistant import AssistantDrafter

pytestmark = pytest.mark.mpi
TIGHT: dict[str, Any] = {
    "devices": HERE.get("no draft, 2"),
    "scheduler": {"max_batch_size": 4, "max_num_tokens": 48, "plans_ahead": 1},
    "kv_cache": {"max_tokens": 160, "block_size": 8},
}
"""Few tokens a round, so that prompts come in chunks, and few blocks, so that rows are preempted."""


@pytest.mark.parametrize(("family", "ordered"), [("gemma4_small", False), ("gemma4_text", True)] if SIZE == 3 else [])
def test_texts_are_plain_decodings_and_drafts_the_modules(
    folder: Path, family: str, ordered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16 with an assistant that knows some texts by heart; then, in float32, drafts of simpler rows."""
    target, path = folder / f"of assistants {family}", folder / f"assistant {family}"
    if MPI.COMM_WORLD.rank == 0:
        write_family(target, family, seed=1, dtype=torch.bfloat16)
    meet()
    plain, head = run_job(configuration(target, None, dtype="bfloat16", **TIGHT), use), None
    if plain is not None:
        head = Assistant(target, ordered=ordered, centroid_intermediate_top_k=20)
        head.learn(target, [[*prompt, *found[0]] for prompt, found in zip(prompts()[:4], plain[0][:4], strict=True)])
        head.write(path, torch.bfloat16)
    meet()
    section = {"method": "mtp", "draft_len": 3}
    for dtype, rows in (("bfloat16", use), ("float32", use_simply)):
        config = configuration(target, None, heads=path, speculation=section, dtype=dtype, **TIGHT)
        with monkeypatch.context() as patch:
            seen = Proposals(patch, AssistantDrafter)
            found: Any = run_job(config, rows)
        proposed = MPI.COMM_WORLD.gather(seen.seen)
        if found is None or plain is None:
            continue
        assert proposed is not None and head is not None
        drafting = [of_rank for of_rank in proposed if of_rank]
        assert len(drafting) == 2 and drafting[0] == drafting[1]
        if dtype == "bfloat16":
            assert found[0] == plain[0] and found[1] >= 15, found[1]
        else:
            seen.seen = drafting[0]
            assert check_drafts(seen, target, head.draft) > 20
