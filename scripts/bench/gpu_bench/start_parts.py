"""What a user meets first: how long a start takes, of checkpoints and of engines, and what a draft costs that is never
right.

It knows caches on disk and `trtrun bench`'s JSON. It does not know when it runs.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launch.batch.warm_up import CACHES
from scripts.bench.gpu_bench.placements import Placement
from scripts.bench.gpu_bench.workbench import Workbench
from scripts.harness.children import TRTRUN, ChildError, run

USELESS_ROWS = (1, 4, 16, 64, 128)
USELESS_TOKENS = 64
PROCESSES = ("first", "second")
"""Of which the second finds what the first has left on disk."""


def play_useless_draft(bench: Workbench, placement: Placement) -> None:
    """A 1B-shaped draft of dummy weights is never right for the 8B-shaped target: what it costs, as shipped, in a
    process that nothing is known to, and in the next one."""
    rows = USELESS_ROWS if bench.options.kind == "cuda" else (1, 2)
    title = f"A draft that is never right, {USELESS_TOKENS} tokens, two processes each: {placement.about} (tokens/s)"
    columns = ("rows", "process", "plain: first", "next five", "speculative: first", "next five")
    table = bench.table(title, *columns, "first ÷ first", "median ÷ median", "least ÷ median", "acceptance")
    # What the first rounds of a process have learned of the draft would serve the others.
    reports = [
        bench.bench(
            bench.config("8b-1b", placement, most_rows=number, as_shipped=True),
            [number],
            "--cold",
            "--max-tokens",
            USELESS_TOKENS,
            variables=bench.own_caches(f"useless-{number}"),
        )
        for number in rows
        for _ in PROCESSES
    ]
    for index, (entry,) in enumerate(report["results"] for report in reports):
        (plain, plain_next), (drafted, drafted_next) = (
            (of_mode[0], of_mode[1:])
            for of_mode in (entry[mode]["tokens_per_s_runs"] for mode in ("plain", "speculative"))
        )
        median = statistics.median(plain_next)
        table.add(
            entry["rows"], PROCESSES[index % len(PROCESSES)], plain, _list(plain_next),
            drafted, _list(drafted_next), drafted / plain,
            statistics.median(drafted_next) / median, min(drafted_next) / median,
            entry["speculative"]["mean_acceptance_length"],
        )  # fmt: skip


def _list(rates: list[float]) -> str:
    return ", ".join(f"{rate:.0f}" for rate in rates)


def play_starts(bench: Workbench, placement: Placement, pairs: Sequence[str] = ("8b", "70b")) -> None:
    """From the command to ready: with empty caches, with warm ones, and with those that `trtrun warm-up` has filled."""
    table = bench.table(
        f"Starts: {placement.about}", "pair", "caches", "seconds to ready", "seconds of the command", "of warm-up"
    )
    for pair in pairs:
        config = bench.config(pair, placement, as_shipped=True)
        for name in ("own", "warmed"):
            folder = bench.folder / f"caches-{pair}-{name}"
            variables = {variable: str(folder / below) for variable, below in CACHES.items()}
            made = None
            if name == "warmed":
                ended = bench.trtrun("warm-up", "--config", config, "--cache", folder).succeed()
                made = ended.seconds
            states = ("cold", "warm") if made is None else ("by warm-up",)
            for state in states:
                with bench.start(*_one_row(config), variables=variables) as child:
                    ended = child.wait(bench.deadline).succeed()
                report = ended.last_json()
                bench.keep({"pair": pair, "caches": state, "seconds": ended.seconds, "report": report})
                table.add(f"{pair}-shaped", state, report["start_s"], ended.seconds, made)


WARM_STARTS = 2
ENGINE_PROMPTS = 8


def play_engines(bench: Workbench, placement: Placement) -> None:
    """From the command to ready with warm caches: of the 8B-shaped pair's checkpoints, weights in files, and of engines
    that are built of them; and whether the texts are the same."""
    shapes = bench.pair("8b")
    bench.write_weights(shapes.target, shapes.draft)
    checkpoints = bench.config("8b", placement, files=True, as_shipped=True)
    engines = _build_engines(bench, checkpoints)
    configs = {"checkpoint": checkpoints, "engine": engines}
    columns = ("of", "start", "seconds to ready", "weights", "kernels", "largest round", "all kernels once, graphs")
    table = bench.table(
        f"Starts of checkpoints and of engines, 8B-shaped pair: {placement.about}", *columns, "the rest"
    )
    seconds: dict[str, list[float]] = {name: [] for name in configs}
    states = ("cold", *(["warm"] * WARM_STARTS)) if bench.options.kind == "cuda" else ("warm",)
    for state in states:  # one after the other: both meet the same page cache
        for name, config in configs.items():
            report = _start_once(bench, config, f"caches-{name}", state)
            phases, ready = report["start_phases_s"], report["start_s"]
            told = [phases.get(column, 0.0) for column in columns[3:]]
            table.add(name, state, ready, *told, ready - sum(told))
            if state == "warm":
                seconds[name].append(ready)
    mean = {name: statistics.mean(values) for name, values in seconds.items()}
    equal = _texts(bench, checkpoints) == _texts(bench, engines)
    ratio = mean["engine"] / mean["checkpoint"]
    bench.keep({"warm_start_s": seconds, "engine_over_checkpoint": round(ratio, 3), "equal_texts": equal})
    end = bench.table("Engines", "engine ÷ checkpoint, to ready", "equal texts")
    end.add(ratio, equal)
    if not equal:
        raise ChildError("texts of engines differ from those of their checkpoints")


def _build_engines(bench: Workbench, config: Path) -> Path:
    """Build an engine of each model of a job; returns the YAML file of a job that runs them."""
    table = bench.table("Engines that are built", "of", "GB", "seconds", "for")
    values: dict[str, Any] = json.loads(config.read_text())
    for role in ("target", "draft"):
        model, output = Path(values[role]["model"]), bench.folder / f"engine-{role}"
        words = ["build", "--checkpoint", model, "--output", output, "--tp", len(values[role]["devices"])]
        words += ["--device", bench.options.kind]
        ended = run([*TRTRUN, *words], bench.folder, bench.deadline).succeed()
        made = ended.last_json()
        bench.keep({"build": role, **made})
        table.add(model.name, made["bytes"] / 1e9, ended.seconds, made["built_for"])
        values[role] = {**values[role], "model": str(output)}
    file = config.with_name("engines.yaml")
    file.write_text(json.dumps(values), encoding="utf-8")
    return file


def _start_once(bench: Workbench, config: Path, caches: str, state: str) -> dict[str, Any]:
    folder = bench.folder / caches
    # An engine's kernels lie in the engine.
    named = {variable: str(folder / below) for variable, below in CACHES.items()}
    variables = {"XDG_CACHE_HOME": named["XDG_CACHE_HOME"]} if "engine" in caches else named
    with bench.start(*_one_row(config), variables=variables) as child:
        ended = child.wait(bench.deadline).succeed()
    report = ended.last_json()
    bench.keep({"caches": f"{caches}, {state}", "seconds": ended.seconds, "report": report})
    return report


def _texts(bench: Workbench, config: Path) -> list[Any]:
    """Tokens of some prompts, greedy."""
    prompts, output = bench.folder / "engine-prompts.jsonl", config.with_suffix(".rows")
    rows = [{"prompt_token_ids": [3 + index, 7, 11, 5 + index]} for index in range(ENGINE_PROMPTS)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokens = ("--max-tokens", bench.options.scale.max_tokens)
    bench.trtrun("run", "--config", config, "--prompts", prompts, "--output", output, *tokens).succeed()
    found = [json.loads(line) for line in output.read_text().splitlines()]
    return [row["token_ids"] for row in found]


def _one_row(config: object) -> tuple[object, ...]:
    return "bench", "--config", config, "--rows", 1, "--max-tokens", 4, "--repeats", 1, "--json"
