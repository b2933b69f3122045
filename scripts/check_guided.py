"""Asks for many answers to many made-up JSON schemas, and looks whether each is valid, with and without a draft.

    python scripts/check_guided.py --schemas 200 --answers 50
    python scripts/check_guided.py --schemas 5000 --answers 0       # compile them only

Answers are sampled, those of the shipped pair unless --target and --draft name others. One that max_tokens cut short
need not be valid, and is counted. The exit status is 1 where an answer is not valid, or texts with a draft differ.
Schemas are drawn from what llguidance follows, nested, with references and alternatives. Validity is jsonschema's.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jsonschema

from trtrun import LLM, SamplingParams
from trtrun.configuration.config import make_config
from trtrun.configuration.model_paths import ASSETS

DEEPEST = 3
WORDS = ("name", "size", "colour", "tag", "path", "owner", "state", "count", "price", "unit", "note", "city")


class Schemas:
    """Draws schemas."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._plain: list[Callable[[], dict[str, Any]]] = [
            self._text, self._integer, self._number, self._choice, self._constant, self._pattern, self._simple,
        ]  # fmt: skip
        self._nested: list[Callable[[int], dict[str, Any]]] = [
            self._record, self._record, self._list, self._tuple, self._either, self._map,
        ]  # fmt: skip

    def draw(self) -> dict[str, Any]:
        """A schema, with a definition that it may refer to."""
        schema = self._record(0) if self._random.random() < 0.8 else self._list(0)
        compact = {"x-guidance": {"whitespace_flexible": False}} if self._random.random() < 0.9 else {}
        return {**compact, **schema, "$defs": {"part": self._record(DEEPEST)}}

    def _any(self, depth: int) -> dict[str, Any]:
        if depth < DEEPEST and self._random.random() < 0.4:
            return self._random.choice(self._nested)(depth + 1)
        if depth < DEEPEST and self._random.random() < 0.1:
            return {"$ref": "#/$defs/part"}
        return self._random.choice(self._plain)()

    def _text(self) -> dict[str, Any]:
        least = self._random.randint(0, 3)
        return {"type": "string", "minLength": least, "maxLength": least + self._random.randint(0, 12)}

    def _integer(self) -> dict[str, Any]:
        least = self._random.randint(-500, 500)
        return {"type": "integer", "minimum": least, "maximum": least + self._random.choice((0, 7, 1000))}

    def _number(self) -> dict[str, Any]:
        return {"type": "number", "minimum": 0, "maximum": self._random.choice((1, 99))}

    def _choice(self) -> dict[str, Any]:
        return {"enum": [*self._random.sample(WORDS, 3), *self._random.sample((1, 2.5, None, True, [1], {"a": 1}), 2)]}

    def _constant(self) -> dict[str, Any]:
        return {"const": self._random.choice(('é\\n"x"', 7, None, ["a", 1]))}

    def _pattern(self) -> dict[str, Any]:
        return {"type": "string", "pattern": self._random.choice(("^[a-c]{2,4}$", "^\\d{4}-\\d{2}$", "^(yes|no)!?$"))}

    def _simple(self) -> dict[str, Any]:
        return {"type": self._random.choice(("boolean", "null", ["boolean", "null"]))}

    def _record(self, depth: int) -> dict[str, Any]:
        names = self._random.sample(WORDS, self._random.randint(1, 4))
        needed = [name for name in names if self._random.random() < 0.7]
        properties = {name: self._any(depth) for name in names}
        return {"type": "object", "properties": properties, "required": needed, "additionalProperties": False}

    def _list(self, depth: int) -> dict[str, Any]:
        least = self._random.randint(0, 2)
        most = least + self._random.randint(0, 2)
        return {"type": "array", "items": self._any(depth), "minItems": least, "maxItems": most}

    def _tuple(self, depth: int) -> dict[str, Any]:
        parts = [self._any(depth) for _ in range(self._random.randint(1, 3))]
        return {"type": "array", "prefixItems": parts, "items": False, "minItems": len(parts)}

    def _either(self, depth: int) -> dict[str, Any]:
        return {"anyOf": [self._any(depth), self._any(depth)]}

    def _map(self, depth: int) -> dict[str, Any]:
        return {"type": "object", "additionalProperties": self._any(depth), "maxProperties": 2}


def answers_of(llm: LLM, asked: list[SamplingParams]) -> list[tuple[str | None, str, str | None]]:
    """Text, why it ended, and the error of each."""
    outputs = llm.generate(["The record: "] * len(asked), asked)
    return [
        (None, "error", output.error)
        if output.error is not None
        else (output.completions[0].text, output.completions[0].finish_reason, None)
        for output in outputs
    ]


def main() -> int:
    """Ask, look, and say how many there were."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemas", type=int, default=200)
    parser.add_argument("--answers", type=int, default=50, help="to each schema")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--target", type=Path, default=ASSETS / "target")
    parser.add_argument("--draft", type=Path, default=ASSETS / "draft")
    parser.add_argument("--device", default="cpu:0")
    arguments = parser.parse_args()
    draw = Schemas(arguments.seed)
    schemas = [draw.draw() for _ in range(arguments.schemas)]
    values = {
        "target": {"model": str(arguments.target), "devices": [arguments.device]},
        "draft": {"model": str(arguments.draft), "devices": [arguments.device]},
        "speculation": {"draft_len": 4},
    }
    counts = dict.fromkeys(("refused", "valid", "cut short", "failed", "invalid", "unequal"), 0)
    started = time.perf_counter()
    with LLM(config=make_config(values)) as llm:
        for number, schema in enumerate(schemas):
            guided: Any = {"json": schema}
            asked = [
                SamplingParams(
                    max_tokens=arguments.max_tokens, temperature=1.0, seed=1000 * number + one, guided=guided
                )
                for one in range(max(1, arguments.answers))
            ]
            try:
                llm.engine.prepare(asked[0])
            except Exception as error:  # of any kind: it is told
                counts["refused"] += 1
                print(f"schema {number} is refused: {error}: {json.dumps(schema)}")
                continue
            if not arguments.answers:
                continue
            llm.set_speculation(True)
            found = answers_of(llm, asked)
            llm.set_speculation(False)
            counts["unequal"] += sum(one != other for one, other in zip(found, answers_of(llm, asked), strict=True))
            for text, reason, error in found:
                kind = judge(schema, text, reason)
                counts[kind] += 1
                if kind in ("failed", "invalid"):
                    print(f"schema {number}, {kind}: {error or text!r}: {json.dumps(schema)}")
    print(json.dumps({**counts, "schemas": len(schemas), "seconds": round(time.perf_counter() - started, 1)}))
    return 1 if counts["invalid"] or counts["unequal"] or counts["failed"] else 0


def judge(schema: dict[str, Any], text: str | None, reason: str) -> str:
    """What an answer is."""
    if text is None:
        return "failed"
    if reason != "stop":
        return "cut short"
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError):
        return "invalid"
    return "valid"


if __name__ == "__main__":
    sys.exit(main())
