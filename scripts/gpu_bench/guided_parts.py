"""Guided rows, each with a JSON schema, beside rows that are not, on the 8B-shaped pair.

Weights are made up; the tokenizer is, too, but spells texts as others do. It knows directories of models and the JSON
of guided_run.py. It does not know when it runs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from synthetic_tokenizer import make_tokenizer

from gpu_bench.children import run
from gpu_bench.models import SHAPES, write_model
from gpu_bench.placements import ONE
from gpu_bench.workbench import Workbench

GUIDED_RUN = Path(__file__).resolve().parent / "guided_run.py"


def play_guided(bench: Workbench) -> None:
    """Tokens a second of one row and of many, guided and not, plain and speculative."""
    scale, shapes = bench.options.scale, bench.pair("8b")
    config = bench.config("8b", ONE)
    values = json.loads(config.read_text(encoding="utf-8"))
    for role, shape in (("target", shapes.target), ("draft", shapes.draft)):
        path = write_model(bench.folder / "guided-models", shape)
        make_tokenizer(SHAPES[shape].vocabulary).save(str(path / "tokenizer.json"))
        values[role]["model"] = str(path)
    config.write_text(json.dumps(values), encoding="utf-8")
    rows = ",".join(map(str, sorted({scale.rows[0], scale.rows[-1]})))
    words = (sys.executable, GUIDED_RUN, config, rows, 2 * scale.max_tokens, scale.repeats, bench.options.seed)
    report = bench.succeed(run(words, bench.folder, bench.deadline)).last_json()
    bench.keep({"report": report})
    columns = ("rows", "mode", "tokens/s", "unguided", "ratio", "tokens a round", "unguided", "÷ plain guided")
    table = bench.table("8B-shaped pair, a JSON schema each row", *columns, "captures", "compilations")
    for entry in report["results"]:
        for mode in ("plain", "speculative"):
            guided, free = entry[f"{mode}_guided"], entry[f"{mode}_free"]
            rates, accepted = ([case[name] for case in (guided, free)] for name in _SHOWN)
            over_plain = entry["guided_speculative_over_plain"] if mode == "speculative" else None
            made = (guided["num_captures"], guided["num_compilations"])
            table.add(entry["rows"], mode, *rates, entry[f"{mode}_guided_over_free"], *accepted, over_plain, *made)


_SHOWN = ("tokens_per_s", "mean_acceptance_length")
