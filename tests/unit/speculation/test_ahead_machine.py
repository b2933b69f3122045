"""Ahead of verdicts or behind them: what the policy chooses comes close to the better of both within a text of 128
tokens, on machines whose times are written down."""

from __future__ import annotations

import random
import statistics
from dataclasses import replace

import pytest
from ahead_machine import DRAFT_LEN, H200, STEPS, AheadMachine

from trtrun.speculation.ahead.policy import AheadPolicy

TEXTS = 24


def speeds(machine: AheadMachine, *, measured: bool = True, tokens: int = 128, begins: int = 0) -> dict[str, float]:
    """Tokens a millisecond and row of texts behind verdicts, ahead of them, and as the policy chooses; each begins
    `begins` tokens after the start."""
    found = {"off": list[float](), "on": list[float](), "auto": list[float]()}
    for text in range(TEXTS):
        for way, of_way in found.items():
            costs = {machine.rows: replace(machine, generator=random.Random(text)).costs()} if measured else None
            steps, always = () if way == "off" else STEPS, way == "on"
            policy = AheadPolicy(steps, DRAFT_LEN, always_redrafts=False, always_guesses=always, costs=costs)
            playing = replace(machine, generator=random.Random(1000 + text))
            if begins:
                playing.speed(policy, begins)
            of_way.append(playing.speed(policy, tokens))
    return {way: statistics.harmonic_mean(of_way) for way, of_way in found.items()}


def slower_ahead(machine: AheadMachine, times: float) -> AheadMachine:
    """The same with guesses that take so many times as long."""
    return replace(machine, anticipating={count: times * took for count, took in machine.anticipating.items()})


@pytest.mark.parametrize("rows", H200)
def test_as_measured_drafting_ahead_is_chosen_where_it_is_better(rows: int) -> None:
    found = speeds(H200[rows])
    assert found["on"] > 1.1 * found["off"]
    assert found["auto"] > 0.98 * found["on"], found


@pytest.mark.parametrize(("rows", "times"), [(1, 1.6), (8, 1.3), (32, 1.3)])
def test_drafting_behind_verdicts_is_chosen_where_that_is_better_by_a_tenth(rows: int, times: float) -> None:
    found = speeds(slower_ahead(H200[rows], times))
    assert 1.05 < found["off"] / found["on"] < 1.2
    assert found["auto"] > 0.98 * found["off"], found


@pytest.mark.parametrize(("rows", "times"), [(1, 1.2), (1, 1.4), (8, 1.1), (32, 1.15), (8, 2.0), (32, 2.0)])
def test_between_and_beyond_it_is_never_far_from_the_better(rows: int, times: float) -> None:
    found = speeds(slower_ahead(H200[rows], times))
    assert found["auto"] > 0.97 * max(found["on"], found["off"]), found


@pytest.mark.parametrize(("rows", "times"), [(1, 1.0), (1, 2.0), (8, 1.0), (8, 1.6), (32, 1.0), (32, 1.6)])
def test_where_the_start_measured_nothing_it_is_learned(rows: int, times: float) -> None:
    found = speeds(slower_ahead(H200[rows], times), measured=False, tokens=1024, begins=256)
    assert found["auto"] > 0.96 * max(found["on"], found["off"]), found


def test_a_useless_draft_is_not_guessed_behind() -> None:
    """Guesses hardly ever hit."""
    machine = replace(H200[8], hits={8: 0.02, 32: 0.05, 128: 0.08})
    found = speeds(machine)
    assert found["auto"] > 0.97 * max(found["on"], found["off"]), found


def test_what_the_start_measured_wrongly_is_found_out() -> None:
    """Something else ran when it was measured: it said of guesses that they take three times as long."""
    machine = H200[1]
    costs = {1: slower_ahead(machine, 3.0).costs()}
    policy = AheadPolicy(STEPS, DRAFT_LEN, always_redrafts=False, costs=costs)
    machine = replace(machine, generator=random.Random(3))
    machine.speed(policy, 4096)
    assert machine.speed(policy, 512) > 0.95 * speeds(machine)["on"]
