"""DFlash and DSpark heads in whole runs: no text depends on them, and their store holds what it should, whatever the
row, the batch, and what of a prompt was there before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint
from dflash_heads import DFlash, check_proposals, dflash, fitted_dflash, make_dflash, write_dflash
from gpus import needs_gpu
from medusa_heads import Proposals
from mixed_rows import (
    POISON,
    PROMPTS,
    WITH_TEXTS,
    check_texts,
    generate_beside_overflow,
    make_overflowing,
    mixed_sampling,
    plain_tokens,
    whole_texts,
)
from pipelines import make_llm, prompt_of, tokens_of

from trtrun import SamplingParams
from trtrun.speculation.drafters.dflash import DFlashDrafter

COUNT = 24
SAMPLING = mixed_sampling(COUNT)
SCHEDULER = {"max_batch_size": 3, "max_num_tokens": 40}
LAYOUTS = ("speculators", "speculators dspark")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("dflash") / "target", seed=1, num_hidden_layers=5)


@pytest.fixture(scope="module")
def texts(target: Path) -> list[list[int]]:
    """The target's own."""
    return whole_texts(plain_tokens(target, SAMPLING))


@pytest.fixture(scope="module")
def heads(target: Path, texts: list[list[int]]) -> dict[str, DFlash]:
    """One of each kind that knows the texts by and large, and 150 of the target's 199 tokens."""
    return {layout: fitted_dflash(make_dflash(target, layout, num_tokens=150), target, texts[:5]) for layout in LAYOUTS}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, target: Path, heads: dict[str, DFlash]) -> dict[str, Path]:
    return {layout: write_dflash(tmp_path_factory.mktemp("head"), heads[layout], layout, target) for layout in LAYOUTS}


@pytest.mark.parametrize(
    ("layout", "dtype", "block_size", "plans_ahead", "options"),
    [
        ("speculators", "bfloat16", 16, 0, {}),
        ("speculators dspark", "float32", 2, 1, {}),
        ("speculators", "float32", 8, 1, WITH_TEXTS),
    ],
)
def test_texts_are_plain_decodings(
    target: Path,
    folders: dict[str, Path],
    layout: str,
    dtype: str,
    block_size: int,
    plans_ahead: int,
    options: dict[str, Any],
) -> None:
    """Greedy and by seed, with penalties, bans and biases, in company, preempted, prefixes in use twice, prompts in
    chunks."""
    settings: dict[str, Any] = {
        "dtype": dtype,
        "scheduler": {**SCHEDULER, "plans_ahead": plans_ahead},
        "kv_cache": {"max_tokens": 112, "block_size": block_size},
    }
    section = dflash(layout, draft_len=3, **options)
    check_texts(target, folders[layout], section, settings, SAMPLING, least_accepted=40, with_texts=bool(options))


@pytest.mark.parametrize(("layout", "plans_ahead"), [(LAYOUTS[0], 1), (LAYOUTS[1], 0)])
def test_the_store_is_right_whatever_befell_the_row(
    target: Path,
    folders: dict[str, Path],
    heads: dict[str, DFlash],
    layout: str,
    plans_ahead: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every draft is the reference's, which has no store: of rows that were preempted, and that share blocks."""
    common = prompt_of(24, seed=9)
    prompts = [[*common, *prompt_of(9, seed=1)], [*common, 8, 9], common, [*common[:16], *prompt_of(12, seed=5)]]
    sampling = [
        SamplingParams(max_tokens=14 + 2 * index, seed=index, temperature=0.9 * (index % 2)) for index in range(4)
    ]
    seen = Proposals(monkeypatch, DFlashDrafter)
    settings: dict[str, Any] = {
        "speculation": dflash(layout, draft_len=4),
        "scheduler": {"max_batch_size": 3, "max_num_tokens": 30, "plans_ahead": plans_ahead},
        "kv_cache": {"max_tokens": 64, "block_size": 8},
    }
    with make_llm(target, heads=folders[layout], **settings) as llm:
        outputs = [
            output for call in (slice(0, 1), slice(1, 4)) for output in llm.generate(prompts[call], sampling[call])
        ]
    of_all = [one.statistics for output in outputs for one in output.completions]
    assert sum(one.num_cached_prompt_tokens for one in of_all) > 20
    assert sum(one.num_preemptions for one in of_all) > 0
    assert check_proposals(seen, target, heads[layout]) > 20


def test_rows_whose_numbers_overflow_leave_nothing_behind_in_the_heads_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts of the rows beside them and after them are the reference's."""
    target = make_overflowing(tmp_path / "target", num_hidden_layers=5)
    head = make_dflash(target, "speculators")
    head.tensors["lm_head.weight"][POISON] = 0  # so that none is drafted, which the rows are kept from
    folder = write_dflash(tmp_path / "head", head, "speculators", target)
    seen = Proposals(monkeypatch, DFlashDrafter)
    generate_beside_overflow(target, folder, dflash(draft_len=3), SCHEDULER)
    seen.seen = [one for one in seen.seen if POISON not in one[0]]
    assert check_proposals(seen, target, head) > 15


@needs_gpu
@pytest.mark.parametrize("layout", LAYOUTS)
def test_texts_are_plain_decodings_on_a_gpu(tmp_path: Path, layout: str) -> None:
    own = {"seed": 1, "head_dim": 64, "max_position_embeddings": 2048, "num_hidden_layers": 5}
    target = make_checkpoint(tmp_path / "target", **own)
    settings: dict[str, Any] = {
        "devices": ((), ("cuda:0",)),
        "dtype": "bfloat16",
        "scheduler": {"max_batch_size": 6, "max_num_tokens": 512},
    }
    with make_llm(target, **settings) as llm:
        found = tokens_of(llm.generate(PROMPTS, SAMPLING))
    head = fitted_dflash(make_dflash(target, layout, head_dim=64), target, whole_texts(found)[:5])
    path = write_dflash(tmp_path / "head", head, layout, target)
    with make_llm(target, heads=path, speculation=dflash(layout, draft_len=3), **settings) as llm:
        assert tokens_of(llm.generate(PROMPTS, SAMPLING)) == found
        assert llm.statistics()["num_accepted_draft_tokens"] > 40
