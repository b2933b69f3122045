"""An EAGLE head on a rank of its own: texts are plain decoding's, and what it proposes is what the paper says, as it is
told what the target computes. Ahead of verdicts nothing that is guessed changes a text."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint, overflow_on
from eagle3_heads import Ways, check_proposals, check_trees, make_head, write_head
from jobs import HERE, SIZE, alone, configuration, prompts, run_job, sampling
from medusa_heads import Proposals
from meeting import meet
from mixed_rows import WITH_TEXTS
from mpi4py import MPI
from pipelines import Reference, tokens_of
from test_ahead import Bend, as_it_is, every_guess_is_wrong, foreseen, no_guess_matches, no_patience
from test_split_eagle import DYNAMIC, KINDS, SIMPLE, STATIC

from trtrun import LLM, SamplingParams
from trtrun.core.nouns import RoundPlan
from trtrun.kernels.triton.sampling import columns
from trtrun.rounds.exchange.hidden_link import HiddenLink
from trtrun.speculation.ahead.heads import AheadEagleDrafter
from trtrun.speculation.ahead.policy import AheadPolicy, CandidateBudget
from trtrun.speculation.drafters.eagle import ApartEagleDrafter

pytestmark = pytest.mark.mpi
APART = [name for name, (draft, target) in HERE.items() if len(draft) == 1 and not {*draft} & {*target}]
TIGHT: dict[str, Any] = {
    "scheduler": {"max_batch_size": 4, "max_num_tokens": 48, "plans_ahead": 1},
    "kv_cache": {"max_tokens": 128, "block_size": 8},
}
"""Few tokens a round, so that prompts come in chunks, and few blocks, so that rows are preempted."""

Patch = pytest.MonkeyPatch


def use(llm: LLM) -> dict[str, Any]:
    """All kinds of rows, and some prompts once more."""
    outputs = [*llm.generate(prompts(), sampling()), *llm.generate(prompts()[2:4], SIMPLE[2:4])]
    completions = [completion.statistics for output in outputs for completion in output.completions]
    return {
        "texts": tokens_of(outputs),
        "preempted": sum(statistics.num_preemptions for statistics in completions),
        "cached": sum(statistics.num_cached_prompt_tokens for statistics in completions),
        "totals": llm.statistics(),
    }


def use_simply(llm: LLM) -> list[Any]:
    """Rows whose drafts are compared with the reference's."""
    return tokens_of(llm.generate(prompts(), SIMPLE))


@cache
def plain_texts(folder: Path, name: str, dtype: str) -> Any:
    """What rows say without a head, at rank 0. Collective, the first time."""
    without = {"method": "draft_target", "draft_len": 1, "ahead": "off"}
    sections: dict[str, Any] = {"devices": HERE[name], "dtype": dtype, **TIGHT}
    return run_job(configuration(folder / "target", folder / "noisy", speculation=without, **sections), use)


def make_case(folder: Path, name: str, method: str, layout: str, dtype: str, **shape: Any) -> tuple[Any, Any, Path]:
    """What rows say without a head, at rank 0; and a head that knows it by and large, and where it is."""
    target, path = folder / "target", folder / f"apart {method} {layout} {dtype} {len(shape)}"
    make, teach, write, _ = KINDS[method]
    plain = plain_texts(folder, name, dtype)
    head = make(target, **shape)
    if plain is not None:
        taught = zip([*prompts(), *prompts()[2:4]], plain["texts"], strict=True)
        head = teach(head, target, [[*prompt, *text] for prompt, found in taught for text in found])
        write(path, head, layout, target)
    meet()
    return plain, head, path


HEADS: list[tuple[str, str, dict[str, Any], str, dict[str, Any]]] = [
    ("eagle", "reference", {}, "bfloat16", WITH_TEXTS),
    ("eagle3", "prefixed", {"num_tokens": 131}, "float32", DYNAMIC),
    ("eagle3", "specforge", {"num_tokens": 131}, "float32", {}),
    ("eagle", "vllm", {}, "bfloat16", STATIC),
]
"""The first ones are a chain and a tree, which stand for all where the target is split."""


@pytest.mark.parametrize(("method", "layout", "shape", "dtype", "options"), HEADS if SIZE == 3 else HEADS[:2])
@pytest.mark.parametrize("name", APART)
def test_texts_are_plain_decodings_and_drafts_the_papers(
    folder: Path,
    name: str,
    method: str,
    layout: str,
    shape: dict[str, Any],
    dtype: str,
    options: dict[str, Any],
    monkeypatch: Patch,
) -> None:
    """Rows that are sampled, penalised, preempted, with chunks of prompts beside them; then simpler ones."""
    seen = Proposals(monkeypatch, ApartEagleDrafter)
    plain, head, path = make_case(folder, name, method, layout, dtype, **shape)
    speculation = KINDS[method][3](ahead="off", **options)
    sections = {"devices": HERE[name], "dtype": dtype, "speculation": speculation, **TIGHT}
    apart = configuration(folder / "target", None, heads=path, heads_apart=True, **sections)
    found = run_job(apart, use)
    ranks_that_draft = MPI.COMM_WORLD.gather(bool(seen.seen))
    if found is not None:
        assert found["texts"] == plain["texts"] and found["totals"]["num_accepted_draft_tokens"] >= 20
        assert found["preempted"] and found["cached"]
        assert bool(found["totals"]["num_suffix_draft_tokens"]) == (options == WITH_TEXTS)
        assert ranks_that_draft == [rank == 1 for rank in range(MPI.COMM_WORLD.size)]
    if dtype != "float32":
        return
    seen.seen.clear()
    seen.paths.clear()
    run_job(apart, use_simply)
    drafted = MPI.COMM_WORLD.gather((seen.seen, seen.paths))
    if drafted is not None:
        seen.seen, seen.paths = drafted[1]
        if options:
            assert check_trees(seen, folder / "target", head, options) > 15
        else:
            assert check_proposals(seen, folder / "target", head) > 20


def nothing_is_told(patch: Patch) -> None:
    """The head's rank is so far behind that the target leaves all hidden states out."""
    patch.setattr(HiddenLink, "_bytes_under_way", lambda link: link.most_bytes)


BENDS: list[Bend] = [no_guess_matches, every_guess_is_wrong, no_patience, nothing_is_told, as_it_is]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"] if SIZE == 3 else ["bfloat16"])
@pytest.mark.parametrize("name", APART)
def test_guesses_of_a_head_change_no_text(folder: Path, name: str, dtype: str) -> None:
    plain, _, path = make_case(folder, name, "eagle3", "reference", dtype)
    sections = {"devices": HERE[name], "dtype": dtype, "speculation": KINDS["eagle3"][3](ahead="on"), **TIGHT}
    apart = configuration(folder / "target", None, heads=path, heads_apart=True, **sections)
    for bend in BENDS if (dtype, len(HERE[name][1])) == ("float32", 1) else BENDS[-1:]:
        with Patch.context() as patch:
            bend(patch)
            found = run_job(apart, use)
        if found is None:
            continue
        assert found["texts"] == plain["texts"], bend
        totals = found["totals"]
        accepted, drafted = totals["num_accepted_draft_tokens"], totals["num_draft_tokens"]
        if bend is nothing_is_told:
            assert drafted == 0
        if bend is no_guess_matches:
            assert accepted >= 20 and totals["foresight"]["num_redrafted_rounds"] > 20
        if bend is every_guess_is_wrong:
            assert foreseen(found) > 20
        if bend is as_it_is:
            assert accepted >= 20 and foreseen(found) > 20 and totals["num_guesses"] > 100


@dataclass
class Guessed:
    """What was drafted ahead in a round: the row's text and the draft that is verified, its parameters, and by verdict
    (how many are accepted, and the token behind them) what follows."""

    text: list[int]
    temperature: float
    seed: int
    draft: list[int]
    behind: dict[tuple[int, int], list[int]]


def record_guesses(patch: Patch) -> list[Guessed]:
    """All that are made from now on, on this rank, row by row."""
    found, original = list[Guessed](), AheadEagleDrafter.draft_ahead

    def draft_ahead(drafter: Any, plan: RoundPlan, *, guesses: bool) -> int:
        count = original(drafter, plan, guesses=guesses)
        state, made = drafter.rows, drafter._guesses
        for row in dict.fromkeys(guess.row for guess in made.listed):
            text = state.token_ids[row, : int(state.lengths[row])].tolist()
            temperature = float(state.sampling.numbers[row, columns.TEMPERATURE])
            seed = int(state.sampling.integers[row, columns.SEED])
            verdicts = {(num, token): index for (of, num, token), index in made._places.items() if of == row}
            behind = {verdict: made.drafts[index] for verdict, index in verdicts.items()}
            found.append(Guessed(text, temperature, seed, drafter._texts[row].draft, behind))
        return count

    patch.setattr(AheadEagleDrafter, "draft_ahead", draft_ahead)
    return found


def check_guesses(guesses: list[Guessed], target: Path, head: Any) -> Counter[int]:
    """Compare them with the head in plain torch, which goes on with states of its own: verdicts are likely ones, and
    drafts are what it says behind them; returns how many there were by the number of accepted tokens."""
    reference, count = Reference(target), Counter[int]()
    for guess in guesses:
        ways = Ways(head, reference, guess.text, guess.temperature, guess.seed)
        best = [ways.scores(tuple(guess.draft[:end])).topk(9).indices.tolist() for end in range(len(guess.draft) + 1)]
        for (accepted, token), drafted in guess.behind.items():
            assert token in best[accepted] and token not in guess.draft[accepted : accepted + 1]
            way = (*guess.draft[:accepted], token)
            said = [int(ways.scores((*way, *drafted[:end])).argmax()) for end in range(len(drafted))]
            assert drafted == said, (len(guess.text), accepted)
            count[accepted] += 1
    return count


@pytest.mark.parametrize("name", [name for name in APART if len(HERE[name][1]) == 1])
def test_a_head_drafts_ahead_what_its_own_states_say(folder: Path, name: str, monkeypatch: Patch) -> None:
    """Greedy rows and sampled ones, with blocks of three tokens, so that guesses begin anywhere in one."""
    guesses = record_guesses(monkeypatch)
    monkeypatch.setattr(AheadPolicy, "num_guesses", lambda *_: 20)
    monkeypatch.setattr(
        CandidateBudget, "allocate", lambda fan, drafted, budget: [1 + (budget > drafted)] * (drafted + 1)
    )
    head, path = make_head(folder / "target", boundaries=(0, 1, 2)), folder / "apart random"
    if MPI.COMM_WORLD.rank == 0:
        write_head(path, head, "specforge", folder / "target")
    meet()
    sections = {
        "devices": HERE[name],
        "speculation": KINDS["eagle3"][3](ahead="on", draft_len=3),
        "scheduler": {"max_batch_size": 4, "max_num_tokens": 48},
        "kv_cache": {"max_tokens": 1020, "block_size": 3},
    }
    run_job(configuration(folder / "target", None, heads=path, heads_apart=True, **sections), use_simply)
    made = MPI.COMM_WORLD.gather(guesses)
    if made is not None:
        count = check_guesses([guess for guess in made[1] if guess.draft][:20], folder / "target", head)
        assert min(count[accepted] for accepted in range(4)) > 3


@pytest.mark.parametrize("ahead", ["on", "off"])
@pytest.mark.parametrize("name", [name for name in APART if len(HERE[name][1]) == 1])
def test_failed_rows_and_drafts_that_came_with_requests(folder: Path, name: str, ahead: str) -> None:
    """Rows whose numbers overflow, in prompts and behind them, cost themselves alone; what came with a request is
    proposed in the head's place."""
    poison, target, path = 7, folder / f"overflowing {ahead}", folder / f"apart overflowing {ahead}"
    if MPI.COMM_WORLD.rank == 0:
        overflow_on(make_checkpoint(target, seed=1, num_hidden_layers=2), poison)
        write_head(path, make_head(target, boundaries=(0, 1, 2)), "specforge", target)
    meet()
    healthy = [[token if token != poison else 8 for token in prompt] for prompt in prompts()]
    asked = [[poison] * 20, healthy[1], [*healthy[3], poison], *healthy[2:]]
    plain: list[Any] = []

    def use(llm: LLM) -> tuple[list[Any], int]:
        given = [tuple(texts[0]) if texts else () for texts in plain] or [()] * len(asked)
        wanted = [
            SamplingParams(
                max_tokens=12, seed=1, logit_bias={poison: -100.0}, temperature=index % 2, draft_token_ids=draft
            )
            for index, draft in enumerate(given)
        ]
        outputs = llm.generate(asked, wanted)
        assert [output.error is None for output in outputs] == [index not in (0, 2) for index in range(len(asked))]
        texts = [[one.token_ids for one in output.completions if output.error is None] for output in outputs]
        return texts, llm.statistics()["num_accepted_draft_tokens"]

    sections: dict[str, Any] = {"devices": HERE[name], **TIGHT}
    if MPI.COMM_WORLD.rank == 0:
        plain = alone(configuration(target, None, **{**sections, "devices": ((), ("cpu:0",))}), use)[0]
    speculation = KINDS["eagle3"][3](ahead=ahead)
    found = run_job(configuration(target, None, heads=path, heads_apart=True, speculation=speculation, **sections), use)
    if found is not None:
        assert found[0] == plain
        assert found[1] >= 10, "they are all right, where they were there in time"
