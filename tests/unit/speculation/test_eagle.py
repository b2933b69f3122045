"""A head of EAGLE-1 in whole runs, in chains and in the trees of EAGLE-2: no text depends on it, and its store holds
what the papers say, whatever the row, the batch, and what of a prompt was there before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint
from eagle3_heads import check_proposals, check_trees
from eagle_heads import Eagle, eagle, fitted_eagle, make_eagle_head, write_eagle_head
from gpus import needs_gpu
from medusa_heads import Proposals
from mixed_rows import PROMPTS, WITH_TEXTS, check_texts, mixed_sampling, plain_tokens, whole_texts
from pipelines import configuration, make_llm, prompt_of, tokens_of

from launch.jobs.placement.memory import JobMemory
from trtrun import LLM, SamplingParams
from trtrun.speculation.drafters.eagle import EagleDrafter
from trtrun.start import engine_maker
from trtrun.start.job_spec import JobSpec

COUNT = 30
FEATURES = 768
"""Of a feed-forward layer that can learn as many tokens' successors by heart."""

SAMPLING = mixed_sampling(COUNT)
CHAIN: dict[str, Any] = {"draft_len": 3}
STATIC: dict[str, Any] = {"eagle_choices": [[0], [1], [0, 0], [2], [2, 0], [0, 1], [2, 0, 1], [0, 1, 0], [0, 1, 0, 1]]}
DYNAMIC: dict[str, Any] = {"eagle_topk": 3, "max_total_draft_tokens": 10, "draft_len": 4}
WIDE: dict[str, Any] = {"eagle_topk": 3, "max_total_draft_tokens": 26, "draft_len": 4}  # deep nodes are kept, too
SCHEDULER = {"max_batch_size": 3, "max_num_tokens": 90}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("eagle") / "target", seed=1)


@pytest.fixture(scope="module")
def head(target: Path) -> Eagle:
    """A head of two layers that knows most of the target's texts."""
    texts = whole_texts(plain_tokens(target, SAMPLING))
    return fitted_eagle(make_eagle_head(target, num_layers=2, features=FEATURES), target, texts[:6])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, target: Path, head: Eagle) -> Path:
    return write_eagle_head(tmp_path_factory.mktemp("head"), head, "reference", target)


@pytest.mark.parametrize(
    ("dtype", "block_size", "plans_ahead", "options"),
    [
        ("float32", 8, 1, WITH_TEXTS),
        ("float32", 2, 0, STATIC),
        ("bfloat16", 16, 1, {}),
        ("bfloat16", 4, 1, DYNAMIC),
    ],
)
def test_texts_are_plain_decodings(
    target: Path, folder: Path, dtype: str, block_size: int, plans_ahead: int, options: dict[str, Any]
) -> None:
    """Greedy and by seed, with penalties, bans and biases, in company, preempted, prefixes in use twice, prompts in
    chunks."""
    settings: dict[str, Any] = {
        "dtype": dtype,
        "scheduler": {**SCHEDULER, "plans_ahead": plans_ahead},
        "kv_cache": {"max_tokens": 112, "block_size": block_size},
    }
    with_texts = options is WITH_TEXTS
    check_texts(target, folder, eagle(**options), settings, SAMPLING, least_accepted=130, with_texts=with_texts)


@pytest.mark.parametrize(
    ("plans_ahead", "with_graphs", "options"),
    [(1, True, CHAIN), (0, True, STATIC), (1, False, WIDE)],
)
def test_drafts_are_the_references_whatever_befell_the_row(
    target: Path,
    folder: Path,
    head: Eagle,
    plans_ahead: int,
    with_graphs: bool,
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Which has no store: of rows that are greedy and sampled, that were preempted, that share blocks with others, and
    that part from them at a block's end, where what is kept depends on the token behind it. Graphs are played; all are
    made at the start."""
    if with_graphs:
        monkeypatch.setattr(engine_maker, "capture_for", lambda device: lambda work: work)
    common, length = prompt_of(24, seed=9), 16
    others = [[*common[:length], token, *prompt_of(12, seed=token)] for token in (5, 6, 7)]
    prompts = [[*common, *prompt_of(9, seed=1)], [*common, 8, 9], *others, common, common[: length + 1]]
    sampling = [
        SamplingParams(max_tokens=14 + 2 * index, seed=index, temperature=0.9 * (index % 2)) for index in range(7)
    ]
    seen = Proposals(monkeypatch, EagleDrafter)
    settings: dict[str, Any] = {
        "speculation": eagle(**options),
        "scheduler": {**SCHEDULER, "plans_ahead": plans_ahead},
        "kv_cache": {"max_tokens": 80, "block_size": 8},
    }
    with make_llm(target, heads=folder, **settings) as llm:
        heads = llm.engine.orchestrator._ranks._worker.drafter._heads
        made = heads.num_graphs
        calls = (slice(0, 1), slice(1, 2), slice(2, 7))
        outputs = [output for call in calls for output in llm.generate(prompts[call], sampling[call])]
        assert heads.num_graphs == made and bool(made) == with_graphs
    of_all = [one.statistics for output in outputs for one in output.completions]
    # Of the last block that tokens alone would find, the last place is another's, as the token behind it is.
    assert [one.num_cached_prompt_tokens for one in of_all][1:5] == [16, 8, 8, 8]
    assert sum(one.num_preemptions for one in of_all) > 0
    if options is CHAIN:
        assert check_proposals(seen, target, head) > 50
    else:
        assert check_trees(seen, target, head, options) > 40


def test_trees_keep_more_than_chains_and_both_more_than_chance(tmp_path: Path, target: Path) -> None:
    """With a head that is often wrong, but not by much."""
    chance = make_eagle_head(target, features=224)
    fair = fitted_eagle(chance, target, whole_texts(plain_tokens(target, SAMPLING)))
    paths = [
        write_eagle_head(tmp_path / f"head{place}", one, "vllm", target) for place, one in enumerate((chance, fair))
    ]
    kept = []
    for path, options in ((paths[0], {}), (paths[1], {}), (paths[1], WIDE)):
        with make_llm(target, heads=path, speculation=eagle(**options), scheduler=SCHEDULER) as llm:
            llm.generate(PROMPTS, SAMPLING)
            kept.append(llm.statistics()["num_accepted_draft_tokens"] / llm.statistics()["num_rounds"])
    assert kept[1] > 3 * kept[0] and kept[2] > 1.2 * kept[1]


def test_plans_and_ranks_count_the_same_bytes(target: Path, folder: Path) -> None:
    """Of the head's weights and of its store, of two layers as the target's."""
    config = configuration(target, None, heads=folder, speculation=eagle())
    memory = JobMemory.read(JobSpec(config))
    without = JobMemory.read(JobSpec(configuration(target, None)))
    with LLM(config=config) as llm:
        (rank,) = llm.report.ranks
        llm.generate(PROMPTS[:5], SAMPLING[:5])
    drafted, whole = memory.shard_bytes(0)
    assert rank.shard_bytes == drafted + whole and drafted > 0
    assert rank.kv_bytes % memory.demand(0).bytes_per_block == 0
    assert memory.demand(0).bytes_per_block == 2 * without.demand(0).bytes_per_block
    assert rank.working_bytes == memory.working_bytes(0) > without.working_bytes(0)


@needs_gpu
@pytest.mark.parametrize("options", [{}, {"eagle_choices": "mc_sim_7b_63"}, DYNAMIC])
def test_texts_are_plain_decodings_on_a_gpu(tmp_path: Path, options: dict[str, Any]) -> None:
    """And graphs draft as well as steps one by one, for greedy rows and sampled ones."""
    own = {"seed": 1, "head_dim": 64, "max_position_embeddings": 2048}
    gpu_target = make_checkpoint(tmp_path / "target", **own)
    settings: dict[str, Any] = {
        "devices": ((), ("cuda:0",)),
        "dtype": "bfloat16",
        "scheduler": {"max_batch_size": 6, "max_num_tokens": 512},
    }
    sampled = [SamplingParams(max_tokens=COUNT, seed=index, temperature=0.8, top_p=0.95) for index in range(5)]
    with make_llm(gpu_target, **settings) as llm:
        found = tokens_of(llm.generate(PROMPTS, SAMPLING))
        alike = tokens_of(llm.generate(PROMPTS[:5], sampled))
    own_head = fitted_eagle(make_eagle_head(gpu_target, head_dim=64, features=FEATURES), gpu_target, whole_texts(found))
    path = write_eagle_head(tmp_path / "head", own_head, "reference", gpu_target)
    accepted = []
    for cuda_graphs in (True, False):
        speculation = eagle(**options)
        with make_llm(gpu_target, heads=path, speculation=speculation, cuda_graphs=cuda_graphs, **settings) as llm:
            assert tokens_of(llm.generate(PROMPTS, SAMPLING)) == found
            assert llm.statistics()["num_accepted_draft_tokens"] > 60
            llm.reset_statistics()
            assert tokens_of(llm.generate(PROMPTS[:5], sampled)) == alike
            accepted.append(llm.statistics()["num_accepted_draft_tokens"])
    assert 0.8 < accepted[0] / accepted[1] < 1.25
