"""What a user meets first: how long a start takes, and what a draft costs that is never right.

It knows caches on disk and `trtrun bench`'s JSON. It does not know when it runs.
"""

from __future__ import annotations

import statistics

from gpu_bench.placements import Placement
from gpu_bench.workbench import Workbench
from launch.batch.warm_up import CACHES

USELESS_ROWS = (1, 4, 16, 64, 128)
USELESS_TOKENS = 64


def play_useless_draft(bench: Workbench, placement: Placement) -> None:
    """A 1B-shaped draft of made-up weights is never right for the 8B-shaped target: what it costs, as shipped."""
    rows = USELESS_ROWS if bench.options.kind == "cuda" else (1, 2)
    title = f"A draft that is never right, {USELESS_TOKENS} tokens, a process each: {placement.about} (tokens/s)"
    columns = ("rows", "plain: first", "next five", "speculative: first", "next five")
    table = bench.table(title, *columns, "first ÷ first", "median ÷ median", "least ÷ median", "acceptance")
    # What the first rounds of a process have learned of the draft would serve the others.
    reports = [
        bench.bench(
            bench.config("8b-1b", placement, most_rows=number, as_shipped=True),
            [number],
            "--cold",
            "--max-tokens",
            USELESS_TOKENS,
        )
        for number in rows
    ]
    for (entry,) in (report["results"] for report in reports):
        (plain, plain_next), (drafted, drafted_next) = (
            (of_mode[0], of_mode[1:])
            for of_mode in (entry[mode]["tokens_per_s_runs"] for mode in ("plain", "speculative"))
        )
        median = statistics.median(plain_next)
        table.add(
            entry["rows"], plain, _list(plain_next), drafted, _list(drafted_next), drafted / plain,
            statistics.median(drafted_next) / median, min(drafted_next) / median,
            entry["speculative"]["mean_acceptance_length"],
        )  # fmt: skip


def _list(rates: list[float]) -> str:
    return ", ".join(f"{rate:.0f}" for rate in rates)


def play_starts(bench: Workbench, placement: Placement) -> None:
    """From the command to ready: with empty caches, with warm ones, and with those that `trtrun warm-up` has filled."""
    table = bench.table(
        f"Starts: {placement.about}", "pair", "caches", "seconds to ready", "seconds of the command", "of warm-up"
    )
    for pair in ("8b", "70b"):
        config = bench.config(pair, placement, as_shipped=True)
        for name in ("own", "warmed"):
            folder = bench.folder / f"caches-{pair}-{name}"
            variables = {variable: str(folder / below) for variable, below in CACHES.items()}
            made = None
            if name == "warmed":
                ended = bench.succeed(bench.trtrun("warm-up", "--config", config, "--cache", folder))
                made = ended.seconds
            states = ("cold", "warm") if made is None else ("by warm-up",)
            for state in states:
                with bench.start(*_one_row(config), variables=variables) as child:
                    ended = bench.succeed(child.wait(bench.deadline))
                report = ended.last_json()
                bench.keep({"pair": pair, "caches": state, "seconds": ended.seconds, "report": report})
                table.add(f"{pair}-shaped", state, report["start_s"], ended.seconds, made)


def _one_row(config: object) -> tuple[object, ...]:
    return "bench", "--config", config, "--rows", 1, "--max-tokens", 4, "--repeats", 1, "--json"
