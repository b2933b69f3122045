"""What the ranks of a job do around its rounds: they wait quietly, take Ctrl-C, close all they hold, refuse together.

Each test opens an LLM on all ranks of the running job, as those of test_jobs.py do.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
from jobs import HERE, SIZE, job_configuration, place, prompts, run_job
from meeting import meet
from mpi4py import MPI
from pipelines import configuration, interrupt_call, noisy_copy, prompt_of, tokens_of

from parallel import control
from parallel.groups import Groups
from parallel.mailbox import MpiMailbox
from parallel.transports import mpi as transports_mpi
from parallel.waiting import Waiter
from trtrun import LLM, SamplingParams
from trtrun.errors import PlacementError, TrtrunError
from trtrun.roles.round import Worker
from trtrun.start import job
from trtrun.wire.packets import VERDICT_TAG

pytestmark = pytest.mark.mpi
OF_THREE = [name for name in HERE if name == "1+1"]
"""More ranks wait and end alike."""


@pytest.mark.parametrize("name", OF_THREE)
def test_a_waiting_job_is_quiet(folder: Path, name: str) -> None:
    """Ranks that wait for the next call use little of their cores: well under a third of the time."""
    world = MPI.COMM_WORLD
    processes = world.allgather(os.getpid())

    def cpu_seconds(process: int) -> float:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def use(llm: LLM) -> list[float]:
        llm.generate(prompts()[:2], SamplingParams(max_tokens=8))
        before, started = [cpu_seconds(process) for process in processes], time.monotonic()
        time.sleep(1.5)  # the span that is measured, no synchronisation
        span = time.monotonic() - started
        return [(cpu_seconds(process) - start) / span for process, start in zip(processes, before, strict=True)]

    shares = run_job(job_configuration(folder, HERE[name]), use)
    if shares is not None:
        print(f"shares of a core while idle: {[round(share, 3) for share in shares]}")
        assert max(shares[1:]) < 0.3, shares


@pytest.mark.parametrize("has_cores", [False, True])
@pytest.mark.parametrize("name", OF_THREE)
def test_ranks_spin_only_on_cores_of_their_own(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, has_cores: bool
) -> None:
    allowed: list[bool] = []

    class Spy(Waiter):
        def __init__(self, may_spin: bool) -> None:
            allowed.append(may_spin)
            super().__init__(may_spin)

    for module in (control, transports_mpi):
        monkeypatch.setattr(module, "Waiter", Spy)
    monkeypatch.setattr(job, "has_free_cores", lambda *_: has_cores)
    found = run_job(job_configuration(folder, HERE[name]), lambda llm: llm.generate(prompts()[:1])[0])
    # One for plans or reports; at workers one for each peer of the link.
    peers = 0 if MPI.COMM_WORLD.rank == 0 else MPI.COMM_WORLD.size - 1
    assert allowed[0] == has_cores and set(allowed) == {has_cores} and len(allowed) >= 1 + peers
    assert (found is not None) == (MPI.COMM_WORLD.rank == 0)


@pytest.mark.parametrize("name", [name for name in ("2+1",) if name in HERE])
def test_ranks_that_draft_together_run_the_same_rounds_before_the_end(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is told of the end before a verdict that the other has had: it would be missed in that one's next round."""
    is_held, ended = folder / "verdicts are held", list[bool]()
    receive, take = control.ControlPlane.receive, MpiMailbox.take

    def watched(plane: control.ControlPlane, *limits: Any, **others: Any) -> bytes | None:
        payload = receive(plane, *limits, **others)
        ended.extend([True] * plane.is_shut_down)
        return payload

    def held(mail: MpiMailbox, rank: int, tag: int) -> bytes | None:
        return None if tag == VERDICT_TAG and is_held.exists() and not ended else take(mail, rank, tag)

    if MPI.COMM_WORLD.rank == 2:
        monkeypatch.setattr(control.ControlPlane, "receive", watched)
        monkeypatch.setattr(MpiMailbox, "take", held)

    def use(llm: LLM) -> None:
        llm.generate(prompts()[:1], SamplingParams(max_tokens=8))
        is_held.touch()
        llm.generate(prompts()[:1], SamplingParams(max_tokens=4))

    run_job(job_configuration(folder, HERE[name]), use)  # which none of the ranks leaves otherwise
    assert is_held.exists()
    if MPI.COMM_WORLD.rank == 2:
        assert ended == [True]


@pytest.mark.parametrize("name", OF_THREE)
def test_workers_close_their_groups_at_the_end_behind_their_graphs(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []
    for owner in (Worker, Groups):

        def close(self: Any, owner: Any = owner, original: Any = owner.close) -> None:
            closed.append(owner.__name__)
            original(self)

        monkeypatch.setattr(owner, "close", close)
    run_job(job_configuration(folder, HERE[name]), lambda llm: llm.generate(prompts()[:1]))
    assert closed == (["Worker", "Groups"] if MPI.COMM_WORLD.rank else [])


@pytest.mark.mpi(min_size=2)
def test_a_world_of_another_size_is_refused_with_both_counts(folder: Path) -> None:
    """On every rank, before anything is loaded, so that none is left waiting."""
    for size, devices in ((3, place("a", "b")), (4, place("a", "bc")), (5, place("ab", "cd")), (1, place("a", "a"))):
        if size == SIZE:
            continue
        with pytest.raises(PlacementError) as caught:
            LLM(config=job_configuration(folder, devices))
        message = str(caught.value)
        assert f"{size} rank" in message and f"{SIZE} were started" in message
        assert "\n" not in message


@pytest.mark.parametrize("name", [name for name in ("1+1", "2+2") if name in HERE])
def test_a_model_that_cannot_be_loaded_is_said_once_and_lets_all_ranks_go(
    folder: Path, tmp_path: Path, name: str
) -> None:
    """Only the draft's weights are missing: the draft's ranks alone see it, and all ends well everywhere."""
    path = MPI.COMM_WORLD.bcast(tmp_path)
    if MPI.COMM_WORLD.rank == 0:
        noisy_copy(path / "draft", folder / "target", 0.01)
        (path / "draft" / "model.safetensors").write_bytes(b"broken")
    meet()
    config = configuration(folder / "target", path / "draft", devices=HERE[name])
    if MPI.COMM_WORLD.rank == 0:
        with pytest.raises(Exception, match=r"draft.*model\.safetensors") as caught:
            LLM(config=config)
        assert "\n" not in str(caught.value)
    else:
        assert LLM.open(config) is None


@pytest.mark.parametrize("name", OF_THREE)
def test_an_llm_on_a_worker_rank_says_how_a_program_is_written(folder: Path, name: str) -> None:
    config = job_configuration(folder, HERE[name])
    if MPI.COMM_WORLD.rank == 0:
        with LLM(config=config) as llm:
            assert llm.generate([prompt_of(5)], SamplingParams(max_tokens=3))[0].error is None
    else:
        with pytest.raises(TrtrunError, match=r"trtrun\.open_llm\(config\)"):
            LLM(config=config)


@pytest.mark.parametrize("plans_ahead", [0, 1])
@pytest.mark.parametrize("name", OF_THREE)
def test_an_interrupt_under_mpi_leaves_the_engine_usable(folder: Path, name: str, plans_ahead: int) -> None:
    """Ctrl-C while plans are made and sent, while rank 0 waits for a report, and while a result is committed."""
    config = job_configuration(folder, HERE[name], scheduler={"plans_ahead": plans_ahead})

    def use(llm: LLM) -> None:
        sampling = SamplingParams(max_tokens=20, ignore_eos=True)
        expected = tokens_of(llm.generate([prompt_of(9), prompt_of(30)], sampling))
        for owner, name in (
            (llm.engine.scheduler, "schedule"),
            (llm.engine.orchestrator._ranks, "publish"),
            (llm.engine.orchestrator._ranks, "collect"),
            (llm.engine.scheduler, "commit"),
        ):
            with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
                interrupt_call(patch, owner, name, number=3)
                llm.generate([prompt_of(9), prompt_of(30)], sampling)
            llm.check_idle()
            assert tokens_of(llm.generate([prompt_of(9), prompt_of(30)], sampling)) == expected

    run_job(config, use)
