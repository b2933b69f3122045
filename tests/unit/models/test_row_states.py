"""Layers that keep a state of each row beside layers that attend (tests/helpers/decaying_family.py): texts are those of
one token at a time, whatever else happens."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from ahead_rounds import AheadRounds, load
from checkpoints import make_checkpoint
from decaying_family import DecayingReference, decaying_family, make_decaying_checkpoint
from paged import PagedModel
from pipelines import configuration, make_llm, noisy_copy, prompt_of, run_alone, tokens_of
from test_model_invariance import check_chunks, check_company, dtype

from trtrun import SamplingParams
from trtrun.errors import ConfigError
from trtrun.start.job_spec import JobSpec

__all__ = ["dtype"]


@pytest.fixture(autouse=True)
def family() -> Iterator[None]:
    with decaying_family():
        yield


@pytest.mark.parametrize("tp_size", [1, 2])
def test_logits_are_those_of_plain_torch(tmp_path: Path, tp_size: int) -> None:
    path, tokens = make_decaying_checkpoint(tmp_path / "own"), prompt_of(41)
    model = PagedModel(path, tp_size=tp_size)
    parts = [model.forward([[(0, 0, tokens[:17])]]), model.forward([[(0, 17, tokens[17:30])]])]
    parts += [model.forward([[(0, at, tokens[at : at + 1])]]) for at in range(30, 41)]
    torch.testing.assert_close(torch.cat(parts), DecayingReference(path).logits(tokens), atol=1e-4, rtol=1e-4)


def test_a_tokens_bits_do_not_depend_on_its_company(tmp_path: Path, dtype: torch.dtype) -> None:
    path = make_decaying_checkpoint(tmp_path / "own", dtype=dtype)
    check_chunks(PagedModel(path, dtype, block_size=16))
    check_company(path, dtype)


VOCABULARY = 19
PROMPTS = [prompt_of(length, length, VOCABULARY) * 2 for length in (3, 17, 29, 8)]
KINDS = [SamplingParams(max_tokens=40, temperature=0.8 * (row % 2), seed=row) for row in range(4)]


def test_greedy_texts_are_those_of_plain_torch(tmp_path: Path) -> None:
    path = make_decaying_checkpoint(tmp_path / "own")
    with make_llm(path, speculation={"method": "ngram"}) as llm:
        found = tokens_of(llm.generate(PROMPTS, SamplingParams(max_tokens=40)))
    reference = DecayingReference(path)
    assert found == [[reference.greedy(prompt, 40)] for prompt in PROMPTS]


@pytest.mark.parametrize(
    ("method", "plans_ahead", "kind"),
    [
        ("ngram", 0, torch.bfloat16),
        ("draft_target", 1, torch.bfloat16),
        ("draft_target", 0, torch.float32),
        ("suffix", 1, torch.float32),
    ],
)
def test_drafted_texts_are_plain_ones(tmp_path: Path, method: str, plans_ahead: int, kind: torch.dtype) -> None:
    """Drafts are rejected often; prompts are read in small chunks beside rows that decode, and rows are preempted."""
    target = make_decaying_checkpoint(tmp_path / "target", dtype=kind, vocab_size=VOCABULARY)
    draft = noisy_copy(tmp_path / "draft", target, 0.05) if method == "draft_target" else None
    with make_llm(target, speculation={"method": "none"}) as llm:
        alone = run_alone(llm, PROMPTS, KINDS)
    with make_llm(
        target,
        draft,
        speculation={"draft_len": 4} if draft is not None else {"method": method, "draft_len": 4},
        scheduler={"max_num_tokens": 24, "max_batch_size": 4, "plans_ahead": plans_ahead},
        kv_cache={"max_tokens": 160, "block_size": 8},
    ) as llm:
        outputs = llm.generate(PROMPTS, KINDS)
        assert tokens_of(outputs) == alone
        totals = llm.statistics()
        assert 3 < totals["num_accepted_draft_tokens"] < totals["num_draft_tokens"] - 5
        assert sum(one.statistics.num_preemptions for output in outputs for one in output.completions) > 0


def test_rounds_that_are_timed_at_the_start_leave_rows_states_alone(tmp_path: Path) -> None:
    """As is usual: draft_len follows from times."""
    target = make_decaying_checkpoint(tmp_path / "target", vocab_size=VOCABULARY)
    with make_llm(target, speculation={"method": "none"}) as llm:
        alone = run_alone(llm, PROMPTS, KINDS)
    with make_llm(target, noisy_copy(tmp_path / "draft", target, 0.05), speculation={"pacing": "measured"}) as llm:
        assert tokens_of(llm.generate(PROMPTS, KINDS)) == alone


@pytest.mark.parametrize("snapshots", [None, 600, 0], ids=["as many as twice the rows", "three", "none"])
def test_rows_begin_behind_snapshots_of_others(tmp_path: Path, snapshots: int | None) -> None:
    """Of a prompt that others share, of one's own text once more, and of several completions of one prompt."""
    target = make_decaying_checkpoint(tmp_path / "target", num_hidden_layers=3, intermediate_size=25)
    shared = prompt_of(40, seed=5)
    prompts = [[*shared[: 40 - 9 * row], *prompt_of(5 + row, seed=row)] for row in range(4)]
    kinds = [SamplingParams(max_tokens=30, temperature=0.8 * (row % 2), seed=row, n=1 + row % 3) for row in range(4)]
    with make_llm(target, speculation={"method": "none"}, kv_cache={"enable_block_reuse": False}) as llm:
        alone = run_alone(llm, prompts, kinds)
        longer = [[*prompt, *of_prompt[0], 7] for prompt, of_prompt in zip(prompts, alone, strict=True)]
        longer_alone = run_alone(llm, longer, kinds)
    kept = {} if snapshots is None else {"state_snapshots": snapshots}
    with make_llm(
        target,
        noisy_copy(tmp_path / "draft", target, 0.05),
        scheduler={"max_batch_size": 3, "max_num_tokens": 24},
        kv_cache={"block_size": 4, **kept},
    ) as llm:
        found = llm.generate(prompts, kinds)
        assert tokens_of(found) == alone
        again = llm.generate(longer, kinds)
        assert tokens_of(again) == longer_alone
        cached = [
            [one.statistics.num_cached_prompt_tokens for output in outputs for one in output.completions]
            for outputs in (found, again)
        ]
        assert any(cached[0]) == any(cached[1]) == (snapshots != 0)
        if snapshots is None:
            assert min(cached[1]) >= 12 and sum(map(bool, cached[0])) >= 4, cached
        llm.check_idle()


def test_prompts_that_part_from_others_leave_a_snapshot_there(tmp_path: Path) -> None:
    """As those with one system prompt do: the second one's first chunk ends where they part, and others begin there. A
    text that goes on where another ended is read at once."""
    target = make_decaying_checkpoint(tmp_path / "target")
    shared, asked = prompt_of(42, seed=5), [SamplingParams(max_tokens=count) for count in (9, 1, 1, 1)]
    prompts = [[*shared, *prompt_of(21, seed=row)] for row in range(3)]
    with make_llm(target, speculation={"method": "none"}, kv_cache={"enable_block_reuse": False}) as llm:
        alone = run_alone(llm, prompts, asked[:3])
        prompts.append([*prompts[0], *alone[0][0], 7])
        alone += run_alone(llm, prompts[3:], asked[3:])
    with make_llm(target, noisy_copy(tmp_path / "draft", target, 0.05), kv_cache={"block_size": 4}) as llm:
        found, rounds = [], []
        for prompt, sampling in zip(prompts, asked, strict=True):
            found += llm.generate([prompt], sampling)
            rounds.append(llm.statistics()["num_rounds"])
        assert tokens_of(found) == alone
        cached = [output.completions[0].statistics.num_cached_prompt_tokens for output in found]
        assert cached == [0, 0, 40, 60]
        assert [after - before for before, after in pairwise(rounds)] == [2, 1, 1]
        llm.check_idle()


@pytest.mark.parametrize(("block_size", "draft_len"), [(4, 5), (1, 2), (16, 3)])
def test_what_was_drafted_ahead_is_what_would_be_drafted_now(tmp_path: Path, block_size: int, draft_len: int) -> None:
    """A draft engine's states, those of its guesses and of guesses that came true, are those of a fresh one."""
    path = make_decaying_checkpoint(tmp_path / "draft", seed=3, num_hidden_layers=2)
    rounds = AheadRounds(load(path), seed=draft_len, block_size=block_size, draft_len=draft_len, num_tokens=200)
    for number in range(10):
        prompt = prompt_of(3 + 7 * (number % 4), seed=number)
        if number % 3 == 2:
            prompt = [*prompt_of(24, seed=3), *prompt[:3]]
        rounds.add(prompt, max_tokens=30, temperature=0.8 * (number % 2))
    rounds.run(cancels=0.02)
    wanted = ("foreseen", "redrafted", "hit all", "hit some", "sat out", "cached")
    assert all(rounds.seen[name] for name in wanted), rounds.seen
    assert rounds.scheduler.idle_is_whole()
    assert len(rounds.different) <= 1 + rounds.seen["places"] // 2000, rounds.different[:3]


def test_what_states_cannot_do_is_refused_in_a_line(tmp_path: Path) -> None:
    target = make_decaying_checkpoint(tmp_path / "target")
    told = "the target has 2 layers that keep a state of each row in place of keys and values: "
    for speculation, way in (
        ({"method": "ngram", "max_paths": 2}, "leave speculation.max_paths out"),
        ({"method": "token_recycling", "token_recycling_nodes": 9}, "leave speculation.token_recycling_nodes out"),
        ({"method": "lookahead"}, "set speculation.method to another, as this one has no chains"),
    ):
        with pytest.raises(ConfigError, match=f"{told}it cannot verify draft trees, .*: {way}$"):
            make_llm(target, speculation=speculation)
    with pytest.raises(
        ConfigError, match="state_snapshots: 9 bytes hold no snapshot of a row's states, which takes 512 B"
    ):
        make_llm(target, kv_cache={"state_snapshots": 9})
    config = configuration(make_checkpoint(tmp_path / "llama"), target)
    assert config.draft is not None
    translated = config.model_copy(update={"draft": config.draft.model_copy(update={"vocabulary": "intersection"})})
    with pytest.raises(
        ConfigError, match=r"the draft has 2 layers that keep .* take a draft of the target's vocabulary"
    ):
        JobSpec(translated).models  # noqa: B018
