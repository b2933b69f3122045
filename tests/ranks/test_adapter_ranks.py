"""Adapters of a target that is split over ranks: each reads its share of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from adapters import make_adapter
from jobs import COUNT, HERE, alone, job_configuration, prompts, run_job
from meeting import meet
from mpi4py import MPI
from pipelines import tokens_of

from trtrun import LLM, SamplingParams
from trtrun.engine.runner import Engine
from trtrun.errors import CheckpointError

pytestmark = pytest.mark.mpi
TRIED = [name for name in ("a+ab", "1+1", "no draft, 2") if name in HERE]


def use(llm: LLM, names: Sequence[str | None] = (None, "a", "b")) -> list[Any]:
    rows = [
        SamplingParams(max_tokens=COUNT, seed=place, temperature=0.8 * (place % 2), lora_name=names[place % 3])
        for place in range(6)
    ]
    return tokens_of(llm.generate(prompts(), rows))


@pytest.mark.parametrize("name", TRIED)
def test_split_adapters_write_what_one_process_writes(folder: Path, name: str) -> None:
    """With drafts and without, projections of both kinds; one adapter is the draft's, too, made ahead or not."""
    target, path = folder / "target", folder / f"adapters {name}"
    if MPI.COMM_WORLD.rank == 0:
        make_adapter(path / "a", target, rank=4, seed=1)
        make_adapter(path / "b", target, rank=3, seed=2, modules=["k_proj", "o_proj", "down_proj"])
    meet()
    adapters = {"adapters": {one: str(path / one) for one in ("a", "b")}, "adapter_slots": {"max_rank": 4}}
    drafts = {"draft_adapters": {"a": str(path / "a")}} if HERE[name][0] else {}
    found = run_job(job_configuration(folder, HERE[name], **adapters, **drafts), use)
    if found is not None:
        assert found == alone(job_configuration(folder, ((), ("cpu:0",)), **adapters), use)
        assert len({text for (text,) in found}) == len(found)


@pytest.mark.parametrize("name", TRIED[:1])
def test_a_rank_that_cannot_load_has_all_refuse(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing changes then; and what all can load is there for the next request."""
    target, path = folder / "target", folder / "adapters loaded"
    if MPI.COMM_WORLD.rank == 0:
        make_adapter(path / "a", target, seed=1)
    if MPI.COMM_WORLD.rank == MPI.COMM_WORLD.size - 1:
        original, calls = Engine.read_adapter, []

        def read(engine: Engine, path: Path, on_progress: Callable[[], None]) -> Callable[[int], None]:
            calls.append(path)
            if len(calls) == 1:
                raise CheckpointError("the disk of this host is empty")
            return original(engine, path, on_progress)

        monkeypatch.setattr(Engine, "read_adapter", read)
    meet()

    def load_and_use(llm: LLM) -> list[Any]:
        with pytest.raises(CheckpointError, match="the disk of this host is empty"):
            llm.load_adapter("a", path / "a")
        assert llm.generate([[1]], SamplingParams(lora_name="a"))[0].error is not None
        llm.load_adapter("a", path / "a")
        return use(llm, (None, "a", "a"))

    slots = {"adapter_slots": {"max_loaded": 1, "max_rank": 4}}
    found = run_job(job_configuration(folder, HERE[name], **slots), load_and_use)
    if found is not None:
        adapted = {"adapters": {"a": str(path / "a")}, **slots}
        expected = alone(job_configuration(folder, ((), ("cpu:0",)), **adapted), lambda llm: use(llm, (None, "a", "a")))
        assert found == expected
