"""An EAGLE head of either kind, a DFlash or a DSpark head over the ranks of a split target: its layers cut as the
target's, drafts the same on every rank, and the papers'."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from dflash_heads import check_proposals as check_dflash
from dflash_heads import dflash, fitted_dflash, make_dflash, write_dflash
from eagle3_heads import check_proposals, check_trees, eagle3, fitted, make_head, write_head
from eagle_heads import eagle, fitted_eagle, make_eagle_head, write_eagle_head
from jobs import HERE, configuration, prompts, run_job, sampling
from medusa_heads import Proposals
from meeting import meet
from mpi4py import MPI
from pipelines import tokens_of

from trtrun import LLM, SamplingParams
from trtrun.speculation.drafters.eagle import EagleDrafter

pytestmark = pytest.mark.mpi
SPLIT = [name for name, devices in HERE.items() if not devices[0] and len(devices[1]) > 1]
SIMPLE = [SamplingParams(max_tokens=10, seed=index, temperature=0.9 * (index % 2)) for index in range(6)]
DYNAMIC = {"eagle_topk": 3, "max_total_draft_tokens": 9, "draft_len": 4}
STATIC = {"eagle_choices": [[0], [1], [0, 0], [1, 0], [0, 1], [1, 0, 0]]}
KINDS: dict[str, tuple[Callable[..., Any], ...]] = {
    "eagle": (partial(make_eagle_head, features=768), fitted_eagle, write_eagle_head, eagle),
    "eagle3": (partial(make_head, boundaries=(0, 1, 2)), fitted, write_head, eagle3),
    "dflash": (partial(make_dflash, boundaries=(0, 1)), fitted_dflash, write_dflash, dflash),
    "dspark": (
        partial(make_dflash, layout="dspark", boundaries=(1, 0)),
        fitted_dflash,
        write_dflash,
        partial(dflash, "dspark"),
    ),
}
"""By method how a head is made, taught texts and written, and the method's section."""


def use(llm: LLM) -> tuple[list[Any], float]:
    return tokens_of(llm.generate(prompts(), sampling())), llm.statistics()["num_accepted_draft_tokens"]


def use_simply(llm: LLM) -> list[Any]:
    return tokens_of(llm.generate(prompts(), SIMPLE))


def sections_of(name: str, dtype: str) -> dict[str, Any]:
    """Few blocks, so that rows are preempted, and few tokens a round, so that prompts come in chunks."""
    return {
        "devices": HERE[name],
        "dtype": dtype,
        "scheduler": {"max_batch_size": 4, "max_num_tokens": 48, "plans_ahead": 1},
        "kv_cache": {"max_tokens": 160, "block_size": 8},
    }


@cache
def plain_texts(folder: Path, name: str, dtype: str) -> Any:
    """What rows say without a head, at rank 0. Collective, the first time."""
    plain = run_job(configuration(folder / "target", None, **sections_of(name, dtype)), use)
    return None if plain is None else plain[0]


@pytest.mark.parametrize(
    ("method", "layout", "shape", "dtype", "options"),
    [
        (
            "eagle3",
            "speculators",
            {"num_tokens": 131, "hidden_size": 48, "num_kv_heads": 1, "norm_before_fc": True},
            "float32",
            {},
        ),
        ("eagle3", "specforge", {"biases": True, "num_layers": 2}, "bfloat16", {}),
        ("eagle3", "prefixed", {"num_tokens": 131, "num_layers": 2}, "float32", DYNAMIC),
        ("eagle", "reference", {"num_kv_heads": 1, "biases": True, "own_embedding": True}, "float32", {}),
        ("eagle", "vllm", {"num_layers": 2}, "bfloat16", DYNAMIC),
        ("eagle", "reference", {"fc_bias": False}, "float32", STATIC),
        ("dflash", "speculators", {"layout": "speculators", "num_tokens": 131, "num_kv_heads": 1}, "float32", {}),
        ("dspark", "dspark", {}, "float32", {}),
    ],
)
@pytest.mark.parametrize("name", SPLIT)
def test_texts_are_plain_decodings_on_a_split_target(
    folder: Path,
    name: str,
    method: str,
    layout: str,
    shape: dict[str, Any],
    dtype: str,
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows that are sampled, penalised, preempted, with chunks of prompts beside them; then, in float32, simpler ones,
    whose drafts are compared with the reference's."""
    seen = Proposals(monkeypatch, EagleDrafter)
    target, path = folder / "target", folder / f"{method} {layout} {dtype}"
    make, teach, write, section = KINDS[method]
    sections = sections_of(name, dtype)
    plain = plain_texts(folder, name, dtype)
    head = make(target, **shape)
    if plain is not None:
        texts = [[*prompt, *text] for prompt, found in zip(prompts(), plain, strict=True) for text in found]
        head = teach(head, target, texts)
        write(path, head, layout, target)
    meet()
    speculative = configuration(target, None, heads=path, speculation=section(**options), **sections)
    found = run_job(speculative, use)
    proposed = MPI.COMM_WORLD.gather(seen.seen)
    proposed_paths = MPI.COMM_WORLD.gather(seen.paths)
    if plain is not None and found is not None:
        assert proposed is not None and proposed_paths is not None
        assert found[0] == plain and found[1] >= 20
        drafting = [of_rank for of_rank in proposed if of_rank]
        assert len(drafting) == len(HERE[name][1]) and all(one == drafting[0] for one in drafting)
        of_ranks = [of_rank for of_rank in proposed_paths if of_rank]
        assert all(one == of_ranks[0] for one in of_ranks)
    if dtype != "float32":
        return
    seen.seen.clear()
    seen.paths.clear()
    run_job(speculative, use_simply)
    simple, paths = MPI.COMM_WORLD.gather(seen.seen), MPI.COMM_WORLD.gather(seen.paths)
    if simple is not None and paths is not None:
        seen.seen = next(of_rank for of_rank in simple if of_rank)
        if options:
            seen.paths = next(of_rank for of_rank in paths if of_rank)
            assert check_trees(seen, target, head, options) > 15
        else:
            check = check_proposals if method.startswith("eagle") else check_dflash
            assert check(seen, target, head) > 20
