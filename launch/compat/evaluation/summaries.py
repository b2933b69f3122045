"""What examples/summarize.py asks, from local JSON lines: prompts, references, and ROUGE of what came of them.

It knows texts and no model.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trtrun.errors import ConfigError, nearest, shorten_path, why_unreadable
from trtrun.tokens.text import Tokenizer


@dataclass(frozen=True)
class Task:
    """One of the original's tasks.

    Attributes:
        data_set: the name of its folder.
        split: the part of it that has references.
        asked, reference: fields of a line.
        appended: to what is asked.
    """

    data_set: str
    split: str
    asked: str
    reference: str
    appended: str = ""


TASKS = {
    "summarize": Task("cnn_dailymail", "test", "article", "highlights", " TL;DR: "),
    "summarize_long": Task("zero_scrolls", "validation", "input", "output"),
    "code_completion": Task("openai_humaneval", "test", "prompt", "canonical_solution"),
    "eval_context_ppl": Task("SlimPajama-6B", "test", "text", "text"),
}

ROUGE = ("rouge1", "rouge2", "rougeL", "rougeLsum")


def find_lines(place: str | None, task: Task) -> Path:
    """The file of a task: what was named, or what the folder that was named has of it.

    Raises:
        ConfigError: there is none.
    """
    how = f'save it as JSON lines, such as {{"{task.asked}": …, "{task.reference}": …}}, and give --dataset_dir FILE'
    if place is None:
        raise ConfigError(f"--dataset_dir is needed, as {task.data_set} is not downloaded: {how}")
    path = Path(place)
    if path.is_file():
        return path
    for folder in (path, path / task.data_set, path / "ccdv" / task.data_set):
        for ending in ("jsonl", "json"):
            found = sorted(folder.glob(f"{task.split}*.{ending}"))
            if found:
                return found[0]
    raise ConfigError(f"--dataset_dir {shorten_path(path)} has no {task.split}.jsonl of {task.data_set}: {how}")


def read_lines(path: Path, task: Task, seed: int) -> list[tuple[str, str]]:
    """What is asked, and the reference, of each line, in the order in which the library `datasets` shuffles them.

    Raises:
        ConfigError: the file cannot be read, or a line lacks a field.
    """
    lines = []
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                values = json.loads(line)
                fields = values if isinstance(values, dict) else {}
                for name in (task.asked, task.reference):
                    if not isinstance(fields.get(name), str):
                        raise ConfigError(f"{path}:{number}: no text '{name}'{nearest(name, fields)}")
                lines.append((fields[task.asked], fields[task.reference]))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: {why_unreadable(error)}") from None
    if not lines:
        raise ConfigError(f"{path}: no line")
    return [lines[place] for place in np.random.default_rng(seed).permutation(len(lines))]


def make_prompt(tokenizer: Tokenizer, text: str, task: Task, longest: int, add_special_tokens: bool) -> list[int]:
    """The tokens of a prompt. Of one that is too long the last `longest` stay, behind the special tokens in front."""
    written = (text + task.appended).strip().replace(" n't", "n't")
    plain = tokenizer.encode(written, add_special_tokens=False)
    prompt = tokenizer.encode(written) if add_special_tokens else plain
    if len(prompt) <= longest:
        return prompt
    added = len(prompt) - len(plain)
    front = prompt[:added] if prompt[added:] == plain else []
    return [*front, *plain[max(0, len(plain) - longest + len(front)) :]]


def score(predictions: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """ROUGE's F-measures in percent, as the library `evaluate` computes them with NumPy's seed 0: the middle of a
    thousand means of samples."""
    from rouge_score.rouge_scorer import RougeScorer
    from rouge_score.scoring import BootstrapAggregator
    from rouge_score.tokenizers import DefaultTokenizer

    # With a tokenizer of its own choice it would log that, and set up logging for the whole process.
    scorer, aggregator = RougeScorer([*ROUGE], tokenizer=DefaultTokenizer(use_stemmer=False)), BootstrapAggregator()
    for prediction, reference in zip(predictions, references, strict=True):
        aggregator.add_scores(scorer.score(reference, prediction))
    np.random.seed(0)
    return {name: 100 * float(found.mid.fmeasure) for name, found in aggregator.aggregate().items()}
