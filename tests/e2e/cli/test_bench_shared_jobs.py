"""Parts of scripts/bench/bench_gpu.py of whose jobs one of a kind runs, with tiny models on two CPU slots.

The others are played: they differ from one that runs, here or in test_bench_gpu.py, in their models, in how drafts are
made or in where caches lie alone.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
from bench_runs import count_ranks
from commands import ROOT
from forked_bench import fork_commands
from forked_commands import ForkedCommands

sys.path.append(str(ROOT))
from scripts.bench.gpu_bench.cut_parts import TEXT_PAIRS
from scripts.bench.gpu_bench.models import PAIRS
from scripts.bench.gpu_bench.two_devices import list_two_device_parts
from scripts.bench.gpu_bench.workbench import Options, Workbench
from scripts.harness.children import Ended

ROWS = ("1", "2")
Play = Callable[[type[Workbench], str], tuple[Any, list[list[dict[str, str]]]]]


@pytest.fixture
def play(tmp_path: Path, forked_commands: ForkedCommands, monkeypatch: pytest.MonkeyPatch) -> Play:
    """Return play(kind of workbench, part): the workbench and its tables; commands are forked."""
    fork_commands(forked_commands.descriptor, monkeypatch.setattr)
    parts = {part.name: part for part in list_two_device_parts()}

    def play_part(kind: type[Workbench], name: str) -> tuple[Any, list[list[dict[str, str]]]]:
        bench = kind(Options("cpu", 2), tmp_path, deadline=time.monotonic() + 500)
        parts[name].play(bench)
        return bench, [[dict(zip(table.columns, row, strict=True)) for row in table.rows] for table in bench.tables]

    return play_part


class FirstPair(Workbench):
    """The first job runs, and the others say what it has said: ranks cut the same families, and their drafts cost no
    token, in tests/ranks/test_family_drafts.py and test_mtp_ranks.py."""

    asked: list[tuple[Any, ...]]

    def bench(self, config: Path, rows: Any, *extra: object, variables: Any = None) -> dict[str, Any]:
        assert variables is None and count_ranks(config) == 2
        self.asked = [*vars(self).get("asked", []), (json.loads(config.read_text())["target"]["model"], rows, extra)]
        return self.reports[0] if self.reports else super().bench(config, rows, *extra)


def test_texts_of_all_pairs_are_compared(play: Play) -> None:
    bench, (rows,) = play(FirstPair, "texts")
    assert len(bench.reports) == 1 and "--exact" in bench.asked[0][2]
    assert [Path(model).name for model, *_ in bench.asked] == [PAIRS[PAIRS[pair].tiny].target for pair in TEXT_PAIRS]
    assert all(asked[1:] == bench.asked[0][1:] for asked in bench.asked)
    assert [(row["pair"], row["temperature"]) for row in rows] == [
        (pair, temperature) for pair in TEXT_PAIRS for temperature in ("0", "0.8")
    ]
    assert all((row["1 rows"], row["2 rows"]) == ("1 of 1", "2 of 2") for row in rows)


class SomeAhead(Workbench):
    """Jobs run but those whose drafts are made in one of the `played` ways, and have 100 tokens/s, 200, and so on."""

    played: tuple[str, ...] = ()

    def bench_together(
        self, configs: Sequence[Path], rows: Sequence[object], *extra: object, **options: Any
    ) -> list[dict[str, Any]]:
        ahead = json.loads(configs[0].read_text())["speculation"].get("ahead")
        if ahead not in self.played:
            return super().bench_together(configs, rows, *extra, **options)
        assert options == {"traced": True}
        case = {"tokens_per_s": 100.0 * (1 + self.played.index(ahead)), "mean_acceptance_length": 2.0}
        case |= {"round_wall_ms": 1.0, "round_ms": {"drafting": 0.5}, "target_idle_share": 0.25}
        return [{"results": [{"plain": {"tokens_per_s": 50.0}, "speculative": case} for _ in rows]}]


class AheadAlone(SomeAhead):
    """Behind verdicts is played."""

    played = ("off",)


class ChosenAlone(SomeAhead):
    """Behind verdicts and ahead of them are played."""

    played = ("off", "on")


def test_an_mtp_layer_drafts_beside_its_target_and_apart(play: Play) -> None:
    bench, (rows,) = play(AheadAlone, "mtp-apart")
    assert len(bench.reports) == 2
    assert [(row["rows"], row["MTP"]) for row in rows] == [
        (n, way) for n in ROWS for way in ("beside the target", "apart", "apart, ahead")
    ]
    assert all(float(row["tokens a round"]) > 1 for row in rows)
    for beside, apart, ahead in (rows[:3], rows[3:]):
        assert (apart["tokens/s"], apart["÷ plain"], apart["hit rate"], beside["hit rate"]) == ("100.0", "2.00", "", "")
        assert 0 <= float(ahead["hit rate"]) <= 1 and 0 <= float(ahead["target idle"]) <= 1
        for row in (apart, ahead):
            ratio = float(row["tokens/s"]) / float(beside["tokens/s"])
            assert float(row["÷ beside"]) == pytest.approx(ratio, abs=0.02)


def test_pacing_chooses_whether_to_draft_ahead(play: Play) -> None:
    bench, (rows,) = play(ChosenAlone, "ahead")
    (report,) = bench.reports
    assert [(row["rows"], row["ahead"]) for row in rows] == [(n, way) for n in ROWS for way in ("off", "on", "auto")]
    for entry, (off, on, auto) in zip(report["results"], (rows[:3], rows[3:]), strict=True):
        assert (off["tokens/s"], on["tokens/s"], off["÷ better of both"], on["÷ better of both"]) == (
            "100.0", "200.0", "0.50", "1.00"
        )  # fmt: skip
        rate = entry["speculative"]["tokens_per_s"]
        assert float(auto["÷ better of both"]) == pytest.approx(rate / 200, rel=0.01, abs=0.01)
        assert 0 <= float(auto["target idle"]) <= 1


class WarmedAlone(Workbench):
    """The job with caches of its own is played: seconds to ready are 1, 2, and so on."""

    begun: list[tuple[bool, dict[str, str]]]

    @contextmanager
    def start(self, *words: object, variables: Any = MappingProxyType({})) -> Iterator[Any]:
        is_played = any("-own" in folder for folder in variables.values())
        self.begun = [*vars(self).get("begun", []), (is_played, dict(variables))]
        if is_played:
            assert words[0] == "bench" and "--json" in words
            report = json.dumps({"start_s": float(len(self.begun))})
            yield SimpleNamespace(wait=lambda deadline: Ended(0, report, "", 9.0))
        else:
            with super().start(*words, variables=variables) as child:
                yield child


def test_starts_are_timed_with_caches_of_every_kind(play: Play) -> None:
    bench, (rows,) = play(WarmedAlone, "starts")
    assert [(row["pair"], row["caches"]) for row in rows] == [
        ("8b-shaped", caches) for caches in ("cold", "warm", "by warm-up")
    ]
    (_, cold), (_, warm), (_, warming), (_, warmed) = bench.begun
    assert [played for played, _ in bench.begun] == [True, True, False, False]
    assert cold == warm != warmed and cold.keys() == warmed.keys() and warming == {}
    assert [row["seconds to ready"] for row in rows[:2]] == ["1.00", "2.00"]
    assert [row["of warm-up"] for row in rows[:2]] == ["", ""]
    assert 0 < float(rows[2]["seconds to ready"]) < float(rows[2]["seconds of the command"])
    assert float(rows[2]["of warm-up"]) > 0
