"""Layers with a sliding window, of whose blocks rows hold the window's alone: the texts of layers that keep all, what
is found again of prefixes, and how much is held."""

from __future__ import annotations

import io
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from family_checkpoints import write_family
from pipelines import configuration, make_llm, noisy_copy, prompt_of, tokens_of

from launch.jobs.mpi.job import Job
from launch.jobs.placement.memory import JobMemory
from launch.jobs.plan.plan import make_plan, print_plan
from trtrun import LLM, SamplingParams
from trtrun.configuration.config import RuntimeConfig
from trtrun.core.nouns import Request
from trtrun.errors import ConfigError
from trtrun.kvcache.segments import ContextGroup
from trtrun.memory.spaces import layers_in_places, window_rule
from trtrun.scheduling.limits import SchedulerLimits
from trtrun.scheduling.scheduler import Scheduler
from trtrun.start.job_spec import JobSpec

WINDOW = 48
ALL: dict[str, Any] = {
    "architecture": "MistralForCausalLM", "sliding_window": WINDOW, "num_hidden_layers": 2,
    "max_position_embeddings": 1024,
}  # fmt: skip
SOME: dict[str, Any] = {
    "architecture": "Qwen2ForCausalLM", "sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 1,
    "num_hidden_layers": 2, "max_position_embeddings": 1024,
}  # fmt: skip
SHARED: dict[str, Any] = {
    "model_type": "gemma4_small", "sliding_window": WINDOW, "max_position_embeddings": 1024,
}  # fmt: skip
CHAIN, TREE = {"draft_len": 3}, {"method": "ngram", "prompt_lookup_min": 1, "draft_len": 3, "max_paths": 3}
KEEPS_ALL = {"max_batch_size": 3, "max_num_tokens": 1024, "max_seq_len": 564}
"""Of a row that is no longer than a window of 48 tokens, a chunk of 512 and what is between."""


def has_rule(config: RuntimeConfig) -> bool:
    return window_rule(config, JobSpec(config).models) is not None


@pytest.mark.parametrize(
    ("kind", "name"),
    [(ALL, "plain"), (SOME, "int8"), (SHARED, "plain")],
    ids=["all layers", "some layers", "layers that share them"],
)
def test_texts_are_those_of_layers_that_keep_all(tmp_path: Path, kind: dict[str, Any], name: str) -> None:
    """Of prompts several times as long as a window, read in chunks, some of which begin alike; plain, with chains, with
    trees, after preemption; with block reuse on and off."""
    make = write_family if "model_type" in kind else make_checkpoint
    target = make(tmp_path / "target", seed=1, dtype=torch.bfloat16, **kind)  # type: ignore[operator]
    draft = noisy_copy(tmp_path / "draft", target, 0.02)
    longest = prompt_of(300, seed=500)
    prompts = [prompt_of(3), longest, prompt_of(130), longest[:250], prompt_of(60), prompt_of(47), longest]
    sampling = [
        SamplingParams(max_tokens=30, ignore_eos=True, seed=index, temperature=0.8 * (index % 2)) for index in range(7)
    ]
    texts, preempted, accepted, cached = [], 0, 0, []
    in_places = {**KEEPS_ALL, "max_num_tokens": 96}
    for scheduler, reuses, model, speculation in (
        (KEEPS_ALL, True, None, {}),
        (in_places, True, None, {}),
        (in_places, False, None, {}),
        (in_places, True, draft, CHAIN),
        (in_places, True, None, TREE),
    ):
        cache = {"max_tokens": 360, "block_size": 4, "enable_block_reuse": reuses, "dtype": name}
        settings: dict[str, Any] = {"scheduler": scheduler, "kv_cache": cache}
        assert has_rule(configuration(target, model, speculation=speculation, **settings)) is (scheduler is in_places)
        with make_llm(target, model, speculation=speculation, **settings) as llm:
            outputs = llm.generate(prompts, sampling)
            texts.append(tokens_of(outputs))
            statistics = [output.completions[0].statistics for output in outputs]
            preempted += sum(of_row.num_preemptions for of_row in statistics)
            cached.append(sum(of_row.num_cached_prompt_tokens for of_row in statistics) > 0)
            accepted += llm.statistics()["num_accepted_draft_tokens"]
            llm.check_idle()
    assert all(found == texts[0] for found in texts) and preempted and accepted > 100
    assert cached[2] is False


def cached_of(llm: LLM, prompt: Sequence[int], expected: dict[tuple[int, ...], Any], **asked: Any) -> list[int]:
    """Tokens of a prompt that are found again, by completion; its texts are those of `expected`, once these are
    there."""
    sampling = SamplingParams(max_tokens=8, ignore_eos=True, seed=3, temperature=0.7, **asked)
    output = llm.generate([list(prompt)], sampling)[0]
    texts = tokens_of([output])
    assert expected.setdefault((len(texts[0]), *prompt), texts) == texts
    return [completion.statistics.num_cached_prompt_tokens for completion in output.completions]


@pytest.mark.parametrize("window", [1, 48, 50])
def test_a_prefix_is_found_where_the_blocks_of_its_window_are(tmp_path: Path, window: int) -> None:
    """In places for two rows: the next turn of a chat, one prompt for many, the middle of an earlier one; and a prompt
    of which others have taken the places is read anew, and found then."""
    target = make_checkpoint(tmp_path / "target", seed=1, **{**ALL, "sliding_window": window})
    scheduler = {"max_batch_size": 2, "max_num_tokens": 40, "max_seq_len": 800}
    first, second = prompt_of(200, seed=1), prompt_of(300, seed=2)
    expected: dict[tuple[int, ...], Any] = {}
    with make_llm(target, scheduler=KEEPS_ALL, kv_cache={"enable_block_reuse": False}) as llm:
        answer = list(tokens_of(llm.generate([first], SamplingParams(max_tokens=20, ignore_eos=True)))[0][0])
        turn = [*first, *answer, *prompt_of(30, seed=3)]
        for prompt in (first, turn, [*first[:192], 5], second):
            cached_of(llm, prompt, expected)
        cached_of(llm, first, expected, n=4)
    settings: dict[str, Any] = {"scheduler": scheduler, "kv_cache": {"block_size": 4}}
    assert has_rule(configuration(target, None, **settings))
    with make_llm(target, **settings) as llm:
        assert tokens_of(llm.generate([first], SamplingParams(max_tokens=20, ignore_eos=True)))[0][0] == tuple(answer)
        assert cached_of(llm, turn, expected) == [216], "of 220 tokens, the last of which was never fed"
        assert cached_of(llm, first, expected, n=4) == [196] * 4
        assert cached_of(llm, [*first[:192], 5], expected) == [192]
        assert cached_of(llm, second, expected) == [0]
        for seed in range(3):
            llm.generate([prompt_of(300, seed=10 + seed)], SamplingParams(max_tokens=8, ignore_eos=True))
        lost = cached_of(llm, first, expected)
        assert lost == [0] if window > 1 else lost > [0], "all blocks are there, and of a window of 1 none is needed"
        assert cached_of(llm, first, expected) == [196]
        llm.check_idle()


def test_draft_and_target_with_different_windows_share_places(tmp_path: Path) -> None:
    """The longer window counts; an engine without windows keeps all, and its store follows the same tables."""
    models = {
        window: make_checkpoint(tmp_path / f"of {window}", seed=1, **{**ALL, "sliding_window": window})
        for window in (20, 48, None)
    }
    prompts, sampling = [prompt_of(250, seed=1), prompt_of(80, seed=2)], SamplingParams(max_tokens=40, ignore_eos=True)
    plain: dict[int | None, Any] = {}
    scheduler = {"max_batch_size": 2, "max_num_tokens": 64}
    for of_target, of_draft, layers in ((20, 48, (2, 2)), (48, None, (2, 0)), (None, 20, (0, 2))):
        if of_target not in plain:
            with make_llm(models[of_target], scheduler=KEEPS_ALL, kv_cache={"enable_block_reuse": False}) as llm:
                plain[of_target] = tokens_of(llm.generate(prompts, sampling))
        settings: dict[str, Any] = {"speculation": CHAIN, "scheduler": scheduler, "kv_cache": {"block_size": 4}}
        config = configuration(models[of_target], models[of_draft], **settings)
        found = [layers_in_places(config, JobSpec(config).models, role) or () for role in ("target", "draft")]
        assert tuple(of_role.count(True) for of_role in found) == layers
        rule = window_rule(config, JobSpec(config).models)
        assert rule is not None and rule.window == max(window for window in (of_target, of_draft) if window)
        with make_llm(models[of_target], models[of_draft], **settings) as llm:
            for _ in range(2):
                assert tokens_of(llm.generate(prompts, sampling)) == plain[of_target]
            llm.check_idle()


def long_job(tmp_path: Path, **changes: dict[str, Any]) -> RuntimeConfig:
    """A Gemma 3 with windows of 1024 tokens, for texts of 32,768, of which 8 tokens are drafted."""
    target = write_family(tmp_path / "gemma", "gemma3_text", sliding_window=1024, max_position_embeddings=32768)
    settings: dict[str, Any] = {
        "scheduler": {"max_batch_size": 4, "plans_ahead": 1},
        "kv_cache": {"max_tokens": None, "free_memory_fraction": 0.5},
        "speculation": {"method": "ngram", "draft_len": 8},
    }
    return configuration(
        target, None, **{name: {**of_name, **changes.get(name, {})} for name, of_name in settings.items()}
    )


def test_rows_of_32_000_tokens_hold_the_window_a_chunk_and_a_draft(tmp_path: Path) -> None:
    """Places are counted in each round, and `trtrun plan` says how many there are, at most."""
    config = long_job(tmp_path, kv_cache={"max_tokens": 65536})
    rule = window_rule(config, JobSpec(config).models)
    assert rule is not None and (rule.window, rule.chunk) == (1024, 2048)
    most = 1024 + 2048 + 2 * 9 + 2 * 16
    assert rule.blocks_per_row * 16 <= most and rule.blocks_beside * 16 <= most - 1024
    num_places = rule.blocks_per_row + 3 * rule.blocks_beside
    limits = SchedulerLimits(
        *(4, config.max_num_tokens, 32768, None, 8, 16, 9000),
        plans_ahead=0, most_chunk=rule.chunk, windows=rule, num_places=1 + num_places,
    )  # fmt: skip
    scheduler, held = Scheduler(limits), []
    prompts = [prompt_of(32000), prompt_of(32000, seed=1), prompt_of(32000)]
    for number, prompt in enumerate(prompts):
        scheduler.add(Request(number, tuple(prompt), SamplingParams(max_tokens=100, seed=0)))
    while (plan := scheduler.schedule()) is not None:
        held += [len(running.table.placed) for running in scheduler._batch.requests]
        scheduler.commit(plan, [1] * len(plan.sampled_rows), [[7]] * len(plan.sampled_rows))
    assert 3 * 1024 <= 16 * max(held) <= most
    assert scheduler.idle_is_whole()
    text = io.StringIO()
    with redirect_stdout(text):
        print_plan(make_plan(Job(config, ())), as_json=False)
    said, kept = " ".join(text.getvalue().split()), rule.blocks_per_row * 16
    assert (
        f"layers have windows, and hold at most {kept} tokens of each row; prompts are read in chunks of 2048" in said
    )
    assert f"layers with windows hold {16 * num_places} tokens of all rows together" in said


@pytest.mark.parametrize(
    ("positions", "window", "chunk"), [(32768, 128, 2048), (4096, 128, 1024), (2048, 64, 512), (8192, 4096, 2048)]
)
def test_a_chunk_is_a_round_or_a_part_of_the_longest_text(
    tmp_path: Path, positions: int, window: int, chunk: int
) -> None:
    """The longer it is, the less often weights are read for a prompt; of short texts rows would keep nearly all."""
    target = write_family(tmp_path / "m", "gemma3_text", sliding_window=window, max_position_embeddings=positions)
    config = configuration(target, None, kv_cache={"max_tokens": 65536}, scheduler={"max_batch_size": 4})
    rule = window_rule(config, JobSpec(config).models)
    assert rule is not None and rule.chunk == chunk


def test_memory_is_shared_between_blocks_and_places(tmp_path: Path) -> None:
    """Places for all rows, where these take no more than half of it, and for one row at least."""
    config = long_job(tmp_path)
    memory = JobMemory.read(JobSpec(config))
    rule = window_rule(config, memory.models)
    assert rule is not None
    demand = memory.demand(0)
    assert demand.bytes_per_place * 2 == demand.bytes_per_block * 3
    beside = demand.shard_bytes + demand.working_bytes
    of_row = (rule.blocks_per_row + 1) * demand.bytes_per_place

    def count(num_bytes: int) -> tuple[int, int]:
        return memory.count_blocks(0, beside + 2 * num_bytes, "rank 0")

    blocks, places = count(12 * of_row)
    assert places == rule.blocks_per_row + 3 * rule.blocks_beside + 1 < blocks
    blocks, places = count(4 * of_row)
    assert places == 2 * (rule.blocks_per_row + 1) and places * 3 // 2 - 1 <= blocks <= places * 3 // 2
    blocks, places = count(1000 * of_row)
    assert blocks == places > 4 * 2048, "all that rows can use; old places may be found again"
    with pytest.raises(ConfigError, match=r"does not hold the window of one row \(.*iB\) and a block of 16 tokens"):
        count(of_row)


def test_where_layers_with_windows_keep_all(tmp_path: Path) -> None:
    """Windows are as long as texts, or as the store; a draft with a tokenizer of its own does in any case."""
    target = make_checkpoint(tmp_path / "model", **{**ALL, "sliding_window": 64, "max_position_embeddings": 2048})
    for is_there, cache, scheduler in (
        (True, {}, {}),
        (True, {"enable_block_reuse": False}, {}),
        (False, {}, {"max_seq_len": 100}),
        (False, {"max_tokens": 512}, {}),
    ):
        config = configuration(target, None, kv_cache=cache, scheduler={"max_batch_size": 8, **scheduler})
        assert has_rule(config) is is_there
    config, found = configuration(target, target, kv_cache={"max_tokens": 4096}), []
    assert config.draft is not None
    for vocabulary in ("auto", "text"):
        job = config.model_copy(update={"draft": config.draft.model_copy(update={"vocabulary": vocabulary})})
        models = JobSpec(config).models
        found.append([layers_in_places(job, models, role) is not None for role in ("target", "draft")])
    assert found == [[True, True], [True, False]]


def test_a_window_shows_a_query_its_own_token_and_those_right_before_it() -> None:
    """Padding sees the first token alone."""
    positions = torch.tensor([[0, 5, 7], [2, -1, -1]])
    group = ContextGroup(None, torch.tensor([[1, 2], [3, 4]]), positions, block_size=4)
    seen = group.mask(3)[:, 0, 0] == 0
    assert [[of_query.nonzero().flatten().tolist() for of_query in of_row] for of_row in seen] == [
        [[0], [3, 4, 5], [5, 6, 7]],
        [[0, 1, 2], [0], [0]],
    ]
