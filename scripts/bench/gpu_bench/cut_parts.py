"""One model on one GPU and cut over two, in turns: what a second GPU gives, and whether texts with drafts stay plain
decoding's.

It knows placements and `trtrun bench`'s JSON. It does not know when it runs.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from scripts.bench.gpu_bench.placement_parts import SAMPLED, add_memory, memory_table
from scripts.bench.gpu_bench.placements import ONE, PLACEMENTS, Placement
from scripts.bench.gpu_bench.workbench import Workbench
from scripts.harness.children import ChildError

BOTH = next(place for place in PLACEMENTS[2] if place.draft == place.target)
"""Draft and target over the same two devices."""
REPEATS_A_TURN = 2
"""Timed runs of a workload and mode, where ways take turns."""

_MODES = ("plain", "speculative")


@dataclass
class Way:
    """A way to place a model, and what was measured of it.

    Attributes:
        name: in tables.
        placement: who sits where.
        sets: options of the command.
        reports: of `trtrun bench`, a turn each.
    """

    name: str
    placement: Placement
    sets: tuple[str, ...] = ()
    reports: list[dict[str, Any]] = field(default_factory=list)

    def rates(self, number: int, mode: str) -> list[float]:
        """Tokens a second of all runs of a workload by its number, all turns together."""
        runs = [report["results"][number][mode]["tokens_per_s_runs"] for report in self.reports]
        return [rate for of_turn in runs for rate in of_turn]


def one_and_two() -> list[Way]:
    """A model on one device, and over two."""
    return [Way("one device", ONE), Way("TP 2", BOTH)]


def one_and_both_cuts() -> list[Way]:
    """Experts on one device, over two by features, and over two by experts: a draft of the target's layers is cut as
    the target is."""
    whole = tuple(word for role in ("target", "draft") for word in ("--set", f"{role}.expert_parallel=true"))
    return [Way("one device", ONE), Way("TP 2 by features", BOTH), Way("TP 2 by experts", BOTH, whole)]


def play_cuts(
    bench: Workbench, pair: str, make_ways: Callable[[], list[Way]], *, most_turns: int = 2, has_many_rows: bool = False
) -> None:
    """Plain and drafted tokens a second of each way, in turns, beside those of the first; texts of ways over several
    devices are compared in the first turn. A way that fails costs no other.

    Raises:
        ChildError: some are not plain decoding's, or a way failed.
    """
    scale, ways = bench.options.scale, make_ways()
    turns = min(scale.turns, most_turns)
    rows = [*scale.rows, *([scale.most_rows] if has_many_rows else [])]
    memory = memory_table(bench, f"{pair}-shaped pair: start and memory", "way")
    failures = Failures()
    for turn in range(turns):
        for way in ways if turn == 0 else [way for way in ways if way.reports]:
            config = bench.config(pair, way.placement, most_rows=max(rows))
            compares = turn == 0 and way.placement.devices_a_job > 1
            extra = [*way.sets, *(["--exact"] if compares else [])]
            with failures.kept(way.name):
                report = bench.bench(config, rows, *extra, *(["--repeats", REPEATS_A_TURN] if turns > 1 else []))
                way.reports.append(report)
                if turn == 0:
                    add_memory(memory, report, way.name)
    title = f"{pair}-shaped pair, jobs of each way: {turns}"
    _compare(bench, title, rows, [way for way in ways if way.reports], ways[0])
    failures.tell()
    check_texts(bench)


def _compare(bench: Workbench, title: str, rows: Sequence[int], ways: Sequence[Way], first: Way) -> None:
    """A line for each way and number of rows, with what it gives beside the first, where that has not failed."""
    columns = (
        "rows",
        "way",
        "plain tokens/s",
        "÷ one device",
        "ms a token",
        "drafted tokens/s",
        "drafted ÷ one device",
    )
    table = bench.table(title, *columns, "÷ plain", "tokens a round", "equal texts")
    ratios: dict[str, dict[str, float]] = {}
    for number, count in enumerate(rows):
        for way in ways:
            entry = way.reports[0]["results"][number]
            plain, drafted = (statistics.median(way.rates(number, mode)) for mode in _MODES)
            over: list[float | None] = [None, None]
            if first.reports:
                base = (statistics.median(first.rates(number, mode)) for mode in _MODES)
                over = [rate / of_one for rate, of_one in zip((plain, drafted), base, strict=True)]
                ratios.setdefault(way.name, {})[str(count)] = round(over[0] or 0.0, 3)
            equal = f"{entry['equal_rows']} of {count}" if "equal_rows" in entry else None
            table.add(
                count, way.name, plain, over[0], entry["plain"]["time_per_output_token_ms"], drafted, over[1],
                drafted / plain, entry["speculative"]["mean_acceptance_length"], equal,
            )  # fmt: skip
    bench.keep({"plain_over_one_device": ratios})


class Failures:
    """Jobs of a part that failed, and cost no other."""

    def __init__(self) -> None:
        self._words: list[str] = []

    @contextmanager
    def kept(self, name: str) -> Iterator[None]:
        """Keep what goes wrong in the block under a name."""
        try:
            yield
        except ChildError as error:
            self._words.append(f"{name}: {error}")

    def tell(self) -> None:
        """Raise ChildError where something was kept."""
        if self._words:
            raise ChildError("; ".join(self._words))


def check_texts(bench: Workbench) -> None:
    """Raise ChildError where a job of the part has compared texts, and some were not plain decoding's."""
    entries = [entry for report in bench.reports for entry in report["results"] if "equal_rows" in entry]
    equal, rows = (sum(entry[key] for entry in entries) for key in ("equal_rows", "rows"))
    if equal != rows:
        raise ChildError(f"{rows - equal} of {rows} texts with drafts are not plain decoding's")


TEXT_PAIRS = ("27b-states-few", "35b-a3b-few", "v2-lite", "gemma3", "gemma4")
"""Gated delta nets, dense and a mixture; latents; windows; windows and experts."""


def play_texts(bench: Workbench, pairs: Sequence[str] = TEXT_PAIRS) -> None:
    """Texts over two devices with a draft beside plain decoding's, greedy and by seed, prompts of mixed lengths.

    Models have dummy weights and real widths, some of them fewer layers. A pair that fails costs no other.

    Raises:
        ChildError: some are not plain decoding's, or a pair failed.
    """
    rows = [f"{number}x64{mark}" for mark in ("", f"@{SAMPLED}") for number in bench.options.scale.rows]
    columns = [f"{number} rows" for number in bench.options.scale.rows]
    table = bench.table(
        f"Texts equal to plain decoding's, {BOTH.about}", "pair", "temperature", *columns, "tokens a round", "start s"
    )
    failures = Failures()
    for pair in pairs:
        with failures.kept(pair):
            report = bench.bench(bench.config(pair, BOTH), rows, "--exact", "--top-p", 0.95, "--repeats", 1)
            for temperature in (0, SAMPLED):
                entries = [entry for entry in report["results"] if entry["temperature"] == temperature]
                equal = (f"{entry['equal_rows']} of {entry['rows']}" for entry in entries)
                lengths = (entry["speculative"]["mean_acceptance_length"] for entry in entries)
                table.add(pair, f"{temperature:g}", *equal, statistics.mean(lengths), report["start_s"])
    failures.tell()
    check_texts(bench)
