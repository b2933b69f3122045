"""Draft trees of an EAGLE-3 head in whole runs: node for node what the papers say, and no text depends on them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint
from eagle3_heads import Eagle3, check_trees, eagle3, fitted, make_head, write_head
from gpus import needs_gpu
from medusa_heads import Proposals
from mixed_rows import POISON, PROMPTS, check_texts, make_overflowing, mixed_sampling, plain_tokens, whole_texts
from pipelines import configuration, make_llm, prompt_of, tokens_of

from launch.jobs.placement.memory import JobMemory
from trtrun import LLM, SamplingParams
from trtrun.memory import memory_requirements
from trtrun.speculation import head_trees
from trtrun.speculation.drafters.eagle import EagleDrafter
from trtrun.start import engine_maker
from trtrun.start.job_spec import JobSpec

COUNT = 30
SAMPLING = mixed_sampling(COUNT)
STATIC: dict[str, Any] = {
    "eagle_choices": [
        [0],
        [1],
        [0, 0],
        [2],
        [2, 0],
        [0, 1],
        [2, 0, 1],
        [0, 1, 0],
        [2, 0, 0],
        [2, 0, 1, 0],
        [0, 1, 0, 1],
    ]
}
DYNAMIC: dict[str, Any] = {"eagle_topk": 3, "max_total_draft_tokens": 10, "draft_len": 4}
SCHEDULER = {"max_batch_size": 3, "max_num_tokens": 90}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("trees") / "target", seed=1, num_hidden_layers=4)


@pytest.fixture(scope="module")
def plain(target: Path) -> list[list[tuple[int, ...]]]:
    """The target's own texts."""
    return plain_tokens(target, SAMPLING)


@pytest.fixture(scope="module")
def head(target: Path, plain: list[list[tuple[int, ...]]]) -> Eagle3:
    """A head of two layers that knows the texts by and large, and 150 of the target's 199 tokens."""
    return fitted(make_head(target, boundaries=(1, 2, 3), num_tokens=150, num_layers=2), target, whole_texts(plain))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, target: Path, head: Eagle3) -> Path:
    return write_head(tmp_path_factory.mktemp("head"), head, "specforge", target)


@pytest.mark.parametrize(
    ("dtype", "block_size", "plans_ahead", "options"),
    [
        ("float32", 2, 1, DYNAMIC),
        ("bfloat16", 4, 0, {"eagle_choices": "mc_sim_7b_63"}),
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
    check_texts(target, folder, eagle3(**options), settings, SAMPLING, least_accepted=130)


@pytest.mark.parametrize(("plans_ahead", "with_graphs", "options"), [(0, False, STATIC), (1, True, DYNAMIC)])
def test_nodes_are_the_references_whatever_befell_the_row(
    target: Path,
    folder: Path,
    head: Eagle3,
    plans_ahead: int,
    with_graphs: bool,
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of rows that are greedy and sampled, that were preempted, that share blocks, and whose accepted tokens were on
    any path. Graphs, which feed nodes and accepted tokens, are played; all are made at the start."""
    if with_graphs:
        monkeypatch.setattr(engine_maker, "capture_for", lambda device: lambda work: work)
    common = prompt_of(24, seed=9)
    prompts = [[*common, *prompt_of(9, seed=1)], [*common, 8, 9], *PROMPTS[:4], common]
    sampling = [
        SamplingParams(max_tokens=14 + 2 * index, seed=index, temperature=0.9 * (index % 2)) for index in range(7)
    ]
    seen = Proposals(monkeypatch, EagleDrafter)
    settings: dict[str, Any] = {
        "speculation": eagle3(**options),
        "scheduler": {**SCHEDULER, "plans_ahead": plans_ahead},
        "kv_cache": {"max_tokens": 64, "block_size": 8},
    }
    with make_llm(target, heads=folder, **settings) as llm:
        heads = llm.engine.orchestrator._ranks._worker.drafter._heads
        made = heads.num_graphs
        outputs = llm.generate(prompts, sampling)
        assert heads.num_graphs == made and bool(made) == with_graphs
    of_all = [one.statistics for output in outputs for one in output.completions]
    assert sum(one.num_preemptions for one in of_all) > 0
    assert sum(one.num_accepted_draft_tokens for one in of_all) > 15
    assert check_trees(seen, target, head, options) > 40


def test_trees_keep_more_than_chains(target: Path, folder: Path) -> None:
    kept = []
    for options in ({"draft_len": 4}, STATIC, DYNAMIC):
        with make_llm(target, heads=folder, speculation=eagle3(**options), scheduler=SCHEDULER) as llm:
            llm.generate(PROMPTS[:6], SAMPLING[:6])
            kept.append(llm.statistics()["num_accepted_draft_tokens"] / llm.statistics()["num_rounds"])
    assert min(kept[1:]) > 1.2 * kept[0]


@pytest.mark.parametrize(
    ("penalty", "options"), [(1.0, STATIC), (1.02, DYNAMIC)], ids=["at once", "node by node, by bounds"]
)
def test_sampled_rows_rank_with_the_targets_random_numbers(
    target: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, penalty: float, options: dict[str, Any]
) -> None:
    """Drafts that ignore them are accepted less often."""
    own = {"ignore_eos": True, "temperature": 1.0, "repetition_penalty": penalty}
    sampling = [SamplingParams(max_tokens=COUNT, seed=index, **own) for index in range(5)]
    accepted, best = list[float](), head_trees._best
    for coupled in (True, False):
        if not coupled:
            monkeypatch.setattr(head_trees, "_best", lambda found, *others: best(Likeliest(found.processed), *others))
        with make_llm(target, heads=folder, speculation=eagle3(**options), scheduler=SCHEDULER) as llm:
            llm.generate(PROMPTS[:5], sampling)
            accepted.append(llm.statistics()["num_accepted_draft_tokens"])
    assert accepted[0] > accepted[1]


class Likeliest:
    """In the place of distributions."""

    def __init__(self, processed: Any) -> None:
        self._processed = processed[:, 0]

    def rank(self, count: int) -> Any:
        return self._processed.topk(count).indices

    def scores(self) -> Any:
        return self._processed


@pytest.mark.parametrize("options", [STATIC, DYNAMIC])
def test_penalties_look_at_each_nodes_own_way(
    target: Path, folder: Path, head: Eagle3, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """Nodes are the reference's, which penalises what stands on their way."""
    seen, penalty = Proposals(monkeypatch, EagleDrafter), 1.7
    sampling = [
        SamplingParams(max_tokens=12, seed=index, temperature=0.8 * (index % 2), repetition_penalty=penalty)
        for index in range(6)
    ]
    with make_llm(target, heads=folder, speculation=eagle3(**options), scheduler=SCHEDULER) as llm:
        llm.generate(PROMPTS[:6], sampling)
    assert check_trees(seen, target, head, options, penalty) > 20


@pytest.mark.parametrize("options", [STATIC, DYNAMIC])
def test_stop_sequences_and_drafts_that_came_with_requests(target: Path, folder: Path, options: dict[str, Any]) -> None:
    """A draft that comes with a request is a path of the tree, and the head goes on where it ends."""
    asked = [
        SamplingParams(max_tokens=COUNT, seed=index, temperature=0.9 * (index % 2)) for index in range(len(PROMPTS))
    ]
    with make_llm(target) as llm:
        texts = tokens_of(llm.generate(PROMPTS, asked))
        stopping = [replace(one, stop_sequences=(text[20:22],)) for one, (text,) in zip(asked, texts, strict=True)]
        stopped = tokens_of(llm.generate(PROMPTS, stopping))
    scheduler = {"max_batch_size": 8, "max_num_tokens": 400}
    with make_llm(target, heads=folder, speculation=eagle3(**options), scheduler=scheduler) as llm:
        assert tokens_of(llm.generate(PROMPTS, stopping)) == stopped
        rounds = []
        for given in (texts, [((),)] * len(texts)):
            llm.reset_statistics()
            own = [replace(one, draft_token_ids=tuple(text)) for one, (text,) in zip(asked, given, strict=True)]
            assert tokens_of(llm.generate(PROMPTS, own)) == texts
            rounds.append(llm.statistics()["num_rounds"])
        depth = llm.config.draft_len
        # Each round of a draft that is right gains the depth of the tree, and one token more.
        assert rounds[0] <= -(-COUNT // (depth + 1)) + 4 < rounds[1]


@pytest.mark.parametrize("options", [STATIC, DYNAMIC])
def test_rounds_that_draft_less_or_nothing_leave_the_store_whole(
    target: Path,
    folder: Path,
    head: Eagle3,
    plain: list[Any],
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows of different draft lengths in one batch, some of none, some that are not followed; and pacing."""
    own = [replace(one, draft_len=index % 5) for index, one in enumerate(SAMPLING)]
    speculation = eagle3(pacing="measured", **options)
    with make_llm(target, heads=folder, speculation=speculation, scheduler=SCHEDULER) as llm:
        assert llm.config.is_paced
        assert tokens_of(llm.generate(PROMPTS, own)) == plain
    few = [SamplingParams(max_tokens=16, draft_len=index % 4, seed=index) for index in range(len(PROMPTS))]
    seen = Proposals(monkeypatch, EagleDrafter)
    with make_llm(target, heads=folder, speculation=eagle3(**options), scheduler=SCHEDULER) as llm:
        llm.generate(PROMPTS, few)
    assert {wanted for *_, wanted in seen.seen} >= {0, 1, 2, 3}
    assert check_trees(seen, target, head, options) > 20


def test_rows_whose_numbers_overflow_leave_nothing_behind_in_the_trees_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are drafted for once before it is known. Drafts of rows in their place after them are the reference's."""
    options = {"eagle_topk": 3, "max_total_draft_tokens": 20, "draft_len": 6}
    path = make_overflowing(tmp_path / "target", num_hidden_layers=7)
    head = make_head(path)
    folder = write_head(tmp_path / "head", head, "reference", path)
    prompts = [[token if token != POISON else 8 for token in prompt_of(5 + index, seed=index)] for index in range(9)]
    settings: dict[str, Any] = {
        "speculation": eagle3(**options),
        "scheduler": {**SCHEDULER, "plans_ahead": 1},
        "kv_cache": {"block_size": 4, "enable_block_reuse": False},
    }
    seen = Proposals(monkeypatch, EagleDrafter)
    sampling = SamplingParams(max_tokens=6, logit_bias={POISON: -100.0})
    with make_llm(path, heads=folder, **settings) as llm:
        outputs = llm.generate([*([*prompt_of(5 + index), POISON] for index in range(3)), *prompts], sampling)
        assert [output.error is None for output in outputs] == [False] * 3 + [True] * 9
    poisoned = [POISON in text for text, *_ in seen.seen]
    assert sum(poisoned) >= 3
    seen.seen, seen.paths = (
        [one for one, is_out in zip(of_all, poisoned, strict=True) if not is_out] for of_all in (seen.seen, seen.paths)
    )
    assert check_trees(seen, path, head, options, banned=POISON) > 25


@pytest.mark.parametrize("options", [STATIC, DYNAMIC])
def test_plans_and_ranks_count_the_same_bytes(
    target: Path, folder: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of blocks for trees, too, in the target's store and in the head's."""
    config = configuration(target, None, heads=folder, speculation=eagle3(**options), scheduler=SCHEDULER)
    memory = JobMemory.read(JobSpec(config))
    space = memory_requirements.head_space(config, 0)
    with LLM(config=config) as llm:
        (rank,) = llm.report.ranks
        llm.generate(PROMPTS[:5], SAMPLING[:5])
        store: Any = llm.engine.orchestrator._ranks._worker.drafter._heads._store
        assert rank.kv_bytes == (next(store.parts())[0].shape[2] - space.num_blocks) * memory.demand(0).bytes_per_block
    assert rank.working_bytes == memory.working_bytes(0)
    # Two blocks, of parents and of nodes, for each node that is fed at once; the head has two of six layers.
    assert space.num_blocks == 2 * 3 * (3 if options is DYNAMIC else 2) * space.blocks_per_path
    monkeypatch.setattr(memory_requirements, "head_space", lambda *_: replace(space, most_fed=0))
    without = JobMemory.read(JobSpec(config)).working_bytes(0)
    assert 6 * (rank.working_bytes - without) == 2 * space.num_blocks * memory.demand(0).bytes_per_block


@needs_gpu
@pytest.mark.parametrize("options", [{"eagle_choices": "mc_sim_7b_63"}, DYNAMIC])
def test_texts_are_plain_decodings_on_a_gpu(tmp_path: Path, options: dict[str, Any]) -> None:
    own = {"seed": 1, "head_dim": 64, "max_position_embeddings": 2048, "num_hidden_layers": 7}
    gpu_target = make_checkpoint(tmp_path / "target", **own)
    settings: dict[str, Any] = {
        "devices": ((), ("cuda:0",)),
        "dtype": "bfloat16",
        "scheduler": {"max_batch_size": 6, "max_num_tokens": 512},
    }
    with make_llm(gpu_target, **settings) as llm:
        found = tokens_of(llm.generate(PROMPTS, SAMPLING))
    own_head = fitted(make_head(gpu_target, head_dim=64), gpu_target, whole_texts(found))
    path = write_head(tmp_path / "head", own_head, "reference", gpu_target)
    accepted = []
    for speculation in (eagle3(draft_len=4), eagle3(**options)):
        with make_llm(gpu_target, heads=path, speculation=speculation, **settings) as llm:
            assert tokens_of(llm.generate(PROMPTS, SAMPLING)) == found
            accepted.append(llm.statistics()["num_accepted_draft_tokens"] / llm.statistics()["num_rounds"])
    assert accepted[1] > accepted[0]
