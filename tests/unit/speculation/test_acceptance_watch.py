"""A drafter that is not worth its time is named once, with its numbers by place; no other is."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint
from pipelines import make_llm, noisy_copy, prompt_of, useless_draft

from trtrun import SamplingParams
from trtrun.rounds import orchestrator
from trtrun.speculation import acceptance as acceptance_watch
from trtrun.speculation import pacing
from trtrun.speculation.acceptance import AcceptanceWatch
from trtrun.speculation.round_costs import RoundCosts
from trtrun.start import policies


def watched(acceptances: list[tuple[int, int]], times: int = 100) -> AcceptanceWatch:
    watch = AcceptanceWatch(3, "see the oracle")
    for _ in range(times):
        watch.record(acceptances)
    return watch


def test_it_counts_by_place() -> None:
    """Of 100 times a first token that is rejected, one that is kept with the second rejected, and one of one token."""
    said = watched([(3, 0), (3, 1), (1, 0), (1, 0), (2, 0)]).complain(False)
    assert said is not None
    assert "tokens 20% of 500, 0% of 100; that is seldom: see the oracle; " in said


def test_it_says_another_thing_of_a_drafter_that_is_often_right() -> None:
    said = watched([(2, 2), (2, 1), (2, 0)]).complain(False)
    assert said is not None
    assert "tokens 67% of 300, 50% of 200; that is often, but a round with drafts takes longer" in said


@pytest.mark.parametrize(
    ("acceptances", "times", "pays", "speaks"),
    [
        ([(3, 0)], 300, False, True),
        ([(3, 0)], 300, None, True),
        ([(3, 0)], 300, True, False),
        ([(3, 0)], 200, None, False),  # too early
        ([(3, 0)], 16, False, True),  # as long as anything is drafted
        ([(3, 0)], 15, False, False),
        ([(3, 0), (3, 1)], 300, None, False),  # nobody measures what it costs
        ([], 300, False, False),
    ],
)
def test_when_it_speaks(acceptances: list[tuple[int, int]], times: int, pays: bool | None, speaks: bool) -> None:
    watch = watched(acceptances, times)
    assert (watch.complain(pays) is not None) == speaks
    if speaks:
        watch.record([(3, 0)] * 300)
        assert watch.complain(pays) is None, "once"


@pytest.mark.parametrize("how", ["fixed", "measured"])
@pytest.mark.parametrize("is_useless", [True, False])
def test_a_job_tells_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    how: str,
    is_useless: bool,
) -> None:
    monkeypatch.setattr(acceptance_watch, "_ENOUGH_DRAFTS", 20)
    monkeypatch.setattr(acceptance_watch, "_ENOUGH_OF_FEW", 2)
    monkeypatch.setattr(pacing, "_HOPELESS_ROUNDS", 20 if is_useless else 1 << 30)
    for stake in ("_STAKE", "_MOST_STAKE"):  # a draft takes about as long as the target here
        monkeypatch.setattr(pacing, stake, 1e6)
    costs = {0: 1.0, 1: 1.1, 2: 1.2}  # so is it wherever the test runs, and whatever runs beside it
    monkeypatch.setattr(policies, "measure_round_costs", lambda *_: RoundCosts({1: costs, 64: costs}))
    target = make_checkpoint(tmp_path / "target", seed=1)
    draft: Any = useless_draft(tmp_path / "draft") if is_useless else noisy_copy(tmp_path / "draft", target, 0.01)
    with (
        caplog.at_level(logging.WARNING, orchestrator.__name__),
        make_llm(target, draft, speculation={"draft_len": 2, "pacing": how}) as llm,
    ):
        for seed in range(2):
            llm.generate([prompt_of(9, seed=seed)], SamplingParams(max_tokens=60, ignore_eos=True))
    said = [record.message for record in caplog.records if "not worth their time" in record.message]
    assert len(said) == is_useless
    assert not said or "that is seldom: see whether draft.model was made for this target" in said[0]
