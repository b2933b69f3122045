"""Times rows of one kind beside free ones of the same length, plain and speculative, in one process.

    python kinds_run.py CONFIG guided|budgeted|adapted ROWS,ROWS MAX_TOKENS REPEATS SEED

Guided: each row has a JSON schema of its own, which no text of MAX_TOKENS tokens completes: arrays of many records.
Budgeted: thoughts end behind a third of the tokens. Adapted: rows have the configuration's adapters in turn. All kinds
of runs take turns. The last line is a JSON object: for each number of rows and mode the tokens a second, medians, and
whether speculative texts were plain ones.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from launch.jobs.mpi.job import finish_mpi
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

    def __init__(self, llm: LLM, vocabulary: int, max_tokens: int, seed: int, kind: str, adapters: list[str]) -> None:
        """Time rows of `max_tokens` tokens; prompts are random tokens below `vocabulary`."""
        self._llm = llm
        self._tokens = range(3, vocabulary)
        self._max_tokens = max_tokens
        self._random = random.Random(seed)
        self.kind = kind
        self._adapters = adapters

    def _asked(self, row: int) -> dict[str, Any]:
        """What a row of the kind asks for."""
        if self.kind == "guided":
            return {"guided": {"json": make_schema(row)}}
        if self.kind == "budgeted":
            return {"thinking_token_budget": self._max_tokens // 3, "thinking_marks": ("", "</think>")}
        return {"lora_name": self._adapters[row % len(self._adapters)]}

    def prompts(self, rows: int) -> list[list[int]]:
        """Prompts never seen before."""
        return [self._random.choices(self._tokens, k=PROMPT_TOKENS) for _ in range(rows)]

    def texts(self, prompts: list[list[int]], mode: str, is_free: bool, max_tokens: int | None = None) -> list[Any]:
        """The tokens of a run."""
        sampling = [
            SamplingParams(
                max_tokens=max_tokens or self._max_tokens,
                ignore_eos=True,
                **({} if is_free else self._asked(row)),
            )
            for row in range(len(prompts))
        ]
        self._llm.set_speculation(mode == "speculative")
        outputs = self._llm.generate(prompts, sampling)
        errors = [output.error for output in outputs if output.error is not None]
        if errors:
            raise SystemExit(f"kinds_run.py: a row ended with: {errors[0]}")
        return [output.completions[0].token_ids for output in outputs]

    def run(self, rows: int, mode: str, is_free: bool, max_tokens: int | None = None) -> dict[str, Any]:
        """One run of `rows` rows, timed."""
        prompts = self.prompts(rows)
        self._llm.reset_statistics()
        started = time.perf_counter()
        texts = self.texts(prompts, mode, is_free, max_tokens)
        seconds = time.perf_counter() - started
        return {"tokens_per_s": sum(map(len, texts)) / seconds, "statistics": self._llm.statistics()}


def measure(runs: Runs, rows: int, repeats: int) -> dict[str, Any]:
    """All kinds of runs of so many rows, in turns."""
    kinds = [(mode, is_free) for mode in MODES for is_free in (True, False)]
    for mode, is_free in kinds:
        runs.run(rows, mode, is_free, max_tokens=8)
    found: dict[tuple[str, bool], list[dict[str, Any]]] = {kind: [] for kind in kinds}
    for _ in range(repeats):
        for mode, is_free in kinds:
            found[mode, is_free].append(runs.run(rows, mode, is_free))
    told: dict[str, Any] = {"rows": rows}
    for (mode, is_free), of_kind in found.items():
        last = of_kind[-1]["statistics"]
        told[f"{mode}_{'free' if is_free else runs.kind}"] = {
            "tokens_per_s": statistics.median(run["tokens_per_s"] for run in of_kind),
            "tokens_per_s_runs": [run["tokens_per_s"] for run in of_kind],
            "mean_acceptance_length": last["mean_acceptance_length"],
            "num_captures": sum(run["statistics"]["num_captures"] for run in of_kind),
            "num_compilations": sum(run["statistics"]["num_compilations"] for run in of_kind),
        }
    rates, kind = {name: case["tokens_per_s"] for name, case in told.items() if name != "rows"}, runs.kind
    prompts = runs.prompts(rows)
    texts = [runs.texts(prompts, mode, is_free=False) for mode in MODES]
    return told | {
        f"plain_{kind}_over_free": rates[f"plain_{kind}"] / rates["plain_free"],
        f"speculative_{kind}_over_free": rates[f"speculative_{kind}"] / rates["speculative_free"],
        f"{kind}_speculative_over_plain": rates[f"speculative_{kind}"] / rates[f"plain_{kind}"],
        "equal_texts": sum(plain == speculative for plain, speculative in zip(*texts, strict=True)),
    }


def main() -> None:
    """Entry of the program."""
    config_file, kind, rows, max_tokens, repeats, seed = sys.argv[1:]
    config = load_config(Path(config_file))
    with LLM(config=config) as llm:
        vocabulary = read_model_config(config.target.model).vocab_size
        runs = Runs(llm, vocabulary, int(max_tokens), int(seed), kind, list(config.adapters))
        results = [measure(runs, int(number), int(repeats)) for number in rows.split(",")]
    print(json.dumps({"results": results}), flush=True)
    finish_mpi()


if __name__ == "__main__":
    main()
