"""Whole jobs over real ranks: every placement gives what transformers and a single process give.

Each test opens an LLM on all ranks of the running job, as a user's program would: rank 0 goes on with it, the others
serve inside the constructor until it is closed. test_job_waits_and_ends.py has what ranks do between calls and at the
end, test_job_failures.py the jobs that end badly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import make_checkpoint
from jobs import COUNT, HERE, LENGTHS, SIZE, alone, job_configuration, prompts, run_job, sampling
from meeting import from_rank_0
from mpi4py import MPI
from pipelines import Reference, configuration, run_alone, tokens_of

from trtrun import LLM, SamplingParams
from trtrun.configuration.topology import make_topology
from trtrun.core.nouns import RoundPlan
from trtrun.core.outputs import RequestOutput
from trtrun.rounds.launched_round import DecidedRound, LaunchedRound
from trtrun.rounds.round import Worker
from trtrun.wire.reports import ReportArrays

pytestmark = pytest.mark.mpi


@pytest.fixture(scope="module")
def greedy(folder: Path) -> list[tuple[int, ...]]:
    """transformers' greedy texts, at rank 0."""
    if MPI.COMM_WORLD.rank != 0:
        return []
    reference = Reference(folder / "target")
    return [reference.greedy(prompt, COUNT) for prompt in prompts()]


def logprobs_of(output: RequestOutput) -> list[float]:
    """Of the tokens of an output's first completion."""
    return [entry.logprob for entry in output.completions[0].logprobs or []]


def prompt_logprobs_of(output: RequestOutput) -> list[float]:
    """Of the tokens of an output's prompt but the first, and of the likeliest at their places."""
    entries = [entry for entry in output.prompt_logprobs or [] if entry is not None]
    return [value for entry in entries for value in (entry.logprob, *(other for _, other in entry.alternatives))]


def logits_of(outputs: list[RequestOutput]) -> tuple[np.ndarray, np.ndarray]:
    """[prompt, vocab] and [tokens, vocab] of the rows that ask for them, in float32."""
    context, generation = outputs[2].context_logits, outputs[3].completions[0].generation_logits
    assert context is not None and generation is not None
    assert (len(context), len(generation)) == (LENGTHS[2], len(outputs[3].completions[0].token_ids))
    return context, generation


@pytest.fixture(scope="module")
def in_one_process(folder: Path) -> Callable[[bool], list[RequestOutput]]:
    """Return ask(has_draft) -> what one process writes with `sampling()`; the one who asks waits for it once."""

    @cache
    def ask(has_draft: bool) -> list[RequestOutput]:
        devices = (("cpu:0",) if has_draft else (), ("cpu:0",))
        return alone(job_configuration(folder, devices), lambda llm: llm.generate(prompts(), sampling()))

    return ask


@pytest.mark.parametrize(
    ("name", "plans_ahead"), [*((name, 1) for name in HERE), *((name, 0) for name in HERE if name == "1+1")]
)
def test_every_placement_writes_what_transformers_and_one_process_write(
    folder: Path,
    greedy: list[tuple[int, ...]],
    in_one_process: Callable[[bool], list[RequestOutput]],
    name: str,
    plans_ahead: int,
) -> None:
    devices = HERE[name]
    scheduler = {"max_batch_size": 4, "max_num_tokens": 48, "plans_ahead": plans_ahead}

    def use(llm: LLM) -> list[Any]:
        texts = tokens_of(llm.generate(prompts(), SamplingParams(max_tokens=COUNT)))
        llm.set_speculation(False)
        plainly = llm.generate(prompts(), sampling())
        plain = tokens_of(plainly)
        llm.set_speculation(True)
        # One row decodes plainly beside the others, some have short drafts, and some bring drafts of their own.
        asked = sampling((None, 0, 3, 1, None, 2) if devices[0] else ())
        for row, right in ((0, COUNT), (2, COUNT // 2), (3, COUNT), (4, 1)):
            asked[row] = replace(asked[row], draft_token_ids=(*plain[row][0][:right], 5, 5, 5, 5))
        outputs = llm.generate(prompts(), asked)
        for logits, same in zip(logits_of(outputs), logits_of(plainly), strict=True):
            assert logits == pytest.approx(same, abs=1e-4)
        if devices[0]:
            counted = [output.completions[0].statistics for output in outputs]
            assert counted[1].num_draft_tokens == 0 and counted[0].num_rounds < 12
        return [texts, outputs, plain, llm.statistics(), llm.report]

    found = run_job(job_configuration(folder, devices, scheduler=scheduler), use)
    if found is None:
        return
    texts, outputs, plain, statistics, report = found
    assert [tokens for (tokens,) in texts] == greedy
    expected = in_one_process(bool(devices[0]))
    sampled = tokens_of(outputs)
    assert sampled == plain == tokens_of(expected)
    logprobs = logprobs_of(outputs[2])
    assert len(logprobs) == len(sampled[2][0])
    assert logprobs == pytest.approx(logprobs_of(expected[2]), abs=1e-4)
    of_prompt = prompt_logprobs_of(outputs[2])
    assert len(of_prompt) == 3 * (LENGTHS[2] - 1)
    assert of_prompt == pytest.approx(prompt_logprobs_of(expected[2]), abs=1e-4)
    for logits, same in zip(logits_of(outputs), logits_of(expected), strict=True):
        assert logits == pytest.approx(same, abs=1e-4)
    assert statistics["num_rounds"] > 0
    assert (statistics["num_accepted_draft_tokens"] > 20) == bool(devices[0])
    workers = [rank for rank in report.ranks if rank.shard_bytes]
    assert len(workers) == max(1, SIZE - 1)
    assert all(rank.bytes_read == rank.shard_bytes for rank in workers if len(devices[1]) == 1 == len(devices[0]))


@pytest.mark.parametrize("name", [name for name in HERE if name == "a+ab"])
def test_logits_of_two_target_ranks_are_the_same_bits_with_and_without_drafts(folder: Path, name: str) -> None:
    config = job_configuration(folder, HERE[name], dtype="bfloat16")

    def use(llm: LLM) -> tuple[list[RequestOutput], list[RequestOutput], int]:
        drafted = llm.generate(prompts(), sampling())
        num_accepted = llm.statistics()["num_accepted_draft_tokens"]
        llm.set_speculation(False)
        return drafted, llm.generate(prompts(), sampling()), num_accepted

    found = run_job(config, use)
    if found is None:
        return
    drafted, plain, num_accepted = found
    assert tokens_of(drafted) == tokens_of(plain) and num_accepted > 20
    for logits, same in zip(logits_of(drafted), logits_of(plain), strict=True):
        assert np.array_equal(logits, same)


@pytest.mark.parametrize("name", [name for name in HERE if name == "ab+ba"])
def test_a_round_is_launched_behind_one_whose_verdict_is_not_here(
    folder: Path, greedy: list[tuple[int, ...]], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on GPUs: the target leader takes the next plan while the device works, and reports in order."""
    launched: list[int] = []
    most, tries = [0], [0]
    launch, finish = Worker.launch_round, DecidedRound.finish

    def log_launch(worker: Worker, plan: RoundPlan) -> LaunchedRound:
        launched.append(plan.round_index)
        most[0] = max(most[0], len(launched))
        return launch(worker, plan)

    def log_finish(decided: DecidedRound) -> ReportArrays:
        report = finish(decided)
        assert launched.pop(0) == report.round_index
        tries[0] = 0
        return report

    monkeypatch.setattr(Worker, "launch_round", log_launch)
    monkeypatch.setattr(DecidedRound, "finish", log_finish)

    def is_done(decided: DecidedRound) -> bool:
        """Once the next plan is here, or where none comes after some tries of the wait."""
        tries[0] += 1
        return len(launched) > 1 or tries[0] > 40

    monkeypatch.setattr(DecidedRound, "is_done", is_done)
    found = run_job(
        job_configuration(folder, HERE[name]),
        lambda llm: [tokens_of(llm.generate(prompts(), SamplingParams(max_tokens=COUNT))) for _ in range(2)],
    )
    if MPI.COMM_WORLD.rank == make_topology(job_configuration(folder, HERE[name])).target_leader:
        assert most[0] == 2, "rounds of which no verdict was read"
    if found is not None:
        assert [tokens for (tokens,) in found[0]] == [tokens for (tokens,) in found[1]] == greedy


CACHED = {"suffix_decoding_max_cached_requests": 5, "suffix_decoding_max_cached_tokens": 99}
LOOKUPS: list[tuple[int, dict[str, Any]]] = [
    (0, {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}),
    (1, {"method": "token_recycling", "token_recycling_nodes": 10}),
    (1, {"method": "suffix", "max_paths": 2, "suffix_corpus": "corpus.jsonl", **CACHED}),
    (0, {"method": "lookahead", "lookahead_config": [3, 3, 2]}),
]
"""The first is looked up on every rank, the second on one that tells all others: on three target ranks that stands for
all."""


@pytest.fixture(scope="module")
def looked_up(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple[int, ...]]]:
    """A target that can be shared over two and three ranks, and, at rank 0, transformers' greedy texts of it."""
    path, texts = None, []
    if MPI.COMM_WORLD.rank == 0:
        sizes = {"num_attention_heads": 12, "num_key_value_heads": 12, "hidden_size": 96, "intermediate_size": 96}
        path = make_checkpoint(tmp_path_factory.mktemp("lookup") / "target", seed=1, num_hidden_layers=2, **sizes)
        (path / "corpus.jsonl").write_text("".join(f'{{"token_ids": {prompt}}}\n' for prompt in prompts()))
        reference = Reference(path)
        texts = [reference.greedy(prompt, COUNT) for prompt in prompts()]
    return from_rank_0(path), texts


@pytest.mark.mpi(min_size=3)
@pytest.mark.parametrize(("plans_ahead", "speculation"), {3: LOOKUPS, 4: LOOKUPS[1:2]}.get(SIZE, []))
def test_lookups_on_all_target_ranks_write_what_one_process_writes(
    looked_up: tuple[Path, list[tuple[int, ...]]], plans_ahead: int, speculation: dict[str, Any]
) -> None:
    """The target alone over as many ranks as there are, with rows that are preempted and prefilled in chunks."""
    target, texts = looked_up
    corpus = {"suffix_corpus": str(target / "corpus.jsonl")} if "suffix_corpus" in speculation else {}
    sections: dict[str, Any] = {
        "speculation": {"draft_len": 3, **speculation, **corpus},
        "scheduler": {"max_batch_size": 4, "max_num_tokens": 48, "plans_ahead": plans_ahead},
        "kv_cache": {"max_tokens": 104, "block_size": 8},
    }

    def use(llm: LLM) -> list[Any]:
        texts = tokens_of(llm.generate(prompts(), SamplingParams(max_tokens=COUNT)))
        outputs = llm.generate(prompts(), sampling())
        repeating = tokens_of(llm.generate(prompts(), SamplingParams(max_tokens=COUNT, frequency_penalty=-2.0)))
        accepted = llm.statistics()["num_accepted_draft_tokens"]
        preempted = sum(one.statistics.num_preemptions for output in outputs for one in output.completions)
        llm.check_idle()
        return [texts, tokens_of(outputs), repeating, accepted, preempted]

    slots = tuple(f"cpu:{index}" for index in range(SIZE - 1))
    found = run_job(configuration(target, None, devices=((), slots), **sections), use)
    if found is None:
        return
    assert [tokens for (tokens,) in found[0]] == texts
    assert found[:4] == alone(configuration(target, None, **sections), use)[:4]
    assert found[3] > 40 and found[4] > 0


@pytest.mark.parametrize("name", [name for name in ("ab+ba", "2+1") if name in HERE])
def test_a_quantized_draft_shared_over_ranks_loses_nothing(
    folder: Path, greedy: list[tuple[int, ...]], name: str
) -> None:
    def use(llm: LLM) -> Any:
        return tokens_of(llm.generate(prompts(), SamplingParams(max_tokens=COUNT))), llm.statistics()

    found = run_job(job_configuration(folder, HERE[name], quantization="int8"), use)
    if found is not None:
        texts, statistics = found
        assert [tokens for (tokens,) in texts] == greedy
        assert statistics["num_accepted_draft_tokens"] > 20


@pytest.mark.parametrize("name", [name for name in HERE if name == "a+ab"])
def test_a_rounded_target_shared_over_ranks_writes_its_plain_texts(folder: Path, name: str) -> None:
    def use(llm: LLM) -> Any:
        speculative = tokens_of(llm.generate(prompts(), SamplingParams(max_tokens=COUNT)))
        accepted = llm.statistics()["num_accepted_draft_tokens"]
        llm.set_speculation(False)
        return speculative, accepted, run_alone(llm, prompts(), [SamplingParams(max_tokens=COUNT)] * len(LENGTHS))

    found = run_job(job_configuration(folder, HERE[name], quantization="fp8", target_quantization="fp8"), use)
    if found is not None:
        speculative, accepted, plain = found
        assert speculative == plain
        assert accepted > 20


WITH_PROBS: dict[str, Any] = {
    "speculation": {"draft_len": 3, "use_logits": True},
    "kv_cache": {"max_tokens": 104, "block_size": 8},
}


def use_with_probs(llm: LLM) -> list[Any]:
    """The beginnings of greedy texts and of sampled ones, and how often rows were preempted."""
    texts = tokens_of(llm.generate(prompts(), SamplingParams(max_tokens=COUNT // 2)))
    outputs = llm.generate(prompts(), [replace(asked, max_tokens=COUNT // 2) for asked in sampling()])
    preempted = sum(output.completions[0].statistics.num_preemptions for output in outputs)
    return [texts, tokens_of(outputs), preempted]


@pytest.fixture(scope="module")
def in_one_process_with_probs(folder: Path) -> Callable[[str], list[Any]]:
    """Return ask(draft) -> what `use_with_probs` gives in one process; the one who asks waits for it once."""

    @cache
    def ask(draft: str) -> list[Any]:
        return alone(job_configuration(folder, (("cpu:0",), ("cpu:0",)), draft, **WITH_PROBS), use_with_probs)

    return ask


@pytest.mark.parametrize(
    ("name", "draft"),
    [
        *((name, "useless") for name in ("1+1", "ab+ba", "2+1") if name in HERE),
        *((name, "noisy") for name in HERE if name == "1+1"),
    ],
)
def test_draft_probabilities_cross_ranks_and_give_what_one_process_gives(
    folder: Path,
    greedy: list[tuple[int, ...]],
    in_one_process_with_probs: Callable[[str], list[Any]],
    name: str,
    draft: str,
) -> None:
    """The useless draft has one KV head, which both ranks of its group hold; rows are preempted on the way."""
    found = run_job(job_configuration(folder, HERE[name], draft, **WITH_PROBS), use_with_probs)
    if found is None:
        return
    assert [tokens for (tokens,) in found[0]] == [text[: COUNT // 2] for text in greedy]
    assert found == in_one_process_with_probs(draft)
    assert found[2] > 0
