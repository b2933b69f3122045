"""The tables of `trtrun bench` on the screen. It knows the report and measures nothing."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from rich.table import Table

from launch.bench.measure import PLAIN, SPECULATIVE
from launch.bench.peer import PeerFigures
from launch.jobs.terminal import output_console
from trtrun.timing.telemetry import ROUND_PARTS

_COLUMNS = ("rows", "mode", "tokens/s", "ms/token", "first token ms", "acceptance length", "ratio to plain")


def print_tables(report: Mapping[str, Any], peer: PeerFigures | None) -> None:
    """Show a report on standard output."""
    console = output_console()
    console.print(_speed_table(report, peer))
    if report["forced_acceptance"] is not None:
        forced = report["forced_acceptance"]
        console.print(f"forced acceptance: {forced:g} tokens a round, not the target's verdict")
    if peer is not None and peer.options:
        named = ", ".join(f"{name}={json.dumps(value)}" for name, value in peer.options.items())
        console.print(f"{peer.program.name} speculative: {named}", markup=False)
    console.print(f"all ranks were ready after {report['start_s']:.1f} s")
    for entry in report["results"]:
        if "equal_rows" in entry:
            console.print(f"{_name(report, entry)}: {entry['equal_rows']} of {entry['rows']} texts equal plain ones")
    if report["cold"]:
        console.print(_cold_table(report))
    console.print(_round_table(report))
    sys.stdout.flush()


def _speed_table(report: Mapping[str, Any], peer: PeerFigures | None) -> Table:
    """One line for each mode of each workload, and of the peer's."""
    table = Table(title=f"seed {report['seed']}, {report['dtype']}, {report['total_threads']} threads in all")
    for name in _COLUMNS:
        table.add_column(name, justify="left" if name == "mode" else "right", no_wrap=True)
    for entry in report["results"]:
        plain = entry[PLAIN]["tokens_per_s"]
        for mode in (PLAIN, SPECULATIVE):
            if mode in entry:
                case = entry[mode]
                length = f"{case['mean_acceptance_length']:.2f}" if mode == SPECULATIVE else ""
                table.add_row(
                    _name(report, entry),
                    mode,
                    f"{case['tokens_per_s']:.1f}",
                    f"{case['time_per_output_token_ms']:.2f}",
                    f"{case['time_to_first_token_ms']:.1f}",
                    length,
                    f"{case['tokens_per_s'] / plain:.2f}",
                )
        if peer is not None:
            for cells in _peer_lines(entry, peer, plain):
                table.add_row(_name(report, entry), *cells)
    return table


def _cold_table(report: Mapping[str, Any]) -> Table:
    """Every run of each case in order, the first beside the median of the others, and what was made in their rounds."""
    table = Table(title="tokens/s of the runs, in order")
    for name in ("rows", "mode", "first", "next", "first ÷ median of next", "captures", "compilations"):
        table.add_column(name, justify="left" if name == "mode" else "right", no_wrap=name != "next")
    for entry in report["results"]:
        for mode in (PLAIN, SPECULATIVE):
            if mode in entry:
                case = entry[mode]
                first, *following = (f"{rate:.0f}" for rate in case["tokens_per_s_runs"])
                made = (str(case["num_captures"]), str(case["num_compilations"]))
                ratio = f"{case['first_over_next']:.2f}"
                table.add_row(_name(report, entry), mode, first, " ".join(following), ratio, *made)
    return table


def _round_table(report: Mapping[str, Any]) -> Table:
    """Where the time of a round goes; the parts add up to the last column."""
    table = Table(title="milliseconds of a round, on average")
    table.add_column("rows", justify="right", no_wrap=True)
    table.add_column("mode", no_wrap=True)
    for name in (*ROUND_PARTS, "round"):
        table.add_column(name.replace("_", " "), justify="right")
    for entry in report["results"]:
        for mode in (PLAIN, SPECULATIVE):
            if mode in entry:
                case = entry[mode]
                figures = (*case["round_ms"].values(), case["round_wall_ms"])
                table.add_row(_name(report, entry), mode, *(f"{figure:.2f}" for figure in figures))
    return table


def _peer_lines(entry: Mapping[str, Any], peer: PeerFigures, plain: float) -> Iterator[tuple[str, ...]]:
    """The cells behind the first of the peer's lines."""
    figures = entry.get(peer.program.name, {})
    for mode in (PLAIN, peer.program.speculative):
        rate = figures.get(f"{mode}_tokens_per_s")
        if rate:
            first = figures.get(f"{mode}_time_to_first_token_ms")
            length = figures.get(f"{mode}_mean_acceptance_length")
            yield (
                f"{peer.program.name} {mode}",
                f"{rate:.1f}",
                f"{1e3 / rate * entry['rows']:.2f}",
                f"{first:.1f}" if first else "",
                f"{length:.2f}" if length else "",
                f"{rate / plain:.2f}",
            )


def _name(report: Mapping[str, Any], entry: Mapping[str, Any]) -> str:
    """A workload as --rows names it, as far as it differs from the others: "8", "8x2000", "8@0.8"."""
    name = str(entry["rows"])
    if entry["prompt_tokens"] != report["prompt_tokens"]:
        name += f"x{entry['prompt_tokens']}"
    return name + (f"@{entry['temperature']:g}" if entry["temperature"] else "")
