"""An EAGLE-3 head in whole runs: no text depends on it, and its store holds what the paper says, whatever the row, the
batch, and what of a prompt was there before."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint
from eagle3_heads import Eagle3, check_proposals, eagle3, fitted, make_head, write_head
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
from own_kv_format import own_kv_format
from pipelines import configuration, make_llm, prompt_of, tokens_of

from launch.jobs.placement.memory import JobMemory
from trtrun import LLM, SamplingParams
from trtrun.engine.heads.stored_heads import StoredHeads
from trtrun.scheduling.planning import MOST_MISSED_ROUNDS
from trtrun.scheduling.scheduler import Scheduler
from trtrun.speculation.drafters import running_heads
from trtrun.speculation.drafters.eagle import EagleDrafter
from trtrun.start import engine_maker
from trtrun.start.job_spec import JobSpec

COUNT = 30
SAMPLING = mixed_sampling(COUNT)
SCHEDULER = {"max_batch_size": 3, "max_num_tokens": 40}
BOUNDARIES = (1, 2, 3)
"""Of a target of four layers."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("eagle3") / "target", seed=1, num_hidden_layers=4)


@pytest.fixture(scope="module")
def plain(target: Path) -> list[list[tuple[int, ...]]]:
    """The target's own texts."""
    return plain_tokens(target, SAMPLING)


@pytest.fixture(scope="module")
def head(target: Path, plain: list[list[tuple[int, ...]]]) -> Eagle3:
    """A head that knows the texts by and large, and 150 of the target's 199 tokens."""
    return fitted(make_head(target, boundaries=BOUNDARIES, num_tokens=150), target, whole_texts(plain))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, target: Path, head: Eagle3) -> Path:
    return write_head(tmp_path_factory.mktemp("head"), head, "specforge", target)


@pytest.mark.parametrize(
    ("dtype", "block_size", "plans_ahead", "options"),
    [("bfloat16", 16, 0, {}), ("float32", 8, 1, WITH_TEXTS)],
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
    check_texts(target, folder, eagle3(**options), settings, SAMPLING, least_accepted=60, with_texts=bool(options))


@pytest.mark.parametrize(("plans_ahead", "with_graphs"), [(0, False), (1, True)])
def test_the_store_is_right_whatever_befell_the_row(
    target: Path, folder: Path, head: Eagle3, plans_ahead: int, with_graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every draft is the reference's, which has no store: of rows that were preempted, that share blocks with others,
    and that part from them at a block's end, where what is kept depends on the token behind it. Graphs are played, for
    rows that are greedy; all are made at the start."""
    if with_graphs:
        monkeypatch.setattr(engine_maker, "capture_for", lambda device: lambda work: work)
    common, length = prompt_of(24, seed=9), 16
    others = [[*common[:length], token, *prompt_of(12, seed=token)] for token in (5, 6, 7)]
    prompts = [[*common, *prompt_of(9, seed=1)], [*common, 8, 9], *others, common, common[: length + 1]]
    temperature = 0.0 if with_graphs else 0.9
    sampling = [
        SamplingParams(max_tokens=14 + 2 * index, seed=index, temperature=temperature * (index % 2))
        for index in range(7)
    ]
    seen = Proposals(monkeypatch, EagleDrafter)
    settings: dict[str, Any] = {
        "speculation": eagle3(draft_len=3),
        "scheduler": {"max_batch_size": 3, "max_num_tokens": 30, "plans_ahead": plans_ahead},
        "kv_cache": {"max_tokens": 80, "block_size": 8},
    }
    with make_llm(target, heads=folder, **settings) as llm:
        heads = llm.engine.orchestrator._ranks._worker.drafter._heads
        made, replayed = heads.num_graphs, count_replays(heads, monkeypatch)
        calls = (slice(0, 1), slice(1, 2), slice(2, 7))
        outputs = [output for call in calls for output in llm.generate(prompts[call], sampling[call])]
        assert heads.num_graphs == made and (len(replayed) > 100 if with_graphs else made == 0)
    of_all = [one.statistics for output in outputs for one in output.completions]
    # Of the last block that tokens alone would find, the last place is another's, as the token behind it is.
    assert [one.num_cached_prompt_tokens for one in of_all][1:5] == [16, 8, 8, 8]
    assert sum(one.num_preemptions for one in of_all) > 0
    assert check_proposals(seen, target, head) > 50


def count_replays(heads: StoredHeads, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Shapes of the graphs that are replayed from now on."""
    shapes, graphs = list[Any](), heads._graphs
    if graphs is not None:
        ready = graphs._ready
        monkeypatch.setattr(graphs, "_ready", lambda shape, *others: (shapes.append(shape), ready(shape, *others))[1])
    return shapes


def test_rows_that_are_not_drafted_are_not_fed_and_their_blocks_are_theirs(
    target: Path, folder: Path, head: Eagle3, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drafted row reuses no block that the head has not written; one that is not drafted takes any."""
    fed: list[int] = []
    original = StoredHeads.feed

    def feed(heads: StoredHeads, parts: Any, context: int) -> Any:
        fed.append(sum(part.tokens.numel() for part in parts))
        return original(heads, parts, context)

    monkeypatch.setattr(StoredHeads, "feed", feed)
    seen = Proposals(monkeypatch, EagleDrafter)
    prompt = prompt_of(33, seed=2)
    undrafted, drafted = SamplingParams(max_tokens=8, draft_len=0), SamplingParams(max_tokens=8)
    settings: dict[str, Any] = {"scheduler": SCHEDULER, "kv_cache": {"block_size": 8}}
    with make_llm(target, heads=folder, speculation=eagle3(draft_len=3), **settings) as llm:

        def cached(sampling: SamplingParams) -> int:
            (one,) = llm.generate([prompt], sampling)[0].completions
            return one.statistics.num_cached_prompt_tokens

        fed.clear()
        assert cached(undrafted) == 0 and not fed
        assert cached(drafted) == 0 and sum(fed) >= 33
        assert cached(drafted) == 32
        assert cached(undrafted) == 32
        llm.generate([prompt, prompt_of(5), prompt_of(9)], [undrafted, drafted, undrafted])
        llm.set_speculation(False)
        fed.clear()
        llm.generate([prompt, prompt_of(5)], drafted)
        assert not fed
        llm.set_speculation(True)
        assert cached(drafted) == 0
    assert check_proposals(seen, target, head) > 10


def test_rows_whose_numbers_overflow_leave_nothing_behind_in_the_heads_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts of the rows beside them and after them are the reference's."""
    target = make_overflowing(tmp_path / "target", num_hidden_layers=7)
    head = make_head(target)
    folder = write_head(tmp_path / "head", head, "reference", target)
    seen = Proposals(monkeypatch, EagleDrafter)
    generate_beside_overflow(target, folder, eagle3(draft_len=3), SCHEDULER)
    seen.seen = [one for one in seen.seen if POISON not in one[0]]
    assert check_proposals(seen, target, head) > 15


def test_where_drafts_do_not_pay_rows_are_left_and_are_fed_no_more(
    target: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row that is followed is left behind so many rounds without a draft as a draft engine may sit out."""
    fed, schedule = list[int](), Scheduler.schedule

    def feed(heads: StoredHeads, parts: Any, context: int, original: Any = StoredHeads.feed) -> Any:
        fed.append(sum(part.tokens.numel() for part in parts))
        return original(heads, parts, context)

    prompt = prompt_of(20, seed=3)
    with make_llm(target, heads=folder, speculation=eagle3(draft_len=3), scheduler=SCHEDULER) as llm:
        monkeypatch.setattr(StoredHeads, "feed", feed)
        monkeypatch.setattr(Scheduler, "schedule", lambda self, *_, **named: schedule(self, 0, drafts_pay=True))
        expected = tokens_of(llm.generate([prompt], SamplingParams(max_tokens=60)))
        assert sum(fed) == 20 + 59, "its drafts might pay again"
        fed.clear()
        pays = iter([True] * 3)  # so that it is followed
        monkeypatch.setattr(
            Scheduler, "schedule", lambda self, *_, **named: schedule(self, 0, drafts_pay=next(pays, False))
        )
        assert tokens_of(llm.generate([prompt], SamplingParams(max_tokens=60))) == expected
        assert MOST_MISSED_ROUNDS <= len(fed) <= MOST_MISSED_ROUNDS + 2
        llm.check_idle()


def test_a_head_knows_more_than_chance(tmp_path: Path, target: Path, folder: Path) -> None:
    accepted = []
    chance = write_head(tmp_path / "chance", make_head(target, boundaries=BOUNDARIES), "reference", target)
    for path in (chance, folder):
        with make_llm(target, heads=path, speculation=eagle3(), scheduler=SCHEDULER) as llm:
            llm.generate(PROMPTS[:5], SAMPLING[:5])
            accepted.append(llm.statistics()["num_accepted_draft_tokens"])
    assert accepted[1] > 3 * accepted[0]


def test_sampled_rows_choose_with_the_targets_random_numbers(
    target: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts that ignore them are accepted less often."""
    sampling = [SamplingParams(max_tokens=COUNT, seed=index, ignore_eos=True, temperature=1.0) for index in range(5)]
    accepted = []
    for coupled in (True, False):
        if not coupled:
            monkeypatch.setattr(running_heads, "distributions_of", likeliest_of)
        with make_llm(target, heads=folder, speculation=eagle3(), scheduler=SCHEDULER) as llm:
            llm.generate(PROMPTS[:5], sampling)
            accepted.append(llm.statistics()["num_accepted_draft_tokens"])
    assert accepted[0] > accepted[1]


class Likeliest:
    """In the place of distributions."""

    def __init__(self, logits: Any) -> None:
        self._logits = logits

    def choose(self, stream: Any) -> Any:
        return self._logits.argmax(dim=2)


def likeliest_of(sampling: Any, logits: Any, *others: Any) -> Any:
    return Likeliest(logits)


def test_stop_sequences_and_drafts_that_came_with_requests(target: Path, folder: Path) -> None:
    """A draft that comes with a request is proposed in the head's place, and the head goes on where it ends."""
    asked = [
        SamplingParams(max_tokens=COUNT, seed=index, temperature=0.9 * (index % 2)) for index in range(len(PROMPTS))
    ]
    with make_llm(target) as llm:
        texts = tokens_of(llm.generate(PROMPTS, asked))
        stopping = [replace(one, stop_sequences=(text[20:22],)) for one, (text,) in zip(asked, texts, strict=True)]
        stopped = tokens_of(llm.generate(PROMPTS, stopping))
    assert any(len(text) < COUNT for (text,) in stopped)
    scheduler = {"max_batch_size": 8, "max_num_tokens": 400}
    with make_llm(target, heads=folder, speculation=eagle3(), scheduler=scheduler) as llm:
        assert tokens_of(llm.generate(PROMPTS, stopping)) == stopped
        llm.reset_statistics()
        given = [
            replace(one, draft_token_ids=(*text[:20], 5, *text[21:])) for one, (text,) in zip(asked, texts, strict=True)
        ]
        assert tokens_of(llm.generate(PROMPTS, given)) == texts
        with_drafts = llm.statistics()
        llm.reset_statistics()
        assert tokens_of(llm.generate(PROMPTS, asked)) == texts
        assert with_drafts["num_rounds"] < llm.statistics()["num_rounds"]


def test_rounds_that_draft_less_or_nothing_leave_the_store_whole(
    target: Path, folder: Path, head: Eagle3, plain: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of different draft lengths in one batch, some of none; and pacing."""
    own = [replace(one, draft_len=index % 5) for index, one in enumerate(SAMPLING)]
    with make_llm(target, heads=folder, speculation=eagle3(pacing="measured"), scheduler=SCHEDULER) as llm:
        assert llm.config.is_paced
        assert tokens_of(llm.generate(PROMPTS, own)) == plain
    few = [SamplingParams(max_tokens=16, draft_len=index % 4, seed=index) for index in range(len(PROMPTS))]
    seen = Proposals(monkeypatch, EagleDrafter)
    with make_llm(target, heads=folder, speculation=eagle3(draft_len=3), scheduler=SCHEDULER) as llm:
        llm.generate(PROMPTS, few)
    assert {draft_len for *_, draft_len in seen.seen} >= {0, 1, 2, 3}
    assert check_proposals(seen, target, head) > 30


@pytest.mark.parametrize("kv_format", ["auto", "rounded"])
def test_plans_and_ranks_count_the_same_bytes(target: Path, folder: Path, kv_format: str) -> None:
    """Of the head's weights and of its store, which has the format of the target's."""
    with own_kv_format():
        cache = {"dtype": kv_format}
        config = configuration(target, None, heads=folder, speculation=eagle3(), kv_cache=cache)
        memory = JobMemory.read(JobSpec(config))
        without = JobMemory.read(JobSpec(configuration(target, None, kv_cache=cache)))
        with LLM(config=config) as llm:
            (rank,) = llm.report.ranks
            llm.generate(PROMPTS[:5], SAMPLING[:5])
            assert llm.statistics()["num_accepted_draft_tokens"] > 0
        drafted, whole = memory.shard_bytes(0)
        assert rank.shard_bytes == drafted + whole and drafted > 0
        assert rank.kv_bytes % memory.demand(0).bytes_per_block == 0
        # One layer beside the target's four, with as many heads of the same size.
        assert 4 * memory.demand(0).bytes_per_block == 5 * without.demand(0).bytes_per_block
        assert rank.working_bytes == memory.working_bytes(0) > without.working_bytes(0)


@needs_gpu
def test_texts_are_plain_decodings_on_a_gpu(tmp_path: Path) -> None:
    """And graphs draft as well as steps one by one, for greedy rows and sampled ones."""
    own = {"seed": 1, "head_dim": 64, "max_position_embeddings": 2048, "num_hidden_layers": 7}
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
    texts = whole_texts(found)
    own_head = fitted(make_head(gpu_target, head_dim=64), gpu_target, texts)
    path = write_head(tmp_path / "head", own_head, "reference", gpu_target)
    accepted = []
    for cuda_graphs in (True, False):
        with make_llm(gpu_target, heads=path, speculation=eagle3(), cuda_graphs=cuda_graphs, **settings) as llm:
            assert tokens_of(llm.generate(PROMPTS, SAMPLING)) == found
            assert llm.statistics()["num_accepted_draft_tokens"] > 60
            llm.reset_statistics()
            assert tokens_of(llm.generate(PROMPTS[:5], sampled)) == alike
            accepted.append(llm.statistics()["num_accepted_draft_tokens"])
    assert 0.8 < accepted[0] / accepted[1] < 1.25
