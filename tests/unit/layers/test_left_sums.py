"""Sums over ranks that halves of a layer leave to the norm behind them. What kernels make of these is in
tests/unit/gpu_kernels/test_rank_sums.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint
from family_checkpoints import write_family
from paged import PagedModel
from pipelines import configuration, prompt_of

from parallel.communicator import Communicator, PeerRows
from parallel.groups import open_groups
from trtrun.configuration.topology import make_topology
from trtrun.kernels.arguments import RankSum
from trtrun.kernels.torch.operations import TorchOperations
from trtrun.start import startup
from trtrun.start.job_spec import JobSpec
from trtrun.start.startup import RankStartup


@pytest.mark.parametrize(
    ("family", "left"),
    [(None, 4), ("apertus", 2), ("qwen3_moe", 4), ("glm4", 0), ("granite", 0)],
)
def test_they_are_left_where_nothing_stands_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str | None, left: int
) -> None:
    """No bias, no norm of what is added, and no factor; and logits are those of sums that are made at once, to the
    bit."""
    if family is None:
        path = make_checkpoint(tmp_path / "model", num_hidden_layers=2)
    else:
        path = write_family(tmp_path, family, num_hidden_layers=2)
    text = prompt_of(9)
    expected = PagedModel(path, tp_size=2).forward([[(0, 0, text)]], wanted=[3, 8])
    seen: list[RankSum] = []
    make = TorchOperations.added_up

    def added_up(self: TorchOperations, delta: torch.Tensor | RankSum) -> torch.Tensor:
        if isinstance(delta, RankSum):
            seen.append(delta)
        return make(self, delta)

    def takes(self: TorchOperations, part: torch.Tensor, communicator: Communicator) -> bool:
        return True

    monkeypatch.setattr(TorchOperations, "added_up", added_up)
    monkeypatch.setattr(TorchOperations, "sums_ranks", takes)
    model = PagedModel(path, tp_size=2)
    assert torch.equal(model.forward([[(0, 0, text)]], wanted=[3, 8]), expected)
    assert len(seen) == 2 * left, "of both ranks"


@pytest.mark.parametrize("works_elsewhere", [True, False])
@pytest.mark.parametrize("works", [True, False])
def test_they_are_left_only_where_all_ranks_have_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, works: bool, works_elsewhere: bool
) -> None:
    """Else some would wait for a rank that sums by its transport."""
    config = configuration(make_checkpoint(tmp_path / "model"), None)
    groups = open_groups(None, make_topology(config), torch.device("cpu"))
    assert groups.target is not None
    groups.target.peer_rows = PeerRows(0, 2, 8, 4096, 4, 0, 0, (0,))
    monkeypatch.setattr(startup, "triton_works", lambda device_type: works)
    monkeypatch.setattr(groups.target, "all_reduce", lambda lacking: lacking + int(not works_elsewhere))
    RankStartup(JobSpec(config), 0, groups)._choose_sums()
    assert (groups.target.peer_rows is not None) == (works and works_elsewhere)
