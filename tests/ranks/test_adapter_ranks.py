"""Adapters of a target that is split over ranks: each reads its share of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from adapters import make_adapter
from jobs import COUNT, HERE, alone, job_configuration, prompts, run_job
from mpi4py import MPI
from pipelines import tokens_of

from trtrun import LLM, SamplingParams

pytestmark = pytest.mark.mpi


def use(llm: LLM) -> list[Any]:
    names = (None, "a", "b")
    rows = [
        SamplingParams(max_tokens=COUNT, seed=place, temperature=0.8 * (place % 2), lora_name=names[place % 3])
        for place in range(6)
    ]
    return tokens_of(llm.generate(prompts(), rows))


@pytest.mark.parametrize("name", [name for name, devices in HERE.items() if len(devices[1]) > 1])
def test_split_adapters_write_what_one_process_writes(folder: Path, name: str) -> None:
    """With drafts and without, projections of both kinds."""
    target, path = folder / "target", folder / f"adapters {name}"
    if MPI.COMM_WORLD.rank == 0:
        make_adapter(path / "a", target, rank=4, seed=1)
        make_adapter(path / "b", target, rank=3, seed=2, modules=["k_proj", "o_proj", "down_proj"])
    MPI.COMM_WORLD.barrier()
    adapters = {"adapters": {one: str(path / one) for one in ("a", "b")}, "adapter_slots": {"max_rank": 4}}
    found = run_job(job_configuration(folder, HERE[name], **adapters), use)
    if found is not None:
        assert found == alone(job_configuration(folder, ((), ("cpu:0",)), **adapters), use)
        assert len({text for (text,) in found}) == len(found)
