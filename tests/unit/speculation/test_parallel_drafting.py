"""Drafting all tokens in one forward: what is proposed is what transformers says of the row with mask tokens behind it.

Plans of a scheduler and verdicts drawn at random drive a drafter on a tiny float32 engine, with few blocks, beginnings
that rows share, rounds that are sat out and rows that are preempted. After every proposal it is compared with a forward
of transformers over the row's tokens and masks, without a cache: nothing that the drafter keeps can be wrong.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from ahead_rounds import CPU, MAX_ROWS, AheadRounds, load, verdict_of
from checkpoints import make_checkpoint, make_draft
from pipelines import Reference, make_llm, noisy_copy, prompt_of, tokens_of

from launch.jobs.check.preflight import check_models
from trtrun import SamplingParams
from trtrun.configuration.config import make_config
from trtrun.core.nouns import Request, RoundPlan
from trtrun.core.token_lists import TokenLists
from trtrun.engine.forwards import EngineShape
from trtrun.engine.rows import RowState
from trtrun.engine.runner import Engine
from trtrun.errors import CheckpointError, ConfigError
from trtrun.kvcache.store import KVStore
from trtrun.models.config import read_model_config
from trtrun.models.decoder import CausalLM
from trtrun.sampling.distributions import distributions_of
from trtrun.sampling.random import Stream
from trtrun.scheduling.limits import SchedulerLimits
from trtrun.scheduling.scheduler import Scheduler
from trtrun.speculation.drafters.draft_model import ParallelDrafter
from trtrun.start.job_spec import JobSpec

MASK = 198
KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9, "top_p": 0.9},
    {"repetition_penalty": 1.5},
    {"temperature": 0.8, "frequency_penalty": 1.5, "min_p": 0.02},
    {"bad": ((5,), (3, 7))},
    {"temperature": 1.2, "top_k": 20},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("parallel") / "draft", seed=3, num_hidden_layers=2)


@pytest.fixture(scope="module")
def model(folder: Path) -> CausalLM:
    return load(folder)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder)


class Rounds:
    """A scheduler, a drafter and a script for the target."""

    def __init__(
        self,
        model: CausalLM,
        reference: Reference,
        *,
        seed: int,
        block_size: int = 4,
        draft_len: int = 4,
        num_tokens: int = 400,
        plans_ahead: int = 0,
        use_logits: bool = False,
        known: bool = True,
    ) -> None:
        num_blocks, context, vocab = 1 + num_tokens // block_size, 90, model.config.vocab_size
        self.random, self.reference, self.plans_ahead, self.use_logits = (
            random.Random(seed),
            reference,
            plans_ahead,
            use_logits,
        )
        store = KVStore(model.keeps, num_blocks, block_size, torch.float32, CPU)
        rows = RowState(MAX_ROWS, context, block_size, draft_len, vocab, CPU)
        engine = Engine(model, store, rows, EngineShape(most_masked=draft_len))
        self.drafter = ParallelDrafter(engine, vocab, use_logits, MASK)
        if not known:  # as on a GPU, which the host does not wait for
            self.drafter._unfed = lambda row_list, rows, lacking: lacking  # type: ignore[method-assign]
        self.scheduler = Scheduler(
            SchedulerLimits(
                MAX_ROWS,
                40,
                context,
                context,
                draft_len,
                block_size,
                num_blocks,
                True,
                plans_ahead,
                drafts_in_parallel=True,
            )
        )
        self.seen: Counter[str] = Counter()
        self._tokens: dict[int, list[int]] = {}
        self._number = 0

    def add(self, prompt: list[int], bad: Any = (), **sampling: Any) -> None:
        self._number += 1
        parameters = SamplingParams(seed=100 + self._number, **sampling)
        lists = TokenLists.of((), parameters.logit_bias, bad)
        self.scheduler.add(Request(self._number, tuple(prompt), parameters, frozenset(), lists))

    def run(self, copies: int = 0) -> None:
        """Until nothing is left to do; in each of the first rounds a request comes whose prompt is what a row has at
        that time."""
        waiting: list[RoundPlan] = []
        for number in count():
            if self._tokens and number < copies:
                text = self.random.choice(list(self._tokens.values()))
                self.add([*text[:60], self.random.randrange(190)], max_tokens=9)
            while len(waiting) <= self.plans_ahead and (plan := self._schedule()) is not None:
                waiting.append(plan)
            if not waiting:
                return
            self._round(waiting.pop(0))

    def _schedule(self) -> RoundPlan | None:
        return self.scheduler.schedule(self.random.choice((None, None, None, 2, 1, 0, 0)))

    def _round(self, plan: RoundPlan) -> None:
        self.drafter.begin_round(plan)
        for admission in plan.admissions:
            self.seen["preempted"] += len(admission.tokens) > admission.num_prompt_tokens
            self.seen["cached"] += admission.num_cached_tokens > 0
            self._tokens[admission.row] = admission.tokens.tolist()
        rows, lens = plan.decode_rows.tolist(), plan.draft_lens.tolist()
        sampled = self.drafter.rows.sampling.sampled_indices(rows) if self.use_logits else []
        draft = self.drafter.propose(plan, sampled)
        for index, (row, most, fed) in enumerate(zip(rows, lens, plan.catch_up.tolist(), strict=True)):
            self.seen["sat out"] += not fed
            if most > 0:
                probs = (
                    draft.draft_probs[sampled.index(index)]
                    if index in sampled and draft.draft_probs is not None
                    else None
                )
                self._check(row, draft.tokens[index, :most].tolist(), probs)
        verdicts = [self._decide(draft.tokens[index, : max(0, most)].tolist()) for index, most in enumerate(lens)]
        verdicts += [[self.random.randrange(190)] for _ in plan.sampled_rows[len(rows) :]]
        if plan.sampled_rows:
            self.drafter.observe(plan, verdict_of(verdicts), None)
        for row, of_row in zip(plan.sampled_rows, verdicts, strict=True):
            self._tokens[row] += of_row
        verified = [max(0, most) for most in lens] + [0] * (len(verdicts) - len(lens))
        self.scheduler.commit(plan, list(map(len, verdicts)), verdicts, verified)

    def _check(self, row: int, found: list[int], probs: torch.Tensor | None) -> None:
        """The reference's logits for each place, and the row's own choice from them, whose history is the draft."""
        tokens, state = self._tokens[row], self.drafter.rows
        logits = self.reference.logits([*tokens, *[MASK] * (len(found) - 1)])[-len(found) :]
        history = state.token_ids.clone()
        history[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        for step, token in enumerate(found):
            where = torch.tensor([len(tokens) + step])
            of_place = distributions_of(state.sampling, logits[step].view(1, 1, -1), [row], where, history)
            assert of_place.choose(Stream.DRAFT if self.use_logits else Stream.TARGET).tolist() == [[token]], (
                row,
                step,
            )
            if probs is not None:
                torch.testing.assert_close(
                    probs[step], of_place.probabilities([0], len(probs[step]))[0, 0], rtol=1e-3, atol=1e-5
                )
                self.seen["probabilities"] += 1
            history[row, len(tokens) + step] = token
        self.seen[f"drafts of {len(found)}"] += 1

    def _decide(self, draft: list[int]) -> list[int]:
        accepted = self.random.choice((0, len(draft), self.random.randrange(len(draft) + 1)))
        self.seen["all accepted"] += 0 < accepted == len(draft)
        self.seen["some accepted"] += 0 < accepted < len(draft)
        return [*draft[:accepted], self.random.randrange(190)]


@pytest.mark.parametrize(
    ("seed", "block_size", "num_tokens", "plans_ahead", "known"),
    [(0, 4, 120, 0, True), (1, 1, 110, 1, False), (2, 16, 400, 1, True)],
    ids=["as on a CPU", "as on a GPU", "with room"],
)
def test_drafts_are_what_transformers_says_of_masks(
    model: CausalLM, reference: Reference, seed: int, block_size: int, num_tokens: int, plans_ahead: int, known: bool
) -> None:
    rounds = Rounds(
        model, reference, seed=seed, block_size=block_size, num_tokens=num_tokens, plans_ahead=plans_ahead, known=known
    )
    prompt: list[int] = []
    for number in range(12):
        prompt = [*prompt[:-2], number] if number % 3 == 2 else prompt_of((1, 9, 22, 30)[number % 4], seed=number)
        rounds.add(prompt, max_tokens=30, **KINDS[number % len(KINDS)])
    rounds.run()
    wanted = ["drafts of 4", "drafts of 2", "drafts of 1", "all accepted", "some accepted", "sat out", "cached"]
    wanted += ["preempted"] if num_tokens < 200 else []
    assert all(rounds.seen[name] for name in wanted), rounds.seen
    assert rounds.scheduler.idle_is_whole()


@pytest.mark.parametrize("plans_ahead", [0, 1])
def test_a_row_that_begins_as_another_one_is_finds_its_keys_and_values(
    model: CausalLM, reference: Reference, plans_ahead: int
) -> None:
    """In the round behind the one that gave that row its tokens, of which the draft has fed none yet."""
    rounds = Rounds(model, reference, seed=3, block_size=1, num_tokens=600, plans_ahead=plans_ahead)
    for number in range(2):
        rounds.add(prompt_of(5, seed=number), max_tokens=60)
    rounds.run(copies=25)
    assert rounds.seen["cached"] > 10 and rounds.seen["drafts of 4"] > 10, rounds.seen


def test_so_does_one_on_draft_ranks_of_their_own(model: CausalLM) -> None:
    rounds = AheadRounds(model, seed=3, block_size=1, draft_len=4, num_tokens=600, plans_ahead=0, mask_token=MASK)
    for number in range(2):
        rounds.add(prompt_of(5, seed=number), max_tokens=60)
    rounds.run(copies=25, lateness=0.4)
    assert rounds.seen["cached"] > 5 and rounds.seen["foreseen"] > 5 and rounds.seen["late"], rounds.seen
    assert len(rounds.different) <= 1 + rounds.seen["places"] // 2000, rounds.different[:3]


def test_draft_probs_are_those_of_masks(model: CausalLM, reference: Reference) -> None:
    """Drawn from a stream of the draft's own."""
    rounds = Rounds(model, reference, seed=5, use_logits=True)
    for number in range(6):
        rounds.add(prompt_of(5 + number, seed=number), max_tokens=25, **KINDS[number])
    rounds.run()
    assert rounds.seen["probabilities"] > 50


@pytest.mark.parametrize(
    ("block_size", "draft_len", "plans_ahead", "use_logits"),
    [(1, 2, 0, False), (4, 5, 1, True), (16, 3, 1, False)],
)
def test_what_was_foreseen_in_parallel_is_what_would_be_drafted_now(
    model: CausalLM, block_size: int, draft_len: int, plans_ahead: int, use_logits: bool
) -> None:
    """On draft ranks of their own: all guesses in one forward, on few blocks, whatever verdicts come."""
    rounds = AheadRounds(
        model, seed=draft_len, block_size=block_size, draft_len=draft_len, use_logits=use_logits,
        plans_ahead=plans_ahead, num_tokens=160, mask_token=MASK,
    )  # fmt: skip
    prompt: list[int] = []
    for number in range(14):
        prompt = [*prompt[:-2], number] if number % 3 == 2 else prompt_of(3 + 7 * (number % 4), seed=number)
        given = {"draft_token_ids": prompt_of(12, seed=number)} if number % 3 == 1 else {}
        rounds.add(prompt, max_tokens=26, **KINDS[number % len(KINDS)], **given)
    rounds.run(cancels=0.02)
    wanted = ["foreseen", "missed", "redrafted", "hit all", "hit none", "cached", "given"]
    wanted += [] if use_logits else ["left"]
    assert all(rounds.seen[name] for name in wanted), rounds.seen
    assert rounds.scheduler.idle_is_whole()
    assert len(rounds.different) <= 1 + rounds.seen["places"] // 2000, rounds.different[:3]


def with_mask(path: Path, **values: Any) -> Path:
    """A checkpoint whose config.json has `values` beside its own."""
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **values}))
    return path


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    path = tmp_path_factory.mktemp("pair")
    target = make_checkpoint(path / "target", seed=1, num_hidden_layers=3)
    draft = noisy_copy(path / "draft", make_draft(path / "grafted", target, 2), 0.02)
    return target, with_mask(draft, pard_token=MASK, spd_type="pard")


SETTINGS: dict[str, dict[str, Any]] = {
    "fixed": {},
    "plans ahead": {"scheduler": {"plans_ahead": 1}},
    "measured": {"speculation": {"pacing": "measured"}},
    "little memory": {"kv_cache": {"max_tokens": 160, "block_size": 8}},
    "texts": {
        "speculation": {
            "enable_suffix_decoding": True,
            "suffix_decoding_min_match_len": 1,
            "suffix_decoding_max_cached_requests": 9,
        }
    },
}


@pytest.mark.parametrize("name", SETTINGS)
def test_texts_are_the_targets_own(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """In company, greedy and by seed, with penalties, stops and drafts that come with requests."""
    widths: list[int] = []
    look = Engine.look_ahead

    def logged(self: Engine, *arguments: Any) -> torch.Tensor:
        found = look(self, *arguments)
        widths.append(found.shape[1])
        return found

    monkeypatch.setattr(Engine, "look_ahead", logged)
    monkeypatch.setattr(Engine, "decode", None)
    prompts = [prompt_of(length, seed=length) for length in (9, 70, 24, 3, 41, 17)]
    kinds = [
        *KINDS[:4],
        {"stop_token_ids": (7, 8, 9)},
        {"draft_token_ids": tuple(prompt_of(20, seed=3)), "logprobs": 2},
    ]
    sampling = [SamplingParams(max_tokens=30, seed=index, **kind) for index, kind in enumerate(kinds)]
    scheduler = {"max_batch_size": 4, "max_num_tokens": 48}
    sections = {
        "scheduler": scheduler | SETTINGS[name].get("scheduler", {}),
        **{k: v for k, v in SETTINGS[name].items() if k == "kv_cache"},
    }
    with make_llm(pair[0], **sections) as plain:
        expected = tokens_of(plain.generate(prompts, sampling))
    speculation = {"draft_len": 5, **SETTINGS[name].get("speculation", {})}
    with make_llm(*pair, speculation=speculation, **sections) as llm:
        outputs = llm.generate(prompts, sampling)
        assert tokens_of(llm.generate(prompts, sampling)) == expected
        statistics = llm.statistics()
        llm.check_idle()
    assert tokens_of(outputs) == expected
    assert (statistics["num_accepted_suffix_draft_tokens"] > 20) == (name == "texts")
    assert name == "measured" or max(widths) == 5
    accepted = sum(
        completion.statistics.num_accepted_draft_tokens for output in outputs for completion in output.completions
    )
    assert name == "measured" or accepted > 20  # times decide how much is drafted there


def test_off_drafts_token_by_token(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "look_ahead", None)
    with make_llm(*pair, speculation={"draft_len": 3, "parallel_drafting": "off"}) as llm:
        assert tokens_of(llm.generate([prompt_of(8)], SamplingParams(max_tokens=9)))


def configured(target: Path, draft: Path, how: Any) -> Any:
    return make_config(
        {
            "target": {"model": str(target), "devices": ["cpu:0"]},
            "draft": {"model": str(draft), "devices": ["cpu:0"]},
            "speculation": {"parallel_drafting": how},
        }
    )


def test_it_is_on_where_the_draft_names_a_mask_token(pair: tuple[Path, Path]) -> None:
    target, draft = pair
    assert (
        JobSpec(configured(target, draft, "auto")).models.mask_token
        == JobSpec(configured(target, draft, True)).models.mask_token
        == MASK
    )
    assert JobSpec(configured(target, draft, "off")).models.mask_token is None
    assert JobSpec(configured(target, target, "auto")).models.mask_token is None
    with pytest.raises(ConfigError, match=r"parallel_drafting is on, but .*config.json names no mask token"):
        check_models(JobSpec(configured(target, target, "on")))
    with pytest.raises(ConfigError, match="parallel_drafting"):
        configured(target, draft, "sometimes")
    with pytest.raises(ConfigError, match="parallel_drafting is an option of method draft_target"):
        make_config(
            {
                "target": {"model": str(target), "devices": ["cpu:0"]},
                "speculation": {"method": "ngram", "parallel_drafting": "on"},
            }
        )


@pytest.mark.parametrize("name", ["pard_token", "mask_token_id", "ptd_token_id"])
def test_mask_tokens_by_all_their_names(tmp_path: Path, name: str) -> None:
    path = make_checkpoint(tmp_path / "model", seed=1)
    assert read_model_config(path).mask_token is None
    assert read_model_config(with_mask(path, **{name: 7})).mask_token == 7
    for value in (-1, 199, "7", True, 7.0):
        with pytest.raises(CheckpointError, match=rf"'{name}' must be a token id below vocab_size, 199"):
            read_model_config(with_mask(path, **{name: value}))
