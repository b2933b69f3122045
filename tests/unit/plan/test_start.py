"""What a plan says of a start: each estimate is a measured figure of the documents, and each mark the start's own."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint, make_draft
from pipelines import configuration

pytest.importorskip("triton", reason="needs triton: pip install triton")
from triton import knobs

from launch.jobs.placement.memory import JobMemory
from launch.jobs.plan import start, start_ranks
from launch.jobs.plan.start import StartPlan, plan_start
from parallel.groups import open_groups
from trtrun import LLM
from trtrun.configuration.config import RuntimeConfig
from trtrun.configuration.topology import make_topology
from trtrun.kernels.triton.compilation import compile_processes
from trtrun.start import startup
from trtrun.start.job_spec import JobSpec
from trtrun.start.kernels_ahead import KernelsAhead
from trtrun.start.startup import RankStartup

ROOT = Path(__file__).resolve().parents[3]
PERFORMANCE = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")


class Idle:
    """In the place of processes that compile."""

    def __init__(self, count: int) -> None:
        pass

    def close(self) -> None:
        """Nothing runs."""


@pytest.fixture(autouse=True)
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs as far as they are asked for their names, many cores, and an empty cache."""
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path / "cache"))
    monkeypatch.setattr(compile_processes, "CompileProcesses", Idle)
    monkeypatch.setattr(start, "count_processes", lambda num_ranks: 15)


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """A target and its draft."""
    target = make_checkpoint(tmp_path / "target", "LlamaForCausalLM", seed=1)
    return target, make_draft(tmp_path / "draft", target, 1)


def gpu_job(pair: tuple[Path, Path], draft: list[str], target: list[str], **settings: Any) -> RuntimeConfig:
    """Of CUDA devices."""
    return configuration(*pair, devices=(draft, target), **settings)


def plan(config: RuntimeConfig, absent: tuple[str, ...] = (), nccl: bool = True) -> StartPlan:
    """Of a job whose hosts are all this one."""
    topology = make_topology(config)
    return plan_start(JobMemory.read(JobSpec(config)), set(topology.hosts), absent, nccl)


def leave_mark(config: RuntimeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a start of one process end well, as far as its mark is concerned."""
    topology = make_topology(config)
    begun = RankStartup(JobSpec(config), 0, open_groups(None, topology, torch.device("cpu")))

    def kernels(like: Any, device: torch.device, num_ranks: int, longest: int) -> KernelsAhead:
        ahead = KernelsAhead(like, device, num_ranks, longest)
        ahead.finish(5)
        raise KeyboardInterrupt

    monkeypatch.setattr(startup, "KernelsAhead", kernels)
    with pytest.raises(KeyboardInterrupt):
        begun.load(lambda done, total: None)


def phase(found: StartPlan, name: str) -> start.StartPhase:
    """The only one of its name."""
    (one,) = (one for one in found.phases if one.name == name)
    return one


def test_the_figures_are_those_of_the_documents() -> None:
    table = PERFORMANCE[PERFORMANCE.index("| until the end of | cold caches | warm |") :].split("\n\n")[0]
    rows = [[cell.strip() for cell in line.split("|")[2:4]] for line in table.splitlines()[2:]]
    cold, warm = [float(row[0]) for row in rows], list[float]()
    for row in rows:
        warm.append(float(row[1]) if row[1] != "–" else warm[-1])
    assert (tuple(cold), tuple(warm)) == (start.COLD, start.WARM)
    text = " ".join(PERFORMANCE.split())
    low, high = start.MEASURED_ROUNDS.seconds
    for part in (
        f"and {start.NUM_GRAPHS} graphs",
        f"compiling them in {start.NUM_PROCESSES} processes",
        f"rounds that the start measures ({low:g} to {high:g} s",
        "| 4.6 to 4.8 s in all, most of it importing torch |",
        "| `starts`: 8B, TP 2, to ready: cold, warm | 23.1 s, 14.8 s |",
    ):
        assert part in text, part


def test_kernels_and_memory_of_shorter_rows_are_not_those_of_longer_ones(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`kv_cache.max_tokens` bounds the rows of the largest round, too."""
    whole = gpu_job(pair, ["cuda:0"], ["cuda:0"])
    short = gpu_job(pair, ["cuda:0"], ["cuda:0"], kv_cache={"max_tokens": 64})
    leave_mark(short, monkeypatch)
    assert [plan(config).kernels for config in (short, whole)] == ["found", "missing"]
    leave_mark(whole, monkeypatch)
    assert [plan(config).kernels for config in (short, whole)] == ["found", "found"]


def test_a_job_like_that_which_was_measured_takes_as_long(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the cold run's 25.4 s and the warm one's 9.3, which differ by imports, too; weights that are made up."""
    monkeypatch.setattr(start_ranks, "count_graphs", lambda *_: start.NUM_GRAPHS // 2)
    config = gpu_job(pair, ["cuda:0"], ["cuda:0"], speculation={"pacing": "measured"})
    made_up = {"load_format": "dummy"}
    assert config.draft is not None
    sections = {"target": config.target.model_copy(update=made_up), "draft": config.draft.model_copy(update=made_up)}
    config = config.model_copy(update=sections)
    cold = plan(config)
    assert cold.kernels == "missing" and cold.ranks[0].graphs == start.NUM_GRAPHS
    assert cold.seconds is not None and cold.seconds[0] <= start.COLD[-1] <= cold.seconds[1]
    leave_mark(config, monkeypatch)
    warm = plan(config)
    assert warm.kernels == "found"
    assert warm.seconds is not None and warm.seconds[0] <= start.WARM[-1] <= warm.seconds[1]
    assert phase(warm, "kernels").seconds == phase(warm, "largest round").seconds == (0.0, 0.0)


def test_the_mark_is_that_which_this_very_job_leaves(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    config = gpu_job(pair, ["cuda:0"], ["cuda:0"])
    before = plan(config)
    assert before.kernels == "missing" and "for rank 0" in phase(before, "kernels").work
    assert any(line.startswith("trtrun warm-up") for line in before.shorter)
    leave_mark(config, monkeypatch)
    after = plan(config)
    assert after.kernels == "found" and not any("warm-up" in line for line in after.shorter)
    assert plan(gpu_job(pair, ["cuda:0"], ["cuda:0"], scheduler={"max_batch_size": 7})).kernels == "missing"
    unseen = plan(config, absent=("cuda:0",))
    assert unseen.kernels == "unknown" and "not known here" in phase(unseen, "kernels").work


def test_few_cores_have_no_estimate_of_compiling(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "count_processes", lambda num_ranks: 3)
    kernels = phase(plan(gpu_job(pair, ["cuda:0"], ["cuda:0"])), "kernels")
    assert kernels.seconds is None and "compiled in 3 processes" in kernels.work and "8.3 s" in kernels.basis


def test_tensor_parallel_ranks_have_graphs_with_nccl_alone(pair: tuple[Path, Path]) -> None:
    config = gpu_job(pair, ["cuda:0"], ["cuda:0", "cuda:1"])
    found = plan(config)
    both, target = (rank.graphs for rank in found.ranks)
    assert both > target > 0
    assert f"{both} on rank 1, {target} on rank 2" in phase(found, "graphs").work
    without = plan(config, nccl=False)
    # The draft has no group.
    assert [rank.graphs for rank in without.ranks] == [both - target, 0]
    off = plan(config.model_copy(update={"cuda_graphs": False}))
    assert {rank.graphs for rank in off.ranks} == {0} and "cuda_graphs is off" in phase(off, "graphs").work
    assert not any("graphs" in line for line in off.shorter)


def test_fewer_rows_are_proposed_with_the_graphs_that_they_have(pair: tuple[Path, Path]) -> None:
    many, few = (plan(gpu_job(pair, ["cuda:0"], ["cuda:0"], scheduler={"max_batch_size": rows})) for rows in (64, 16))
    (line,) = (line for line in many.shorter if "max_batch_size" in line)
    numbers = [int(number) for number in re.findall(r"\d+", line)]
    assert numbers == [16, 64, few.ranks[0].graphs, many.ranks[0].graphs]
    short = plan(gpu_job(pair, ["cuda:0"], ["cuda:0"], scheduler={"max_batch_size": 16}))
    assert not any("max_batch_size" in line for line in short.shorter)


def test_rounds_that_an_earlier_run_has_measured_are_not_measured_again(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is the one that the job itself leaves."""
    monkeypatch.setenv("TRTRUN_PACING_FOLDER", str(tmp_path / "pacing"))
    config = configuration(*pair, speculation={"pacing": "measured"})
    assert phase(plan(config), "measured rounds").work.startswith("up to ")
    with LLM(config=config):
        pass
    found = plan(config)
    assert (
        phase(found, "measured rounds").seconds == (0.0, 0.0) and "earlier run" in phase(found, "measured rounds").work
    )
    assert not any("speculation.pacing" in line for line in found.shorter)
    elsewhere = plan(config, absent=("cpu:0",))
    assert "unless an earlier run" in phase(elsewhere, "measured rounds").work


def test_processors_have_no_estimate_of_the_whole(pair: tuple[Path, Path]) -> None:
    found = plan(configuration(*pair, speculation={"pacing": "measured"}))
    assert found.seconds is None and found.kernels == "none"
    assert found.ranks[0].graphs == 0
    assert phase(found, "measured rounds").seconds == start.MEASURED_ROUNDS.seconds
    assert any("speculation.pacing" in line for line in found.shorter)
    texts = plan(configuration(pair[0], None, speculation={"pacing": "measured", "method": "ngram"}))
    fixed = plan(configuration(*pair))
    assert "measured rounds" not in {one.name for one in texts.phases}, "what texts say costs nothing to try"
    assert "measured rounds" not in {one.name for one in fixed.phases} and not fixed.shorter
