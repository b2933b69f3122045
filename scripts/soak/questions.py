"""Requests whose answers are known to the token: `trtrun run` has written them before.

It knows rows and sampling parameters. It does not know servers.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.harness.children import TRTRUN, ChildError, run
from scripts.harness.processes import server_environment
from trtrun.configuration.model_paths import ASSETS

_REFERENCE_SECONDS = 900.0


@dataclass(frozen=True)
class Completion:
    """What one completion of a question has to be."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str


@dataclass(frozen=True)
class Question:
    """A prompt with sampling parameters, by the names that rows and the OpenAI API share, and its one right answer."""

    fields: Mapping[str, Any]
    completions: tuple[Completion, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole answer."""
        return sum(len(completion.token_ids) for completion in self.completions)


def make_rows(count: int, longest: int, seed: int) -> list[dict[str, Any]]:
    """Input rows of mixed kinds: greedy and by seed, short and long, one completion and several, stop strings,
    penalties, tokens instead of texts.

    Args:
        count: of rows.
        longest: most tokens of a completion; the others have down to one.
        seed: the same one makes the same rows.
    """
    choose = random.Random(seed)
    texts = [entry["text"] for entry in json.loads((ASSETS / "heldout.json").read_text(encoding="utf-8"))["prompts"]]
    rows = []
    for number in range(count):
        text = choose.choice(texts)
        row: dict[str, Any] = {"prompt": text[: choose.choice((20, 200, 600, len(text)))]}
        row["max_tokens"] = longest if number % 3 == 0 else choose.randint(1, longest)
        row["ignore_eos"] = number % 2 == 0
        if number % 4:
            row |= {"temperature": round(choose.uniform(0.3, 1.2), 2), "seed": choose.randrange(2**31)}
            row |= choose.choice(({}, {"top_p": 0.9}, {"top_k": 40}, {"min_p": 0.05}))
        else:
            row["temperature"] = 0.0
        row |= choose.choice(({}, {}, {"repetition_penalty": 1.1}, {"presence_penalty": 0.5, "frequency_penalty": 0.2}))
        row |= choose.choice(({}, {}, {"stop": ["\n\n", "return"]}, {"min_tokens": 1}))
        if number % 5 == 4:
            row["n"] = choose.randint(2, 4)
        rows.append(row)
    return rows


async def ask_reference(config: Path, rows: Sequence[dict[str, Any]], folder: Path) -> list[Question]:
    """What `trtrun run` writes for rows, on the ranks of the same configuration.

    Raises:
        ChildError: it refuses a row, or fails.
    """
    prompts, output = folder / "rows.jsonl", folder / "answers.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    words = [*TRTRUN, "run", "--config", config, "--prompts", prompts, "--output", output]
    deadline = time.monotonic() + _REFERENCE_SECONDS
    ended = await asyncio.to_thread(run, words, folder, deadline, server_environment())
    ended.succeed()
    questions = []
    for row, line in zip(rows, output.read_text(encoding="utf-8").splitlines(), strict=True):
        answer = json.loads(line)
        if answer["error"] is not None:
            raise ChildError(f"trtrun run refused a row: {answer['error']}")
        completions = answer.get("completions") or [answer]
        expected = [Completion(item["text"], tuple(item["token_ids"]), item["finish_reason"]) for item in completions]
        questions.append(Question(row, tuple(expected)))
    return questions
