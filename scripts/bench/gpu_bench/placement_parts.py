"""What is measured of each placement: speed, phases, idle time, start, memory, links, and equal texts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from scripts.bench.gpu_bench.placements import ONE, Placement
from scripts.bench.gpu_bench.tables import Table, gibibytes
from scripts.bench.gpu_bench.workbench import Workbench
from scripts.harness.children import ChildError, last_words

SAMPLED = 0.8
PHASES = ("drafting", "transferring", "verifying", "planning", "committing", "messages", "between_rounds")
"""Of a round, as `trtrun bench` names them."""


def play_placement(bench: Workbench, pair: str, placement: Placement) -> None:
    """Plain and speculative decoding, and drafting ahead where draft and target are apart."""
    forced = pair == "70b"  # its draft is no part of the target, so that nothing would be accepted
    speculation: dict[str, Any] = {}
    if forced:
        most = bench.pair(pair).draft_len + 1
        speculation["forced_acceptance"] = min(bench.options.acceptances[0], most)
    title = f"{pair}-shaped pair, {placement.about}"
    if forced:
        title += f", forced acceptance {speculation['forced_acceptance']:g}"
    speeds = bench.table(title, *_SPEED_COLUMNS)
    memory = memory_table(bench, f"{title}: start and memory", "ahead")
    rates: dict[int, dict[str, float]] = {}
    for ahead in _ways(placement):
        configs = [bench.config(pair, placement, job, ahead=ahead, **speculation) for job in range(placement.num_jobs)]
        extra = [] if forced else ["--exact"]
        reports = bench.bench_together(configs, bench.options.scale.rows, *extra, traced=True)
        # The second job's plain runs are the first one's again.
        modes = {"plain": "plain"} if ahead == _ways(placement)[0] else {}
        modes["speculative"] = "ahead" if ahead == "on" else "speculative"
        _add_speeds(speeds, placement, reports, modes, rates)
        for report in reports:
            add_memory(memory, report, ahead)
    summary = bench.summary(f"{pair}-shaped pair, tokens/s", "placement", "rows", "devices", *_SUMMARY_COLUMNS)
    for rows, found in rates.items():
        best = max(found.values()) / placement.num_devices
        summary.add(placement.about, rows, placement.num_devices, *map(found.get, _SUMMARY_COLUMNS[:-1]), best)


_TIMES_LONGER = 4


def play_parallel_apart(bench: Workbench, apart: Placement) -> None:
    """A draft that is always right and drafts all tokens in one forward: beside the target on one device, and on a
    device of its own, where it drafts ahead."""
    shapes = bench.pair("8b-repeating")
    bench.write_weights(shapes.target, shapes.draft)
    title = f"8B-shaped target and 1B-shaped draft in parallel, draft_len {shapes.draft_len}, texts that repeat"
    columns = ("placement", "ahead", "rows", "tokens/s", "÷ one device", "tokens a round", "round ms", "hit rate")
    table = bench.table(title, *columns, "target idle")
    alone: dict[int, float] = {}
    for placement in (ONE, apart):
        for ahead in _ways(placement):
            config = bench.config("8b-repeating", placement, files=True, ahead=ahead)
            # A run of 15 rounds would say as much of its prompt as of them.
            (report,) = bench.bench_together([config], bench.options.scale.rows, traced=True, times=_TIMES_LONGER)
            for entry in report["results"]:
                case, rows = entry["speculative"], entry["rows"]
                rate = case["tokens_per_s"]
                hit_rate = case.get("drafting_ahead", {}).get("hit_rate")
                table.add(
                    placement.about, ahead, rows, rate, rate / alone.setdefault(rows, rate),
                    case["mean_acceptance_length"], case["round_wall_ms"], hit_rate, case.get("target_idle_share"),
                )  # fmt: skip


def _ways(placement: Placement) -> tuple[str, ...]:
    """Values of `speculation.ahead` that a placement is measured with; several jobs at once with the last alone."""
    ways = ("off", "on") if placement.is_apart else ("off",)
    return ways if placement.num_jobs == 1 else ways[-1:]


_SUMMARY_COLUMNS = ("plain", "speculative", "ahead", "best per device")
_SPEED_COLUMNS = (
    "rows", "mode", "tokens/s", "per device", "ratio to plain", "acceptance", "hit rate", "equal texts", "round ms",
    *(f"{name.replace('_', ' ')} ms" for name in PHASES), "target idle",
)  # fmt: skip


def _add_speeds(
    table: Table,
    placement: Placement,
    reports: Sequence[dict[str, Any]],
    modes: dict[str, str],
    rates: dict[int, dict[str, float]],
) -> None:
    """A line for each mode of each workload; of several jobs, the sum of tokens a second and the first one's rounds.

    Tokens a second are kept in `rates`, too, by rows and name of the mode.
    """
    for entries in zip(*(report["results"] for report in reports), strict=True):
        first = entries[0]
        plain = sum(entry["plain"]["tokens_per_s"] for entry in entries)
        for mode, name in modes.items():
            case = first[mode]
            rate = sum(entry[mode]["tokens_per_s"] for entry in entries)
            rates.setdefault(first["rows"] * len(entries), {})[name] = rate
            hit_rate = case.get("drafting_ahead", {}).get("hit_rate")
            equal = None
            if mode == "speculative" and "equal_rows" in first:
                counts = [sum(entry[key] for entry in entries) for key in ("equal_rows", "rows")]
                equal = f"{counts[0]} of {counts[1]}"
            table.add(
                first["rows"] if len(entries) == 1 else f"{len(entries)} x {first['rows']}", name, rate,
                rate / placement.num_devices, rate / plain,
                case["mean_acceptance_length"] if mode == "speculative" else None, hit_rate, equal,
                case["round_wall_ms"], *(case["round_ms"][phase] for phase in PHASES),
                case.get("target_idle_share"),
            )  # fmt: skip


def memory_table(bench: Workbench, title: str, way: str) -> Table:
    """A table for `add_memory`, whose jobs differ in `way`."""
    columns = ("start s", "rank", "device", "weights", "planned", "largest round", "planned at most", "KV store")
    return bench.table(title, way, *columns, "KV tokens", "used on device")


def add_memory(table: Table, report: dict[str, Any], way: str) -> None:
    """A line for each rank with a device, of what it holds beside what was planned."""
    for rank in report["memory"]:
        used = rank["device_used_bytes"]
        table.add(
            way, report["start_s"], f"{rank['rank']} ({rank['role']})", rank["device"],
            *(gibibytes(rank[key]) for key in (
                "shard_bytes", "planned_shard_bytes", "working_bytes", "planned_working_bytes", "kv_bytes"
            )),
            rank["kv_tokens"], gibibytes(used) if used else None,
        )  # fmt: skip


def play_check(bench: Workbench, placement: Placement) -> None:
    """`trtrun check`: every link, and sums over the ranks of a group by size."""
    ended = bench.trtrun("check", "--config", bench.config("8b", placement), "--json")
    report = ended.last_json()
    bench.keep({"check": report})
    links = bench.table(
        f"Links: {placement.about}", "what travels", "ranks", "over", "right", "latency µs", "bandwidth GB/s"
    )
    for link in report.get("links", ()):
        timing = link["timing"] or {}
        links.add(
            link["carries"], _ranks(link["ranks"]), link["transport"], not link["faults"] if link["is_tried"] else None,
            1e6 * timing["latency_s"] if timing else None, timing["bytes_per_s"] / 1e9 if timing else None,
        )  # fmt: skip
    for link in report.get("links", ()):
        _add_sums(bench, placement, link)
    if not report["ok"]:
        raise ChildError(last_words("; ".join(report["problems"])))
    links.add("ready", "", "", True, None, None)
    bench.table(f"Check: {placement.about}", "seconds", "a lost draft rank").add(
        report["seconds"], report.get("on_draft_loss")
    )


def _add_sums(bench: Workbench, placement: Placement, link: dict[str, Any]) -> None:
    """The all-reduce table of a group that has chosen how it sums."""
    sums = link.get("sums") or ()
    ways = list(dict.fromkeys(way for timing in sums for way in timing["microseconds"]))
    if not ways:
        return
    title = f"All-reduce over ranks {_ranks(link['ranks'])}, µs: {placement.about}"
    table = bench.table(title, "KiB", *ways, "used")
    for timing in sums:
        times = (timing["microseconds"].get(way) for way in ways)
        table.add(f"{timing['nbytes'] / 1024:g}", *times, timing["way"])


def _ranks(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def play_exactness(bench: Workbench, placement: Placement) -> None:
    """Texts that are the same with speculation and without, greedy and by seed, prompts of mixed lengths."""
    shapes = bench.options.scale.exact_rows
    rows = [f"{number}x{length}{mark}" for number, length, mark in _exact_workloads(shapes)]
    ahead = "on" if placement.is_apart else "off"
    config = bench.config("8b", placement, most_rows=max(shapes), ahead=ahead)
    report = bench.bench(config, rows, "--exact", "--top-p", 0.95, "--repeats", 1)
    title = f"Texts equal to plain decoding's, 8B-shaped pair, {placement.about}"
    table = bench.table(title, "temperature", *(f"{number} rows" for number in shapes))
    for temperature in (0, SAMPLED):
        entries = [entry for entry in report["results"] if entry["temperature"] == temperature]
        counts = {entry["rows"]: f"{entry['equal_rows']} of {entry['rows']}" for entry in entries}
        table.add(f"{temperature:g}", *(counts[number] for number in shapes))


def _exact_workloads(rows: Sequence[int]) -> Iterator[tuple[int, int, str]]:
    """Rows, tokens of the longest prompt, and the mark of a temperature."""
    for mark in ("", f"@{SAMPLED}"):
        for number in rows:
            yield number, 64, mark
