"""Rounds before the first request over real ranks: draft ranks of their own, and a rank that has both engines."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint
from meeting import from_rank_0
from mpi4py import MPI
from pipelines import Reference, configuration, noisy_copy, prompt_of, tokens_of

from trtrun import SamplingParams, open_llm
from trtrun.core.nouns import FIRST_WARM_UP_ROUND
from trtrun.rounds.orchestrator import Orchestrator
from trtrun.start import policies

SIZE = int(os.environ.get("OMPI_COMM_WORLD_SIZE", "1"))
PLACES = {
    3: {"apart": (("cpu:0",), ("cpu:1",)), "beside": (("cpu:0",), ("cpu:0", "cpu:1"))},
}
HERE = PLACES.get(SIZE, {})

WAYS = [("apart", "auto"), ("apart", "off"), ("beside", "off")]

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize(("name", "ahead"), [(name, ahead) for name, ahead in WAYS if name in HERE])
def test_requests_find_ranks_as_if_no_round_had_been_run(
    tmp_path_factory: pytest.TempPathFactory, name: str, ahead: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on GPUs, where rounds of each kind are run first; what draft ranks report of them late counts for nobody."""
    folder: Path | None = None
    if MPI.COMM_WORLD.rank == 0:
        folder = tmp_path_factory.mktemp("warm-up")
        noisy_copy(folder / "draft", make_checkpoint(folder / "target", seed=1, num_hidden_layers=2), 0.05)
    folder = from_rank_0(folder)
    noted: list[int] = []
    note = Orchestrator._note_draft

    def logged(orchestrator: Orchestrator, report: Any) -> None:
        noted.append(report.round_index)
        note(orchestrator, report)

    monkeypatch.setattr(Orchestrator, "_note_draft", logged)
    monkeypatch.setattr(policies, "_uses_gpus", lambda config: True)
    monkeypatch.setattr(policies, "outnumber_cores", lambda *_: False)  # both ways of drafting ahead are measured, too
    speculation = {"draft_len": 3, "ahead": ahead}
    config = configuration(folder / "target", folder / "draft", devices=HERE[name], speculation=speculation)
    prompts = [prompt_of(length, seed=length) for length in (5, 17, 30)]
    with open_llm(config) as llm:
        if llm is None:
            return
        found = [tokens for (tokens,) in tokens_of(llm.generate(prompts, SamplingParams(max_tokens=12)))]
        llm.check_idle()
        rounds = llm.statistics()["num_rounds"]
    reference = Reference(folder / "target")
    assert found == [reference.greedy(prompt, 12) for prompt in prompts]
    assert all(index < FIRST_WARM_UP_ROUND for index in noted)
    assert 0 < rounds < 40
