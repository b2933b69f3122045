"""Rounds before the first request: all kinds of them run, through the engines as requests do, and leave nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint, make_draft
from pipelines import Reference, configuration, make_llm, prompt_of, tokens_of

from trtrun import SamplingParams
from trtrun.api.llm_engine import LLMEngine
from trtrun.core.nouns import RoundPlan
from trtrun.rounds.solo_ranks import SoloRanks
from trtrun.scheduling.limits import SchedulerLimits
from trtrun.start import policies, warm_up_rounds
from trtrun.start.job_spec import JobSpec
from trtrun.start.policies import count_first_rounds

METHODS: dict[str, dict[str, Any]] = {
    "none": {"method": "none"},
    "draft": {"draft_len": 3},
    "draft_probs": {"draft_len": 3, "use_logits": True},
    "ngram": {"method": "ngram", "draft_len": 3},
    "suffix": {"method": "suffix", "draft_len": 3},
    "token_recycling": {"method": "token_recycling", "draft_len": 3, "token_recycling_nodes": 7},
    "lookahead": {"method": "lookahead", "lookahead_config": [3, 3, 2]},
    "trees": {"method": "ngram", "draft_len": 3, "max_paths": 2},
}


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[RoundPlan]:
    """All that are published in one process."""
    found: list[RoundPlan] = []
    publish = SoloRanks.publish

    def logged(ranks: SoloRanks, plan: RoundPlan) -> None:
        found.append(plan)
        publish(ranks, plan)

    monkeypatch.setattr(SoloRanks, "publish", logged)
    return found


@pytest.mark.parametrize("max_rows", [1, 3])
@pytest.mark.parametrize("name", METHODS)
def test_rounds_of_every_kind_are_practised_and_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plans: list[RoundPlan], name: str, max_rows: int
) -> None:
    """As on a GPU, where they are run for the first use of what they run."""
    monkeypatch.setattr(policies, "_uses_gpus", lambda config: True)
    monkeypatch.setattr(policies, "measure_round_costs", lambda *_: None)
    target = make_checkpoint(tmp_path / "target", "LlamaForCausalLM", seed=1)
    draft = make_draft(tmp_path / "draft", target, 1) if name.startswith("draft") else None
    settings = {"speculation": METHODS[name], "scheduler": {"max_batch_size": max_rows, "max_num_tokens": 200}}
    with make_llm(target, draft, **settings) as llm:
        config = configuration(target, draft, **settings)
        limits = SchedulerLimits.of(config, 2048, 2048 if draft else None, 9)
        assert count_first_rounds(config, limits) == (len(plans) - 1, 0, 0), "the last plan drops rows"
        drafted = 0 if name == "none" else 3
        kinds = [admission.sampling for plan in plans for admission in plan.admissions if admission.row == 0]
        assert len({(kind.temperature, kind.top_k, kind.top_p) for kind in kinds}) == 3, "greedy, sampled, cut"
        assert {kind.is_greedy for kind in kinds if kind.guided} == {True, False}, "and guided"
        assert {max(plan.draft_lens, default=0) for plan in plans} == set(range(drafted + 1))
        first, *others = plans
        assert [chunk.length for chunk in first.prefill] == [200], "a prompt that fills a round"
        assert any(chunk.is_last for plan in others for chunk in plan.prefill) == (max_rows > 1)
        held = set[int]()
        for plan in plans:
            held = held - {*plan.dropped_rows} | {admission.row for admission in plan.admissions}
        assert not held, "ranks keep no row of them"
        prompts = [prompt_of(length, seed=length) for length in (5, 17, 30)]
        found = [tokens for (tokens,) in tokens_of(llm.generate(prompts, SamplingParams(max_tokens=12)))]
        llm.check_idle()
    reference = Reference(target)
    assert found == [reference.greedy(prompt, 12) for prompt in prompts]


@pytest.mark.parametrize(
    ("changes", "length"),
    [
        ({}, 2000),
        ({"prompt_tile": 64}, 1984),
        ({"most_chunk": 100, "prompt_tile": 64}, 64),
        ({"most_chunk": 40, "prompt_tile": 64}, 40),
        ({"draft_max_seq_len": 501}, 500),
        ({"max_num_tokens": 99999, "max_seq_len": 99999}, 4096),
    ],
)
def test_a_prompt_that_fills_a_round_is_one_that_rounds_read(
    tmp_path: Path, changes: dict[str, int], length: int
) -> None:
    settings = {"scheduler": {"max_num_tokens": 2000}}
    limits = SchedulerLimits.of(configuration(make_checkpoint(tmp_path, seed=1), None, **settings), 9000, None, 9)
    assert warm_up_rounds._longest_prompt(replace(limits, **changes)) == length


@pytest.mark.parametrize(("max_rows", "max_tokens"), [(1, 64), (9, 512)])
def test_rounds_that_are_measured_are_counted_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plans: list[RoundPlan], max_rows: int, max_tokens: int
) -> None:
    monkeypatch.setattr(warm_up_rounds, "_MOST_SECONDS", 1e9)
    target = make_checkpoint(tmp_path / "target", "LlamaForCausalLM", seed=1)
    draft = make_draft(tmp_path / "draft", target, 1)
    scheduler = {"max_batch_size": max_rows, "max_num_tokens": max_tokens}
    settings: dict[str, Any] = {"speculation": {"draft_len": 4, "pacing": "measured"}, "scheduler": scheduler}
    with make_llm(target, draft, **settings):
        config = configuration(target, draft, **settings)
        limits = SchedulerLimits.of(config, 2048, 2048, 9)
        assert count_first_rounds(config, limits) == (0, len(plans) - 1, 0)
    assert {len(plan.decode_rows) for plan in plans[:-1]} == ({1, 4, 9} if max_rows > 1 else {1})


@pytest.mark.parametrize("is_awaited", [False, True])
def test_a_start_that_requests_wait_for_practises_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plans: list[RoundPlan], is_awaited: bool
) -> None:
    monkeypatch.setattr(policies, "_uses_gpus", lambda config: True)
    config = configuration(make_checkpoint(tmp_path / "target", seed=1), None, speculation={"method": "none"})
    engine = LLMEngine.open(JobSpec(config, is_awaited=is_awaited))
    assert engine is not None and bool(plans) != is_awaited
    engine.close()
