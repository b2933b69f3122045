"""Rounds on worker ranks do not wait for collections that look through what a start has made."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint
from meeting import from_rank_0
from mpi4py import MPI
from pipelines import configuration, prompt_of

from trtrun import SamplingParams, open_llm
from trtrun.start import job

SIZE = int(os.environ.get("OMPI_COMM_WORLD_SIZE", "1"))

pytestmark = pytest.mark.mpi


@pytest.mark.skipif(SIZE != 3, reason="of two ranks with a device, and the orchestrator")
def test_worker_ranks_serve_with_their_start_left_out(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    target: Path | None = None
    if MPI.COMM_WORLD.rank == 0:
        target = make_checkpoint(tmp_path_factory.mktemp("garbage") / "target", num_hidden_layers=2)
    target = from_rank_0(target)
    left_out: list[tuple[int, int]] = []
    serve = job.serve

    def noted(*given: Any) -> None:
        left_out.append((gc.get_freeze_count(), len(gc.get_objects())))
        serve(*given)

    monkeypatch.setattr(job, "serve", noted)
    config = configuration(target, None, devices=((), ("cpu:0", "cpu:1")))
    gc.unfreeze()
    try:
        with open_llm(config) as llm:
            if llm is not None:
                assert llm.generate([prompt_of(5)], SamplingParams(max_tokens=4))[0].error is None
                return
        ((frozen, looked_through),) = left_out
        assert frozen > 50 * looked_through, "modules alone are a hundred thousand objects"
        assert gc.get_freeze_count() == 0, "what this process does next may make garbage of the engine"
    finally:
        gc.freeze()  # as the tests begin: each later job would look through all modules
