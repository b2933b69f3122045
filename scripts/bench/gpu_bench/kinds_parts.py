"""Rows of one kind beside rows that ask for nothing, on the 8B-shaped pair: guided ones, each with a JSON schema, ones
whose thoughts have a budget, and ones with adapters.

Weights are dummies; so is the tokenizer, which spells texts as others do, and adapters. It knows directories of models
and the JSON of kinds_run.py. It does not know when it runs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from scripts.bench.gpu_bench.models import SHAPES, write_model
from scripts.bench.gpu_bench.placements import ONE
from scripts.bench.gpu_bench.workbench import Workbench
from scripts.harness.children import run
from scripts.pair.synthetic_tokenizer import make_tokenizer

KINDS_RUN = Path(__file__).resolve().parent / "kinds_run.py"
WRITE_ADAPTER = Path(__file__).resolve().parent / "write_adapter.py"
NUM_ADAPTERS, NUM_FILES = 16, 4
"""Adapters, and directories of theirs: what is in them takes as long to multiply."""


def play_guided(bench: Workbench) -> None:
    """Tokens a second of one row and of many, guided and not, plain and speculative."""
    _play(bench, _with_tokenizer(bench), "guided", 2, "8B-shaped pair, a JSON schema each row")


def play_budgets(bench: Workbench) -> None:
    """The same with thoughts that a budget ends."""
    _play(bench, _with_tokenizer(bench), "budgeted", 1, "8B-shaped pair, a budget for thoughts each row")


def _with_tokenizer(bench: Workbench) -> dict[str, Any]:
    """The configuration of the pair, whose models have a tokenizer."""
    shapes = bench.pair("8b")
    values = json.loads(bench.config("8b", ONE).read_text(encoding="utf-8"))
    for role, shape in (("target", shapes.target), ("draft", shapes.draft)):
        path = write_model(bench.folder / "guided-models", shape)
        make_tokenizer(SHAPES[shape].vocabulary).save(str(path / "tokenizer.json"))
        values[role]["model"] = str(path)
    return values


def play_adapters(bench: Workbench) -> None:
    """The same with an adapter each row, of all projections."""
    rank = min(16, SHAPES[bench.pair("8b").target].head_dim)
    values = json.loads(bench.config("8b", ONE).read_text(encoding="utf-8"))
    paths = [bench.folder / f"adapter-{number}" for number in range(NUM_FILES)]
    for seed, path in enumerate(paths):
        words = (sys.executable, WRITE_ADAPTER, bench.pair("8b").target, path, rank, seed)
        run(words, bench.folder, bench.deadline).succeed()
    values["adapters"] = {f"a{number}": str(paths[number % NUM_FILES]) for number in range(NUM_ADAPTERS)}
    values["adapter_slots"] = {"max_rank": rank}
    _play(bench, values, "adapted", 1, f"8B-shaped pair, {NUM_ADAPTERS} adapters of rank {rank}")


def _play(bench: Workbench, values: dict[str, Any], kind: str, length: int, title: str) -> None:
    """Run rows of a kind, `length` times as long as usual, beside free ones."""
    scale = bench.options.scale
    config = bench.config("8b", ONE)
    config.write_text(json.dumps(values), encoding="utf-8")
    rows = ",".join(map(str, sorted({scale.rows[0], scale.rows[-1]})))
    words = (
        sys.executable,
        KINDS_RUN,
        config,
        kind,
        rows,
        length * scale.max_tokens,
        scale.repeats,
        bench.options.seed,
    )
    report = run(words, bench.folder, bench.deadline).succeed().last_json()
    bench.keep({"report": report})
    columns = ("rows", "mode", "tokens/s", "free", "ratio", "tokens a round", "free", f"÷ plain {kind}")
    table = bench.table(title, *columns, "captures", "compilations", "equal texts")
    for entry in report["results"]:
        for mode in ("plain", "speculative"):
            asked, free = entry[f"{mode}_{kind}"], entry[f"{mode}_free"]
            rates, accepted = ([case[name] for case in (asked, free)] for name in _SHOWN)
            over_plain = entry[f"{kind}_speculative_over_plain"] if mode == "speculative" else None
            made = (asked["num_captures"], asked["num_compilations"])
            equal = f"{entry['equal_texts']} of {entry['rows']}" if mode == "speculative" else None
            ratio = entry[f"{mode}_{kind}_over_free"]
            table.add(entry["rows"], mode, *rates, ratio, *accepted, over_plain, *made, equal)


_SHOWN = ("tokens_per_s", "mean_acceptance_length")
