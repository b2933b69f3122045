"""Asks for many answers to many JSON schemas, and looks whether each is valid, with and without a draft.

    python scripts/soak/check_guided.py --schemas 200 --answers 50
    python scripts/soak/check_guided.py --schemas 5000 --answers 0       # compile them only
    python scripts/soak/check_guided.py --schemas-from DIRECTORY --complete 10000

Answers are sampled, those of the shipped pair unless --target and --draft name others. One that max_tokens cut short
need not be valid, and is counted. The exit status is 1 where an answer is not valid, or texts with a draft differ.
Schemas are made up of what llguidance follows, nested, with references and alternatives; or they are those of a
directory, drawn by the seed. Validity is jsonschema's, formats with it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jsonschema

from scripts.soak.guided_schemas import Schemas, schemas_of
from scripts.soak.text_formats import FORMATS
from trtrun import LLM, SamplingParams
from trtrun.configuration.config import make_config
from trtrun.configuration.model_paths import ASSETS

KINDS = ("refused", "valid", "cut short", "failed", "invalid", "unequal")


def answers_of(llm: LLM, asked: list[SamplingParams]) -> list[tuple[str | None, str, str | None]]:
    """Text, why it ended, and the error of each."""
    outputs = llm.generate(["The record: "] * len(asked), asked)
    return [
        (None, "error", output.error)
        if output.error is not None
        else (output.completions[0].text, output.completions[0].finish_reason, None)
        for output in outputs
    ]


def named_schemas(arguments: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    """Schemas, each with a name to tell it by."""
    if arguments.schemas_from is not None:
        return schemas_of(arguments.schemas_from, arguments.seed)
    draw = Schemas(arguments.seed)
    return ((f"schema {number}", draw.draw()) for number in range(arguments.schemas))


def followed(llm: LLM, arguments: argparse.Namespace, counts: Counter[str]) -> list[tuple[str, Any]]:
    """The schemas that can be followed, --schemas at most. Others are told, and counted."""
    kept: list[tuple[str, Any]] = []
    for name, schema in named_schemas(arguments):
        if len(kept) == arguments.schemas:
            break
        try:
            llm.engine.prepare(SamplingParams(guided={"json": schema}))  # type: ignore[arg-type]
        except Exception as error:  # of any kind: it is told
            counts["refused"] += 1
            print(f"{name} is refused: {error}")
            continue
        kept.append((name, schema))
    return kept


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemas", type=int, default=200, help="that are asked for; refused ones do not count")
    parser.add_argument(
        "--schemas-from",
        type=Path,
        metavar="DIRECTORY",
        help="files *.json that are a JSON schema, or an object whose key schema is one, as maskbench's are",
    )
    parser.add_argument("--answers", type=int, default=50, help="to each schema, at once")
    parser.add_argument("--complete", type=int, default=0, help="go on until so many answers were not cut short")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--target", type=Path, default=ASSETS / "target")
    parser.add_argument("--draft", type=Path, default=ASSETS / "draft")
    parser.add_argument("--device", default="cpu:0")
    return parser.parse_args()


def main() -> int:
    """Ask, look, and say how many there were."""
    arguments = parse_arguments()
    values = {
        "target": {"model": str(arguments.target), "devices": [arguments.device]},
        "draft": {"model": str(arguments.draft), "devices": [arguments.device]},
        "speculation": {"draft_len": 4, "pacing": "fixed"},
        "scheduler": {"max_batch_size": max(1, arguments.answers)},
    }
    counts = Counter(dict.fromkeys(KINDS, 0))
    started = time.perf_counter()
    with LLM(config=make_config(values)) as llm:
        schemas = followed(llm, arguments, counts)
        for number in itertools.count() if schemas and arguments.answers else ():
            if number >= len(schemas) and counts["valid"] + counts["invalid"] >= arguments.complete:
                break
            name, schema = schemas[number % len(schemas)]
            ask(llm, name, schema, arguments, 1000 * number, counts)
            if (number + 1) % 20 == 0:
                print(f"asked {number + 1} times: {dict(counts)}", file=sys.stderr)
    print(json.dumps({**counts, "schemas": len(schemas), "seconds": round(time.perf_counter() - started, 1)}))
    return status_of(counts)


def status_of(counts: Counter[str]) -> int:
    """The exit status: 1 where something must not be."""
    return 1 if counts["invalid"] or counts["unequal"] or counts["failed"] else 0


def ask(llm: LLM, name: str, schema: Any, arguments: argparse.Namespace, seed: int, counts: Counter[str]) -> None:
    """Answers to one schema, with a draft and without."""
    guided: Any = {"json": schema}
    asked = [
        SamplingParams(
            max_tokens=arguments.max_tokens, temperature=arguments.temperature, seed=seed + one, guided=guided
        )
        for one in range(arguments.answers)
    ]
    llm.set_speculation(True)
    found = answers_of(llm, asked)
    llm.set_speculation(False)
    for answer, plain in zip(found, answers_of(llm, asked), strict=True):
        if answer != plain:
            counts["unequal"] += 1
            print(f"{name}, unequal: {answer!r} with a draft, {plain!r} without")
        text, reason, error = answer
        kind, why = judge(schema, text, reason)
        counts[kind] += 1
        if kind in ("failed", "invalid"):
            print(f"{name}, {kind}: {error or why}: {text!r}")


def judge(schema: Any, text: str | None, reason: str) -> tuple[str, str]:
    """What an answer is, and why it is not valid."""
    if text is None:
        return "failed", ""
    if reason != "stop":
        return "cut short", ""
    validator = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        validator(schema, format_checker=FORMATS).validate(json.loads(text))
    except (ValueError, jsonschema.ValidationError) as error:
        return "invalid", error.message if isinstance(error, jsonschema.ValidationError) else str(error)
    return "valid", ""


if __name__ == "__main__":
    sys.exit(main())
