"""Drafting ahead over real ranks: whatever is guessed, and however late it comes, the texts are the target's own.

Each test runs a whole job as test_jobs.py does, with guesses bent on every rank.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint
from jobs import COUNT, HERE, SIZE, alone, job_configuration, prompts, run_job, sampling
from meeting import from_rank_0
from mpi4py import MPI
from pipelines import Reference, noisy_copy, prompt_of, tokens_of

from trtrun import LLM, SamplingParams
from trtrun.rounds.exchange import message_exchange
from trtrun.speculation.ahead.policy import NEVER, AheadPolicy, CandidateBudget
from trtrun.speculation.ahead.row_texts import Guesses
from trtrun.start import policies

pytestmark = pytest.mark.mpi(min_size=3)

NAMES = [name for name, devices in HERE.items() if devices[0] and not set(devices[0]) & set(devices[1])]
"""Placements in which draft and target share no device."""

ONE_SLOT = (("cpu:0",), ("cpu:0",))
DRAFT_CONTEXT = 48
WITH_PROBS: dict[str, Any] = {"speculation": {"draft_len": 3, "use_logits": True}}

Patch = pytest.MonkeyPatch
Bend = Callable[[Patch], None]


def find_another(self: Guesses, row: int, num_accepted: int, token: int) -> int | None:
    """A guess of the same place that is not this verdict."""
    places = self._places.items()
    others = [index for (of, count, other), index in places if (of, count) == (row, num_accepted) and other != token]
    return others[0] if others else None


def as_it_is(patch: Patch) -> None:
    """Nothing is bent."""


def no_guess_matches(patch: Patch) -> None:
    """Every round drafts again."""
    patch.setattr(Guesses, "find", lambda *_: None)
    patch.setattr(AheadPolicy, "redraft_threshold", lambda *_: 1)


def every_guess_is_wrong(patch: Patch) -> None:
    """Drafts, keys and values are those of another verdict."""
    patch.setattr(Guesses, "find", find_another)


def nothing_is_drafted(patch: Patch) -> None:
    """The draft's rows fall far behind."""
    patch.setattr(AheadPolicy, "num_guesses", lambda *_: 0)
    patch.setattr(AheadPolicy, "redraft_threshold", lambda *_: NEVER)


def no_patience(patch: Patch) -> None:
    """The target goes on without a packet that is not there when it looks."""
    patch.setattr(message_exchange, "SHORTEST_PATIENCE", 0.0)
    patch.setattr(message_exchange, "_ROUNDS_OF_PATIENCE", 0)


BENT: list[Bend] = [
    no_guess_matches, nothing_is_drafted, no_patience, every_guess_is_wrong, as_it_is
]  # fmt: skip


def cases(bends: list[Bend], others: dict[str, Bend] | None = None) -> list[tuple[str, Bend]]:
    """All of them of three ranks, and one in other placements. Where one rank drafts for two, only what comes in time
    is another matter; where two draft for one, what both do with the same guess."""
    ways = {"1+1": bends, **{name: [bend] for name, bend in (others or {}).items()}}
    return [(name, bend) for name in NAMES for bend in ways.get(name, [])]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same `target`, `noisy` and `short`, a noisy draft of a short context, for all ranks."""
    path = None
    if MPI.COMM_WORLD.rank == 0:
        path = tmp_path_factory.mktemp("ahead")
        target = make_checkpoint(path / "target", seed=1, num_hidden_layers=2)
        for name in ("noisy", "short"):
            noisy_copy(path / name, target, 0.05)
        config = json.loads((path / "short" / "config.json").read_text())
        (path / "short" / "config.json").write_text(json.dumps(config | {"max_position_embeddings": DRAFT_CONTEXT}))
    return from_rank_0(path)


def use(llm: LLM) -> dict[str, Any]:
    """Greedy and sampled rows, and some prompts once more, whose beginnings are known by then."""
    texts = tokens_of(llm.generate(prompts(), SamplingParams(max_tokens=COUNT)))
    sampled = llm.generate(prompts(), sampling())
    again = llm.generate(
        [[*prompt, 5] for prompt in prompts()[2:4]], SamplingParams(max_tokens=9, temperature=0.5, seed=3)
    )
    completions = [completion.statistics for output in sampled + again for completion in output.completions]
    return {
        "texts": [tokens for (tokens,) in texts],
        "sampled": [tokens_of(sampled), tokens_of(again)],
        "preempted": sum(statistics.num_preemptions for statistics in completions),
        "cached": sum(statistics.num_cached_prompt_tokens for statistics in completions),
        "totals": llm.statistics(),
    }


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, Any]:
    """transformers' greedy texts, and the sampled ones of one process; at rank 0."""
    if MPI.COMM_WORLD.rank != 0:
        return {}
    reference = Reference(folder / "target")
    texts = [reference.greedy(prompt, COUNT) for prompt in prompts()]
    return {"texts": texts, "sampled": alone(job_configuration(folder, ONE_SLOT), use)["sampled"]}


@pytest.fixture(scope="module")
def expected_with_probs(folder: Path, expected: dict[str, Any]) -> dict[str, Any]:
    """The same where sampled rows are accepted by draft_probs."""
    if MPI.COMM_WORLD.rank != 0:
        return {}
    return expected | {"sampled": alone(job_configuration(folder, ONE_SLOT, **WITH_PROBS), use)["sampled"]}


def run_bent(folder: Path, name: str, expected: dict[str, Any], draft: str, **sections: Any) -> dict[str, Any] | None:
    """A job's results at rank 0, once they are seen to be the expected ones."""
    found = run_job(job_configuration(folder, HERE[name], draft, **sections), use)
    if found is not None:
        assert found["texts"] == expected["texts"]
        assert found["sampled"] == expected["sampled"]
    return found


def foreseen(found: dict[str, Any]) -> int:
    """Rounds of rows whose drafts were there before the verdict."""
    return sum(found["totals"]["foresight"]["foreseen_by_place"])


@pytest.mark.parametrize(("name", "bend"), cases(BENT, {"1+2": no_patience, "2+1": every_guess_is_wrong}))
def test_guesses_change_no_text(
    folder: Path, expected: dict[str, Any], name: str, bend: Bend, monkeypatch: Patch
) -> None:
    bend(monkeypatch)
    found = run_bent(folder, name, expected, "noisy")
    if found is None:
        return
    totals = found["totals"]
    accepted, drafted = totals["num_accepted_draft_tokens"], totals["num_draft_tokens"]
    assert found["cached"] > 0
    if bend is as_it_is:
        assert foreseen(found) > 20 and accepted > 60 and totals["num_guesses"] > 100
    if bend is no_guess_matches:
        assert totals["foresight"]["num_redrafted_rounds"] > 20 and accepted > 60
    if bend is every_guess_is_wrong:
        assert foreseen(found) > 20 and accepted < 0.8 * drafted
    if bend is nothing_is_drafted:
        assert drafted == accepted == totals["num_guesses"] == 0


@pytest.mark.parametrize(
    ("ahead", "outnumber", "guesses"), [("auto", True, False), ("auto", False, True), ("on", True, True)]
)
@pytest.mark.parametrize("name", NAMES if SIZE == 3 else [])  # whatever ranks there are
def test_auto_guesses_where_ranks_have_cores(
    folder: Path, expected: dict[str, Any], name: str, ahead: str, outnumber: bool, guesses: bool, monkeypatch: Patch
) -> None:
    """And the start measures both ways, after which texts are the target's own."""
    monkeypatch.setattr(policies, "outnumber_cores", lambda *_: outnumber)

    def run(llm: LLM) -> dict[str, Any]:
        policy = llm.engine.orchestrator._ahead
        assert policy is not None
        measured, policy._always_guesses = policy._costs, True  # whatever is faster here
        found = use(llm)
        told = list(policy._hit_chances) != CandidateBudget(3).hit_chances(3)
        return found | {"told": told, "measured": {rows: [*costs.ahead] for rows, costs in measured.items()}}

    speculation = {"draft_len": 3, "ahead": ahead}
    found = run_job(job_configuration(folder, HERE[name], speculation=speculation), run)
    if found is None:
        return
    assert found["texts"] == expected["texts"] and found["sampled"] == expected["sampled"]
    totals, measured = found["totals"], found["measured"]
    assert (totals["num_guesses"] > 0) == found["told"] == guesses, "chances come from the draft's leader"
    assert totals["num_accepted_draft_tokens"] > 20
    assert set(measured) == ({1, 4} if guesses and ahead == "auto" else set())
    assert all(min(counts) >= rows for rows, counts in measured.items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", NAMES if SIZE == 3 else [])  # shards of a target round otherwise than the draft
def test_a_draft_that_is_the_target_is_never_rejected(folder: Path, name: str, dtype: str) -> None:
    """Of a guess that came true, keys and values are kept as a fresh draft's are, however blocks are laid out."""

    def use(llm: LLM) -> dict[str, Any]:
        llm.generate(prompts(), SamplingParams(max_tokens=80, ignore_eos=True))
        return llm.statistics()

    blocks = {"max_tokens": 1024, "block_size": 16}
    totals = run_job(job_configuration(folder, HERE[name], "target", kv_cache=blocks, dtype=dtype), use)
    if totals is not None:
        assert sum(totals["foresight"]["foreseen_by_place"]) > 50
        assert totals["num_accepted_draft_tokens"] == totals["num_draft_tokens"] > 200


@pytest.mark.parametrize(("name", "bend"), cases([no_patience, as_it_is]))
def test_rows_are_preempted_and_outgrow_the_drafts_context(
    folder: Path, expected: dict[str, Any], name: str, bend: Bend, monkeypatch: Patch
) -> None:
    """On few blocks, where a prompt is longer than the draft's context and others become so."""
    bend(monkeypatch)
    found = run_bent(folder, name, expected, "short", kv_cache={"max_tokens": 104, "block_size": 8})
    if found is None:
        return
    assert found["preempted"] > 0
    assert bend is no_patience or foreseen(found) > 10


@pytest.mark.parametrize(
    ("name", "bend"), cases([no_guess_matches, no_patience, as_it_is], {"2+1": as_it_is, "2+2": as_it_is})
)
def test_with_draft_probs_the_texts_are_those_of_one_process(
    folder: Path, expected_with_probs: dict[str, Any], name: str, bend: Bend, monkeypatch: Patch
) -> None:
    """What was foreseen is drawn as a fresh draft would be, and the target waits for it, whatever its patience."""
    bend(monkeypatch)
    found = run_bent(folder, name, expected_with_probs, "noisy", **WITH_PROBS)
    if found is not None:
        assert (foreseen(found) > 20) == (bend is not no_guess_matches)


@pytest.mark.parametrize("name", [name for name in ("1+1", "2+1") if name in HERE])
def test_completions_are_cancelled_in_the_middle_of_guesses(folder: Path, name: str, expected: dict[str, Any]) -> None:
    """Neither store loses a block, and those that run beside them or come afterwards lose nothing."""

    def interrupted(llm: LLM) -> dict[str, Any]:
        engine = llm.engine
        for number in range(4):
            identifiers = [
                engine.add_request(prompt_of(10 + row, seed=row), SamplingParams(max_tokens=60, ignore_eos=True))
                for row in range(3)
            ]
            for _ in range(3 + number):
                engine.step()
            for identifier in identifiers:
                engine.abort_request(identifier)
            llm.check_idle()
        return use(llm)

    found = run_job(job_configuration(folder, HERE[name]), interrupted)
    if found is not None:
        assert found["texts"] == expected["texts"] and found["sampled"] == expected["sampled"]
