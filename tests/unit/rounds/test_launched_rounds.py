"""Rounds that are launched before the verdict of the one before is read: on GPUs, and here as if the CPU were one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import ref

import pytest
import torch
from checkpoints import make_checkpoint, make_draft
from gpus import needs_gpu, needs_two_gpus
from pipelines import configuration, make_llm, prompt_of, tokens_of

from trtrun import SamplingParams
from trtrun.core.nouns import RoundPlan
from trtrun.rounds.launched_round import DecidedRound, LaunchedRound
from trtrun.rounds.round import Worker
from trtrun.rounds.solo_ranks import SoloRanks
from trtrun.start import job

GREEDY = SamplingParams(max_tokens=20)


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """("launched" or "finished", round) in the order of time."""
    found: list[tuple[str, int]] = []
    launch, finish = Worker.launch_round, DecidedRound.finish

    def launched(worker: Worker, plan: RoundPlan) -> LaunchedRound:
        found.append(("launched", plan.round_index))
        return launch(worker, plan)

    def finished(decided: DecidedRound) -> Any:
        report = finish(decided)
        found.append(("finished", report.round_index))
        return report

    monkeypatch.setattr(Worker, "launch_round", launched)
    monkeypatch.setattr(DecidedRound, "finish", finished)
    return found


@pytest.mark.parametrize("use_logits", [False, True])
def test_texts_are_the_same_however_rounds_are_launched(
    tmp_path: Path, events: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch, use_logits: bool
) -> None:
    """With preemption, sampling and log probabilities, speculative and plain."""
    target = make_checkpoint(tmp_path / "target", seed=1)
    draft = make_draft(tmp_path / "draft", target, 1)
    sections = {
        "speculation": {"draft_len": 3, "use_logits": use_logits},
        "scheduler": {"max_batch_size": 3, "max_num_tokens": 40, "plans_ahead": 1},
        "kv_cache": {"max_tokens": 96, "block_size": 8},
    }
    prompts = [prompt_of(length, seed=length) for length in (3, 20, 33, 8, 5)]
    sampling = [
        SamplingParams(max_tokens=30, seed=index, temperature=0.9 * (index % 2), logprobs=index or None)
        for index in range(len(prompts))
    ]
    found = []
    for launches_ahead in (False, True):
        make_ranks = partial(SoloRanks, launches_ahead=launches_ahead)
        monkeypatch.setattr(job, "SoloRanks", lambda worker, make=make_ranks, **_: make(worker))
        events.clear()
        with make_llm(target, draft, **sections) as llm:
            outputs = llm.generate(prompts, sampling)
            llm.check_idle()
            llm.set_speculation(False)
            plain = llm.generate(prompts, sampling)
        assert use_logits or tokens_of(plain) == tokens_of(outputs)
        logprobs = [[entry.logprob for entry in output.completions[0].logprobs or ()] for output in outputs]
        found.append((tokens_of(outputs), tokens_of(plain), logprobs))
        order = [number for kind, number in events if kind == "launched"]
        assert order == [number for kind, number in events if kind == "finished"] == list(range(len(order)))
        ahead = sum(events.index(("launched", one + 1)) < events.index(("finished", one)) for one in order[:-1])
        assert ahead == 0 if not launches_ahead else ahead > len(order) // 2
    assert found[0] == found[1]


def test_an_exception_between_launch_and_report_leaves_the_engine_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "SoloRanks", lambda worker, **_: SoloRanks(worker, launches_ahead=True))
    target = make_checkpoint(tmp_path / "target", seed=1)
    prompts = [prompt_of(length) for length in (4, 9)]
    with make_llm(target, None, scheduler={"plans_ahead": 1}) as llm:
        expected = tokens_of(llm.generate(prompts, SamplingParams(max_tokens=20)))
        with monkeypatch.context() as patch:
            finish, count = DecidedRound.finish, iter(range(100))

            def fail(decided: DecidedRound) -> Any:
                if next(count) == 7:
                    raise RuntimeError("out of luck")
                return finish(decided)

            patch.setattr(DecidedRound, "finish", fail)
            with pytest.raises(RuntimeError, match="out of luck"):
                llm.generate(prompts, SamplingParams(max_tokens=20))
        llm.check_idle()
        assert tokens_of(llm.generate(prompts, SamplingParams(max_tokens=20))) == expected


def test_what_a_gpu_writes_to_is_kept_until_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a round fails, those that are launched behind it have memory of the host to which kernels write."""
    kept: list[Any] = []

    class Launched:
        def finish(self) -> Any:
            raise RuntimeError("out of luck")

    def launch(plan: SimpleNamespace) -> Launched:
        launched = Launched()
        kept.append(ref(launched))
        return launched

    device = torch.device("cuda", 0)
    worker: Any = SimpleNamespace(device=device, phases=None, launch_round=launch, reset=lambda: None)
    ranks = SoloRanks(worker, launches_ahead=True)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    waited: list[bool] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: waited.append(kept[1]() is not None))
    for index in range(2):
        plan: Any = SimpleNamespace(round_index=index)
        ranks.publish(plan)
    with pytest.raises(RuntimeError, match="out of luck"):
        ranks.collect()
    ranks.reset()
    assert waited == [True] and kept[1]() is None


@pytest.mark.parametrize(
    ("devices", "chosen", "expected"),
    [(("cuda:0",), None, 1), (("cpu:0",), None, 0), (("n1/cuda:1",), None, 1), (("cuda:0",), 0, 0), (("cpu:0",), 1, 1)],
)
def test_gpus_get_a_plan_ahead_unless_told_otherwise(
    tmp_path: Path, devices: tuple[str, ...], chosen: int | None, expected: int
) -> None:
    sections = {} if chosen is None else {"scheduler": {"plans_ahead": chosen}}
    assert configuration(tmp_path, None, devices=((), devices), **sections).plans_ahead == expected


@needs_gpu
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    "speculation",
    [
        {"method": "none"},
        {"method": "draft_target"},
        {"method": "ngram", "prompt_lookup_min": 1, "draft_len": 3},
        {"method": "ngram", "prompt_lookup_min": 1, "draft_len": 3, "max_paths": 3},
    ],
)
def test_a_round_is_launched_without_waiting_for_the_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, speculation: dict[str, Any], temperature: float
) -> None:
    """Once its graphs are there: torch raises an error at whatever would wait."""
    target = make_checkpoint(tmp_path / "target", seed=1)
    drafted = speculation["method"] == "draft_target"
    draft = make_draft(tmp_path / "draft", target, 1) if drafted else None
    launch, steady = Worker.launch_round, []
    is_warm = False  # the start has rounds, too

    def strict(worker: Worker, plan: RoundPlan) -> LaunchedRound:
        if not is_warm:
            return launch(worker, plan)
        steady.append(plan.round_index)
        torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(worker, plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(Worker, "launch_round", strict)
    devices = (("cuda:0",) if drafted else (), ("cuda:0",))
    sampling = SamplingParams(max_tokens=40, temperature=temperature, top_p=0.9, seed=3)
    with make_llm(target, draft, devices=devices, speculation=speculation) as llm:
        expected = tokens_of(llm.generate([prompt_of(9)], sampling))
        is_warm = True
        assert tokens_of(llm.generate([prompt_of(9)], sampling)) == expected
    assert len(steady) > 5


@needs_two_gpus
def test_a_thread_whose_gpu_is_another_one_may_call(tmp_path: Path) -> None:
    target = make_checkpoint(tmp_path / "target", seed=1)
    with torch.cuda.device(0), make_llm(target, None, devices=((), ("cuda:1",))) as llm:
        expected = tokens_of(llm.generate([prompt_of(9)], GREEDY))
        with ThreadPoolExecutor(1) as pool:
            call = pool.submit(lambda: (torch.cuda.current_device(), tokens_of(llm.generate([prompt_of(9)], GREEDY))))
            assert call.result(timeout=60) == (0, expected)
