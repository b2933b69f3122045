"""Layers that keep states of rows, over real ranks: texts are those of one process without drafts, whatever is drafted
beside or ahead, guessed, late or preempted, and however the layers are shared out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from decaying_family import decaying_family, make_decaying_checkpoint
from jobs import HERE, alone, job_configuration, prompts, run_job, sampling
from meeting import from_rank_0
from mpi4py import MPI
from pipelines import configuration, noisy_copy, tokens_of
from test_ahead import BENT, Bend, as_it_is, cases, no_patience

from trtrun import LLM, SamplingParams

pytestmark = pytest.mark.mpi(min_size=3)
ONE_SLOT = ((), ("cpu:0",))
DRAFTED_APART = [name for name in ("1+1", "1+2", "2+1") if name in HERE]


@pytest.fixture(scope="module", autouse=True)
def family() -> Iterator[None]:
    with decaying_family():
        yield


@pytest.fixture(scope="module")
def folder(family: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same `target` and `noisy`, a draft, for all ranks; both keep states."""
    path = None
    if MPI.COMM_WORLD.rank == 0:
        path = tmp_path_factory.mktemp("states")
        noisy_copy(path / "noisy", make_decaying_checkpoint(path / "target", num_hidden_layers=2), 0.03)
    return from_rank_0(path)


def use(llm: LLM) -> dict[str, Any]:
    """Rows of several kinds together, then their prompts once more with another end."""
    found = llm.generate(prompts(), sampling())
    again = llm.generate([[*prompt, 5] for prompt in prompts()], SamplingParams(max_tokens=20))
    completions = [completion.statistics for output in found + again for completion in output.completions]
    preempted = sum(statistics.num_preemptions for statistics in completions)
    return {"texts": [tokens_of(found), tokens_of(again)], "preempted": preempted, "totals": llm.statistics()}


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[Any]:
    """Texts of one process without a draft; at rank 0."""
    if MPI.COMM_WORLD.rank != 0:
        return []
    config = configuration(folder / "target", None, scheduler={"max_batch_size": 1})
    texts: list[Any] = alone(config, use)["texts"]
    return texts


@pytest.mark.parametrize("name", [name for name in HERE if name not in DRAFTED_APART])
def test_layers_are_shared_out(folder: Path, expected: list[Any], name: str) -> None:
    found = run_job(job_configuration(folder, HERE[name], kv_cache={"max_tokens": 104, "block_size": 8}), use)
    if found is not None:
        assert found["texts"] == expected
        assert found["preempted"] > 0
        assert (found["totals"]["num_accepted_draft_tokens"] > 20) == bool(HERE[name][0])


@pytest.mark.parametrize(("name", "bend"), cases(BENT, {"1+2": no_patience, "2+1": as_it_is}))
def test_drafts_made_ahead_change_no_text(
    folder: Path, expected: list[Any], name: str, bend: Bend, monkeypatch: pytest.MonkeyPatch
) -> None:
    bend(monkeypatch)
    found = run_job(job_configuration(folder, HERE[name]), use)
    if found is None:
        return
    assert found["texts"] == expected
    totals = found["totals"]
    if bend is as_it_is:
        assert totals["num_guesses"] > 50 and totals["num_accepted_draft_tokens"] > 60


@pytest.mark.parametrize("name", ["1+1"] if "1+1" in HERE else [])  # shards of a target round otherwise than the draft
def test_a_draft_that_is_the_target_is_never_rejected(folder: Path, name: str) -> None:
    """What a guess leaves behind in states is what a fresh draft would."""

    def generate(llm: LLM) -> dict[str, Any]:
        llm.generate(prompts(), SamplingParams(max_tokens=80, ignore_eos=True))
        return llm.statistics()

    totals = run_job(job_configuration(folder, HERE[name], "target"), generate)
    if totals is not None:
        assert sum(totals["foresight"]["foreseen_by_place"]) > 50
        assert totals["num_accepted_draft_tokens"] == totals["num_draft_tokens"] > 200
