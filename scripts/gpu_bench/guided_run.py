"""Times guided rows beside unguided ones of the same length, plain and speculative, in one process.

    python guided_run.py CONFIG ROWS,ROWS MAX_TOKENS REPEATS SEED

Each row has a JSON schema of its own, which no text of MAX_TOKENS tokens completes: arrays of many records. All kinds
of runs take turns. The last line is a JSON object: for each number of rows and mode the tokens a second, medians.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from launch.mpi.job import finish_mpi
from trtrun import LLM, SamplingParams
from trtrun.configuration.config import load_config
from trtrun.models.config import read_model_config

PROMPT_TOKENS = 32
MODES = ("plain", "speculative")
WORDS = ("name", "city", "street", "amount", "owner", "status", "colour", "comment", "country", "price", "unit", "kind")


def make_schema(number: int) -> dict[str, Any]:
    """The schema of a row: records with names, numbers, choices and lists under keys of its own."""
    choose = random.Random(number)
    first, second, third, fourth = (f"{word}_{number}" for word in choose.sample(WORDS, 4))
    properties = {
        first: {"type": "string", "minLength": 4, "maxLength": 40},
        second: {"type": "number"},
        third: {"enum": [f"{word}-{number}" for word in choose.sample(WORDS, 3)]},
        fourth: {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 4},
    }
    record = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return {"x-guidance": {"whitespace_flexible": False}, "type": "array", "items": record, "minItems": 1000}


class Runs:
    """Timed runs of one engine."""

    def __init__(self, llm: LLM, vocabulary: int, max_tokens: int, seed: int) -> None:
        """Of `max_tokens` tokens a row; prompts are random tokens below `vocabulary`."""
        self._llm = llm
        self._tokens = range(3, vocabulary)
        self._max_tokens = max_tokens
        self._random = random.Random(seed)

    def run(self, rows: int, mode: str, guided: bool, max_tokens: int | None = None) -> dict[str, Any]:
        """One run of `rows` rows, with prompts never seen before."""
        prompts = [self._random.choices(self._tokens, k=PROMPT_TOKENS) for _ in range(rows)]
        sampling = [
            SamplingParams(
                max_tokens=max_tokens or self._max_tokens,
                ignore_eos=True,
                guided={"json": make_schema(row)} if guided else None,  # type: ignore[arg-type]
            )
            for row in range(rows)
        ]
        self._llm.set_speculation(mode == "speculative")
        self._llm.reset_statistics()
        started = time.perf_counter()
        outputs = self._llm.generate(prompts, sampling)
        seconds = time.perf_counter() - started
        errors = [output.error for output in outputs if output.error is not None]
        if errors:
            raise SystemExit(f"guided_run.py: a row ended with: {errors[0]}")
        count = sum(len(output.completions[0].token_ids) for output in outputs)
        return {"tokens_per_s": count / seconds, "statistics": self._llm.statistics()}


def measure(runs: Runs, rows: int, repeats: int) -> dict[str, Any]:
    """All kinds of runs of so many rows, in turns."""
    kinds = [(mode, guided) for mode in MODES for guided in (False, True)]
    for mode, guided in kinds:
        runs.run(rows, mode, guided, max_tokens=8)
    found: dict[tuple[str, bool], list[dict[str, Any]]] = {kind: [] for kind in kinds}
    for _ in range(repeats):
        for mode, guided in kinds:
            found[mode, guided].append(runs.run(rows, mode, guided))
    told: dict[str, Any] = {"rows": rows}
    for (mode, guided), of_kind in found.items():
        last = of_kind[-1]["statistics"]
        told[f"{mode}_{'guided' if guided else 'free'}"] = {
            "tokens_per_s": statistics.median(run["tokens_per_s"] for run in of_kind),
            "tokens_per_s_runs": [run["tokens_per_s"] for run in of_kind],
            "mean_acceptance_length": last["mean_acceptance_length"],
            "num_captures": sum(run["statistics"]["num_captures"] for run in of_kind),
            "num_compilations": sum(run["statistics"]["num_compilations"] for run in of_kind),
        }
    rates = {name: case["tokens_per_s"] for name, case in told.items() if name != "rows"}
    return told | {
        "plain_guided_over_free": rates["plain_guided"] / rates["plain_free"],
        "speculative_guided_over_free": rates["speculative_guided"] / rates["speculative_free"],
        "guided_speculative_over_plain": rates["speculative_guided"] / rates["plain_guided"],
    }


def main() -> None:
    """Entry of the program."""
    config_file, rows, max_tokens, repeats, seed = sys.argv[1:]
    config = load_config(Path(config_file))
    with LLM(config=config) as llm:
        runs = Runs(llm, read_model_config(config.target.model).vocab_size, int(max_tokens), int(seed))
        results = [measure(runs, int(number), int(repeats)) for number in rows.split(",")]
    print(json.dumps({"results": results}), flush=True)
    finish_mpi()


if __name__ == "__main__":
    main()
