"""Which jobs go on when they lose their draft ranks, and the reason for those that do not."""

from __future__ import annotations

from typing import Any

import pytest

from parallel.mpi_rank import FAULT_TOLERANCE_VARIABLE, outlives_ranks
from trtrun.configuration.config import make_config
from trtrun.configuration.topology import make_topology
from trtrun.rounds import failures as draft_loss
from trtrun.rounds.failures import (
    describe_draft_loss,
    expendable_hosts,
    expendable_ranks,
    find_obstacle,
    losable_ranks,
    unawaited_ranks,
)

APART: dict[str, Any] = {
    "target": {"model": "asset:target", "devices": ["cpu:2", "cpu:3"]},
    "draft": {"model": "asset:draft", "devices": ["cpu:0", "cpu:1"]},
}
SHARED = {**APART, "draft": {"model": "asset:draft", "devices": ["cpu:1", "cpu:2"]}}
ALONE = {"target": APART["target"], "speculation": {"method": "none"}}


@pytest.fixture
def _ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_loss, "_goes_on_alone", lambda config: True)
    monkeypatch.setenv(FAULT_TOLERANCE_VARIABLE, "1")


@pytest.mark.usefixtures("_ahead")
@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (APART, None),
        (SHARED, "draft and target share a device"),
        (ALONE, "no rank drafts"),
        ({**APART, "launch": {"on_draft_loss": "end"}}, "launch.on_draft_loss is end"),
    ],
)
def test_a_job_goes_on_unless_something_is_in_the_way(values: dict[str, Any], reason: str | None) -> None:
    config = make_config(values)
    topology = make_topology(config)
    assert find_obstacle(config, topology) == reason
    assert expendable_ranks(config, topology) == losable_ranks(config, topology) == (() if reason else (1, 2))
    expected = None if values is ALONE else ("end", reason) if reason else ("continue", "")
    assert describe_draft_loss(config, topology) == expected


@pytest.mark.parametrize("use_logits", [False, True])
def test_a_target_waits_for_drafts_with_probabilities(use_logits: bool) -> None:
    config = make_config({**APART, "speculation": {"use_logits": use_logits}})
    topology = make_topology(config)
    assert unawaited_ranks(config, topology) == (() if use_logits else (1, 2))
    assert find_obstacle(config, topology) == ("the target waits for the draft in every round" if use_logits else None)


@pytest.mark.usefixtures("_ahead")
@pytest.mark.parametrize(
    ("target", "draft", "hosts"),
    [
        ({"a": ["cpu:0"]}, {"b": ["cpu:0"]}, {"b"}),
        ({"a": ["cpu:0"]}, {"b": ["cpu:0"], "c": ["cpu:0"]}, {"b", "c"}),
        ({"a": ["cpu:0"], "b": ["cpu:0"]}, {"b": ["cpu:1"], "c": ["cpu:0"]}, {"c"}),
        ({"a": ["cpu:0"], "b": ["cpu:0"]}, {"b": ["cpu:1"]}, set()),
        ({"a": ["cpu:0"]}, {"a": ["cpu:1"]}, set()),
    ],
)
def test_a_host_may_be_lost_that_has_draft_ranks_alone(target: Any, draft: Any, hosts: set[str]) -> None:
    values = {name: {"model": f"asset:{name}", "devices": at} for name, at in (("target", target), ("draft", draft))}
    config = make_config(values)
    assert expendable_hosts(config, make_topology(config)) == hosts


@pytest.mark.usefixtures("_ahead")
def test_an_mpi_that_ends_with_any_rank_loses_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FAULT_TOLERANCE_VARIABLE)
    config = make_config(APART)
    topology = make_topology(config)
    assert expendable_ranks(config, topology) == (1, 2)
    assert losable_ranks(config, topology) == ()
    described = describe_draft_loss(config, topology)
    assert described is not None and described[0] == "end" and "ULFM" in described[1]


@pytest.mark.parametrize(("value", "expected"), [("1", True), ("true", True), ("0", False), ("", False)])
def test_whether_mpi_goes_on_is_told_by_what_mpirun_sets(value: str, expected: bool) -> None:
    assert outlives_ranks({FAULT_TOLERANCE_VARIABLE: value}) is expected
    assert not outlives_ranks({})
