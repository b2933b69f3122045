"""An EAGLE head on a rank of its own: texts are plain decoding's, and what it proposes is what the paper says, as it is
told what the target computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from eagle3_heads import check_proposals, check_trees
from jobs import HERE, configuration, prompts, run_job, sampling
from medusa_heads import Proposals
from mpi4py import MPI
from pipelines import tokens_of
from test_split_eagle import DYNAMIC, KINDS, SIMPLE, STATIC

from trtrun import LLM
from trtrun.speculation.drafters.eagle_apart import ApartEagleDrafter

pytestmark = pytest.mark.mpi
APART = [name for name, (draft, target) in HERE.items() if len(draft) == 1 and not {*draft} & {*target}]
TIGHT: dict[str, Any] = {
    "scheduler": {"max_batch_size": 4, "max_num_tokens": 48, "plans_ahead": 1},
    "kv_cache": {"max_tokens": 128, "block_size": 8},
}
"""Few tokens a round, so that prompts come in chunks, and few blocks, so that rows are preempted."""


def use(llm: LLM) -> dict[str, Any]:
    """All kinds of rows, and some prompts once more."""
    outputs = [*llm.generate(prompts(), sampling()), *llm.generate(prompts()[2:4], SIMPLE[2:4])]
    completions = [completion.statistics for output in outputs for completion in output.completions]
    return {
        "texts": tokens_of(outputs),
        "preempted": sum(statistics.num_preemptions for statistics in completions),
        "cached": sum(statistics.num_cached_prompt_tokens for statistics in completions),
        "accepted": llm.statistics()["num_accepted_draft_tokens"],
    }


def use_simply(llm: LLM) -> list[Any]:
    """Rows whose drafts are compared with the reference's."""
    return tokens_of(llm.generate(prompts(), SIMPLE))


@pytest.mark.parametrize(
    ("method", "layout", "shape", "dtype", "options"),
    [
        ("eagle3", "specforge", {"num_tokens": 131}, "float32", {}),
        ("eagle3", "reference", {"num_layers": 2, "biases": True}, "bfloat16", {}),
        ("eagle", "reference", {}, "float32", {}),
        ("eagle3", "prefixed", {"num_tokens": 131}, "float32", DYNAMIC),
        ("eagle", "vllm", {}, "bfloat16", STATIC),
    ],
)
@pytest.mark.parametrize("name", APART)
def test_texts_are_plain_decodings_and_drafts_the_papers(
    folder: Path,
    name: str,
    method: str,
    layout: str,
    shape: dict[str, Any],
    dtype: str,
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows that are sampled, penalised, preempted, with chunks of prompts beside them; then simpler ones."""
    seen = Proposals(monkeypatch, ApartEagleDrafter)
    target, path = folder / "target", folder / f"apart {method} {layout} {dtype}"
    make, teach, write, section = KINDS[method]
    sections: dict[str, Any] = {"devices": HERE[name], "dtype": dtype, **TIGHT}
    plain_section = {"method": "draft_target", "draft_len": 1, "ahead": "off"}
    plain = run_job(configuration(target, folder / "noisy", speculation=plain_section, **sections), use)
    head = make(target, **shape)
    if plain is not None:
        taught = zip([*prompts(), *prompts()[2:4]], plain["texts"], strict=True)
        head = teach(head, target, [[*prompt, *text] for prompt, found in taught for text in found])
        write(path, head, layout, target)
    MPI.COMM_WORLD.barrier()
    apart = configuration(target, None, heads=path, heads_apart=True, speculation=section(**options), **sections)
    found = run_job(apart, use)
    ranks_that_draft = MPI.COMM_WORLD.gather(bool(seen.seen))
    if plain is not None and found is not None:
        assert found["texts"] == plain["texts"] and found["accepted"] >= 20
        assert found["preempted"] and found["cached"]
        assert ranks_that_draft == [rank == 1 for rank in range(MPI.COMM_WORLD.size)]
    if dtype != "float32":
        return
    seen.seen.clear()
    seen.paths.clear()
    run_job(apart, use_simply)
    drafted = MPI.COMM_WORLD.gather((seen.seen, seen.paths))
    if drafted is not None:
        seen.seen, seen.paths = drafted[1]
        if options:
            assert check_trees(seen, target, head, options) > 15
        else:
            assert check_proposals(seen, target, head) > 20
