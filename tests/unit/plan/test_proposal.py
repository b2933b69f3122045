"""What is chosen where a command line leaves it open: who drafts, and on which devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint

from launch.jobs.plan import proposal
from launch.jobs.plan.proposal import choose_open_keys
from trtrun.errors import CheckpointError, ConfigError


@pytest.fixture
def target(tmp_path: Path) -> str:
    """Four heads of queries, two of keys and values, 28 of the MLP's numbers a head."""
    return str(make_checkpoint(tmp_path / "target"))


def chosen(gpus: int | None, **values: Any) -> dict[str, Any]:
    return {choice.key: choice.value for choice in choose_open_keys(values, gpus)}


@pytest.mark.parametrize(
    ("draft", "method"),
    [("asset:draft", "draft_target"), ("asset:pard_draft", "draft_target")]
    + [(f"asset:{name}", name) for name in ("eagle3", "medusa")],
)
def test_the_files_of_a_draft_say_how_it_drafts(draft: str, method: str) -> None:
    found = chosen(0, target={"model": "asset:target"}, draft={"model": draft})
    placed = {"draft.devices": ["cpu:0"]} if method == "draft_target" else {}
    assert found == {"speculation.method": method, "target.devices": ["cpu:0"], **placed}


def test_without_a_draft_the_text_drafts(target: str) -> None:
    assert chosen(0, target={"model": target}) == {"speculation.method": "ngram", "target.devices": ["cpu:0"]}
    assert chosen(0, target={"model": "asset:target"})["draft.model"] == "asset:draft"
    with pytest.raises(ConfigError, match="--draft names asset:draft, but method suffix drafts without a model"):
        chosen(0, target={"model": target}, draft={"model": "asset:draft"}, speculation={"method": "suffix"})


@pytest.mark.parametrize(("gpus", "most_bytes", "count"), [(1, 1, 1), (3, 1, 2), (4, 1, 4), (4, 150_000, 2), (4, 0, 1)])
def test_a_target_is_split_as_far_as_it_can_be_and_pays(
    target: str, monkeypatch: pytest.MonkeyPatch, gpus: int, most_bytes: int, count: int
) -> None:
    monkeypatch.setattr(proposal, "LEAST_SHARE", most_bytes or 1 << 40)
    assert 300_000 < proposal.bytes_of_weights(Path(target)) < 450_000
    found = chosen(gpus, target={"model": target}, speculation={"method": "none"})
    assert found == {"target.devices": list(range(count))}


def test_in_a_slurm_job_its_gpus_count(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it was granted to a shell on a host without any."""
    monkeypatch.setattr(proposal, "LEAST_SHARE", 1)
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node[7-8]")
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "2")
    assert chosen(None, target={"model": target}, speculation={"method": "none"}) == {"target.devices": [0, 1]}


def test_a_draft_is_where_the_target_is_as_far_as_it_can_be_split(target: str, tmp_path: Path) -> None:
    draft = str(make_checkpoint(tmp_path / "draft", num_attention_heads=2, head_dim=16))
    values = {"draft": {"model": draft}, "speculation": {"method": "draft_target"}}
    four = chosen(0, target={"model": target, "devices": [4, 5, 6, 7]}, **values)
    assert four == {"draft.devices": [4, 5]}
    assert chosen(0, target={"model": target, "devices": ["cpu:3"]}, **values) == {"draft.devices": ["cpu:3"]}


def test_a_model_that_is_not_supported_is_said_to_be(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "target")
    (model / "config.json").write_text('{"architectures": ["Unheard"]}', encoding="utf-8")
    with pytest.raises(CheckpointError, match="Unheard"):
        chosen(2, target={"model": str(model)})
