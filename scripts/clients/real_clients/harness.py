"""EleutherAI's harness against a server: a task of each kind that it has, of texts that every Python has with it.

    python harness.py URL MODEL TOKENIZER [DIRECTORY]

It runs in the harness's environment, which has nothing of trtrun, and in its working directory. Which of four lines
comes next is asked by likelihoods, and so is the perplexity of texts; the end of a line by a text, as a completion and
as a chat. The last line is JSON: the scores, and a digest of all that was answered, log probabilities in full.

With the model's DIRECTORY the harness also runs it by transformers, in float32. Texts, and what is counted of texts
and choices, have to be the same to the last digit; log probabilities and perplexities may differ by rounding. The last
line says what does differ.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

NUM_ITEMS, NUM_BESIDE = 200, 20
"""Items of a task; fewer where transformers runs beside."""
ROUNDING = 1e-3
"""By which the log probability of a text may differ between the two, whose sums have other orders."""
RELATIVE_ROUNDING = 1e-6
"""The same of perplexities, in their own size."""
FILES = ("ast.py", "email/parser.py", "importlib/abc.py", "locale.py", "plistlib.py", "typing.py", "unittest/loader.py")
"""Of Python's standard library, none that the shipped pair was trained on."""
TASKS = {
    "next_line_choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{context}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{label}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "text_perplexity": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    },
    "line_end_text": {
        "output_type": "generate_until",
        "doc_to_text": "{{context}}{{begin}}",
        "doc_to_target": "{{end}}",
        "target_delimiter": "",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 32, "temperature": 0.0},
        "metric_list": [{"metric": "exact_match"}, {"metric": "chrf"}],
    },
}


def items() -> Iterator[dict[str, Any]]:
    """Contexts, each with four lines of which one comes next."""
    draw = random.Random(1)
    for name in FILES:
        lines = [
            line
            for line in (Path(sysconfig.get_paths()["stdlib"]) / name).read_text(encoding="utf-8").splitlines()
            if line.strip()
        ]
        for number in range(12, len(lines), 6):
            choices = [lines[number], *draw.sample(lines, 3)]
            if len({*choices}) < 4:
                continue
            draw.shuffle(choices)
            context = "\n".join(lines[number - 12 : number]) + "\n"
            cut = len(lines[number]) * 2 // 3
            yield {
                "context": context, "choices": choices, "label": choices.index(lines[number]), "text": context,
                "begin": lines[number][:cut], "end": lines[number][cut:],
            }  # fmt: skip


def write_tasks(folder: Path) -> None:
    """The harness's files of the tasks, and of their texts."""
    folder.mkdir()
    drawn = random.Random(2).sample([*items()], NUM_ITEMS)
    texts = folder / "texts.jsonl"
    texts.write_text("".join(json.dumps(item) + "\n" for item in drawn), encoding="utf-8")
    shared = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(texts)}}, "test_split": "test"}
    for name, task in TASKS.items():  # JSON is YAML
        (folder / f"{name}.yaml").write_text(json.dumps({"task": name, **shared, **task}), encoding="utf-8")


def ask(url: str, model: str, tokenizer: str, client: str, *options: str, tasks: Sequence[str]) -> dict[str, Any]:
    """Let the harness ask the server; its results."""
    path = "completions"
    if "chat" in client:
        path, options = "chat/completions", ("--apply_chat_template", *options)
    arguments = {"model": model, "base_url": f"{url}/v1/{path}", "tokenizer": tokenizer, "num_concurrent": 4}
    return run(client, arguments, *options, tasks=tasks)


def run(client: str, arguments: dict[str, Any], *options: str, tasks: Sequence[str]) -> dict[str, Any]:
    """Let the harness run tasks, with what it writes below a folder of the client's name; its results."""
    words = [
        sys.executable, "-m", "lm_eval", "run", "--model", client, "--tasks", *tasks, "--include_path", "tasks",
        "--model_args", json.dumps(arguments | {"max_length": 1024}),
        "--output_path", client, "--log_samples", *options,
    ]  # fmt: skip
    subprocess.run(words, check=True)
    (results,) = Path(client).rglob("results_*.json")
    found: dict[str, Any] = json.loads(results.read_text(encoding="utf-8"))["results"]
    return found


def samples(client: str) -> list[tuple[str, int, Any]]:
    """What was answered: the task, the item and the answers, log probabilities in full."""
    return sorted(
        (file.name.partition("_20")[0], line["doc_id"], line["filtered_resps"])
        for file in Path(client).rglob("samples_*.jsonl")
        for line in map(json.loads, file.read_text(encoding="utf-8").splitlines())
    )


def numbers(scores: dict[str, Any]) -> dict[str, float]:
    """The figures of all tasks."""
    return {
        f"{task} {metric}": value
        for task, metrics in scores.items()
        for metric, value in metrics.items()
        if isinstance(value, float)
    }


def compare(url: str, model: str, tokenizer: str, directory: str) -> None:
    """Run the tasks by the server and by transformers, and tell what differs."""
    limit = ("--limit", str(NUM_BESIDE))
    served = numbers(ask(url, model, tokenizer, "local-completions", *limit, tasks=[*TASKS]))
    loaded = {"pretrained": directory, "tokenizer": tokenizer, "dtype": "float32"}
    beside = numbers(run("hf", loaded, "--device", "cpu", *limit, tasks=[*TASKS]))
    different = [
        f"{name}: {served.get(name)} beside {value}"
        for name, value in beside.items()
        if abs(served.get(name, math.inf) - value) > (RELATIVE_ROUNDING * value if "perplexity" in name else 0)
    ]
    pairs = [*zip(samples("local-completions"), samples("hf"), strict=True)]
    different += [f"{one} beside {other}" for one, other in pairs if not same(one, other)]
    print(json.dumps({"answers": len(pairs), "scores": served, "transformers": beside, "different": different}))


def same(one: Any, other: Any) -> bool:
    """Whether answers are the same, but for the last digits of log probabilities."""
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    try:  # the harness writes numbers and flags as texts
        return abs(float(one) - float(other)) <= ROUNDING
    except (TypeError, ValueError):
        return bool(one == other)


def main() -> None:
    """Run all tasks, and tell what came of them."""
    url, model, tokenizer, *directory = sys.argv[1:]
    write_tasks(Path("tasks"))
    if directory:
        compare(url, model, tokenizer, directory[0])
        return
    scores = {
        client: ask(url, model, tokenizer, client, tasks=tasks)
        for client, tasks in (("local-completions", [*TASKS]), ("local-chat-completions", ["line_end_text"]))
    }
    answers = [(client, *found) for client in scores for found in samples(client)]
    told = {
        f"{client} {name}": value
        for client, tasks in scores.items()
        for name, value in numbers(tasks).items()
        if "stderr" not in name
    }
    digest = hashlib.sha256(json.dumps(answers).encode()).hexdigest()[:16]
    print(json.dumps({"items": NUM_ITEMS, "answers": len(answers), "digest": digest, "scores": told}))


if __name__ == "__main__":
    main()
