"""The parts of scripts/bench/bench_gpu.py that a host of two devices alone has, with tiny models on CPU slots.

All run here or in test_bench_shared_jobs.py, but for jobs of pairs that differ from others in their models alone: of
those it is seen that the models can be cut so. What only GPUs show: kernels (operations of torch stand for them),
graphs, sums over peer memory, ratios.
"""

from __future__ import annotations

import json
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from bench_runs import GPUS, count_ranks, rows_of, states_of
from commands import ROOT, Run
from forked_bench import fork_commands
from forked_commands import ForkedCommands

sys.path.append(str(ROOT))
from scripts.bench.gpu_bench import served_loss
from scripts.bench.gpu_bench.cut_parts import TEXT_PAIRS, check_texts
from scripts.bench.gpu_bench.models import PAIRS, SHAPES
from scripts.bench.gpu_bench.two_devices import list_two_device_parts
from scripts.bench.gpu_bench.workbench import Options, Workbench
from scripts.harness.children import ChildError

CUTS = {"tp2:8b": 2, "tp2:gpt-oss-120b": 3, "tp2:27b-states": 2}
"""Parts that do what `tp2:30b-a3b` does with other models, and how many ways each has."""
TOGETHER = ("tp2:30b-a3b", "kernels", "exchange")
SHARED = ("texts", "mtp-apart", "ahead", "starts")
"""Parts of whose jobs one of a kind runs: test_bench_shared_jobs.py."""
KILLED = ("kill-served:target", "kill-served:draft", "kill-served:standby")
ROWS = ("1", "2")


def test_no_part_is_left_out_here_or_takes_nine_minutes() -> None:
    parts = {part.name: part for part in list_two_device_parts()}
    assert sorted(parts) == sorted((*CUTS, *TOGETHER, *SHARED, *KILLED))
    assert all(part.seconds <= 500 and not part.is_usual for part in parts.values())


def test_pairs_have_tiny_ones_of_the_same_family() -> None:
    for name in ("30b-a3b", "27b-states", "gpt-oss-120b", *TEXT_PAIRS):
        pair, tiny = PAIRS[name], PAIRS[PAIRS[name].tiny]
        kinds = [SHAPES[shape].says.get("model_type") for shape in (pair.target, pair.draft, tiny.target, tiny.draft)]
        assert len(set(kinds)) == 1, name
        assert (SHAPES[pair.target].experts is None) == (SHAPES[tiny.target].experts is None)


@pytest.mark.timeout(900)
def test_all_parts_of_two_devices(bench: Run, tmp_path: Path) -> None:
    output = tmp_path / "figures.jsonl"
    done = bench(*GPUS[2], "--parts", ",".join(TOGETHER), "--output", output, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert states_of(done) == dict.fromkeys(TOGETHER, "done")
    kept = [json.loads(line) for line in output.read_text().splitlines()]
    check_cuts(done.stdout, [line for line in kept if line["part"] == "tp2:30b-a3b"])
    check_kernels(done.stdout, [line for line in kept if line["part"] == "kernels"])
    (exchange,) = [line["report"] for line in kept if line["part"] == "exchange" and "report" in line]
    assert [entry["rows"] for entry in exchange["results"]] == [1, 2, 4]
    assert all(us > 0 for entry in exchange["results"] for us in entry["us"].values())


@pytest.mark.parametrize("name", CUTS)
def test_jobs_of_other_pairs_can_be_cut_so(name: str, tmp_path: Path) -> None:
    """bench() is played: of each job it is reckoned what its ranks hold, which reads models and cuts them. Jobs of two
    of these pairs run in `texts` and `starts`; layers of gpt-oss are cut both ways in tests of its family."""
    asked: list[tuple[list[str], int, bool]] = []
    case = {"tokens_per_s_runs": [1.0], "time_per_output_token_ms": 1.0, "mean_acceptance_length": 2.0}

    class Planned(Workbench):
        def bench(self, config: Path, rows: Any, *extra: object, variables: Any = None) -> dict[str, Any]:
            words = [str(word) for word in extra]
            sets = [word for before, word in pairwise(words) if before == "--set"]
            asked.append((sets, count_ranks(config, sets), "--exact" in words))
            return {"start_s": 1.0, "memory": [], "results": [{"plain": case, "speculative": case} for _ in rows]}

    bench = Planned(Options("cpu", 2), tmp_path, deadline=0.0)
    {part.name: part for part in list_two_device_parts()}[name].play(bench)
    whole = ["target.expert_parallel=true", "draft.expert_parallel=true"]
    ways = [([], 1, False), ([], 2, True), (whole, 2, True)]
    assert asked == ways[: CUTS[name]]
    _, table = bench.tables
    assert [row[0] for row in table.rows] == [count for count in ROWS for _ in asked]


@pytest.mark.parametrize("failing", [0, 2])
def test_a_way_that_fails_costs_no_other(failing: int, tmp_path: Path) -> None:
    """bench() is played: 100 tokens/s in the first job, 200 in the second, and so on."""
    jobs: list[Path] = []

    class Played(Workbench):
        def bench(self, config: Path, rows: Any, *extra: object, variables: Any = None) -> dict[str, Any]:
            jobs.append(config)
            if len(jobs) == failing + 1:
                raise ChildError("no room")
            rates = {"tokens_per_s_runs": [100.0 * len(jobs)], "time_per_output_token_ms": 1.0}
            case = rates | {"mean_acceptance_length": 2.0}
            return {"start_s": 1.0, "memory": [], "results": [{"plain": case, "speculative": case} for _ in rows]}

    bench = Played(Options("cpu", 2), tmp_path, deadline=0.0)
    parts = {part.name: part for part in list_two_device_parts()}
    names = ["one device", "TP 2 by features", "TP 2 by experts"]
    with pytest.raises(ChildError, match=rf"^{names[failing]}: no room$"):
        parts["tp2:gpt-oss-120b"].play(bench)
    (table,) = (table for table in bench.tables if "jobs of each way" in table.title)
    assert [row[1] for row in table.rows[:2]] == names[:failing] + names[failing + 1 :]
    assert [row[3] for row in table.rows[:2]] == (["1.00", "2.00"] if failing else ["", ""])


def check_cuts(printed: str, kept: list[dict[str, Any]]) -> None:
    """A mixture was cut both ways, and its texts were compared where it was cut."""
    rows = rows_of(printed, "30b-a3b-shaped pair, jobs of each way: 1")
    ways = ("one device", "TP 2 by features", "TP 2 by experts")
    assert [(row["rows"], row["way"]) for row in rows] == [(n, way) for n in ("1", "2", "4") for way in ways]
    for start in range(0, len(rows), 3):
        one, *cut = rows[start : start + 3]
        assert one["equal texts"] == "" and {row["equal texts"] for row in cut} == {f"{one['rows']} of {one['rows']}"}
        for row in cut:
            ratio = float(row["plain tokens/s"]) / float(one["plain tokens/s"])
            assert float(row["÷ one device"]) == pytest.approx(ratio, abs=0.02)
    words = [line["command"] for line in kept if "command" in line]
    assert ["target.expert_parallel=true" in command for command in words] == [False, False, True]
    assert ["--exact" in command for command in words] == [False, True, True]
    memory = rows_of(printed, "30b-a3b-shaped pair: start and memory")
    assert [row["rank"][0] for row in memory] == ["0", "1", "2", "1", "2"]
    assert all(row["weights"] == row["planned"] for row in memory)


def check_kernels(printed: str, kept: list[dict[str, Any]]) -> None:
    """Each rank with a device has told its part, which adds up."""
    found = [line for line in kept if "token_us" in line]
    assert [(line["way"], line["rank"]) for line in found] == [("one device", 0), ("TP 2", 1), ("TP 2", 2)]
    for line in found:
        parts = line["products_us"] + line["other_kernels_us"] + line["idle_us"]
        assert parts == pytest.approx(line["token_us"], abs=0.01) and not line["window_has_moved"]
        assert sum(kernel["us"] for kernel in line["kernels"]) == pytest.approx(
            line["products_us"] + line["other_kernels_us"], abs=0.5
        )
    assert len(rows_of(printed, "8B-shaped target, plain, one row: µs a token")) == 3


@pytest.mark.timeout(600)
def test_a_rank_of_a_server_is_killed(
    tmp_path: Path, forked_commands: ForkedCommands, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft's, whose loss costs drafts alone, and the target's; `kill-served:target` has another placement."""
    fork_commands(forked_commands.descriptor, monkeypatch.setattr)
    monkeypatch.setattr(served_loss, "KILLS", 1)
    bench = Workbench(Options("cpu", 2), tmp_path, deadline=time.monotonic() + 500)
    {part.name: part for part in list_two_device_parts()}["kill-served:draft"].play(bench)
    losses, answers = bench.tables
    draft, target = [dict(zip(losses.columns, cells, strict=True)) for cells in losses.rows]
    assert (draft["killed"], target["killed"]) == ("rank 1", "rank 2")
    assert draft["until its ranks ran s"] == "" and float(draft["longest gap s"]) < float(target["longest gap s"])
    assert float(target["noticing s"]) > 0 and int(target["streams that were read"]) >= 2
    assert {"until its ranks ran s", "imports and meeting s", "communicators s", "weights s"} <= target.keys()
    told = float(target["until its ranks ran s"]) + float(target["imports and meeting s"])
    assert float(target["longest gap s"]) > told > 0
    ((told, faults),) = answers.rows
    assert told.endswith(" exact") and faults == "0"


WRONG = {"victims": {"rank 2": {"each": []}}, "requests": {"exact": 3, "wrong": 1}, "faults": ["another text"]}


def test_another_text_fails_its_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What serve_chaos.py says is played; so is what `trtrun bench` says."""
    program = tmp_path / "chaos.py"
    program.write_text(f"print({json.dumps(json.dumps(WRONG))}); raise SystemExit(1)")
    monkeypatch.setattr(served_loss, "CHAOS", program)
    bench = Workbench(Options("cpu", 2), tmp_path, deadline=time.monotonic() + 60)
    parts = {part.name: part for part in list_two_device_parts()}
    with pytest.raises(ChildError, match=r"not all answers were those of trtrun run: 3 exact, 1 wrong; another text"):
        parts["kill-served:target"].play(bench)
    bench.reports = [{"results": [{"rows": 8, "equal_rows": 7}, {"rows": 1}, {"rows": 2, "equal_rows": 2}]}]
    with pytest.raises(ChildError, match="1 of 10 texts with drafts are not plain decoding's"):
        check_texts(bench)
