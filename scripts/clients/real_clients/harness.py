"""EleutherAI's harness against a server: a task of each kind that it has, of texts that every Python has with it.

    python harness.py URL MODEL TOKENIZER

It runs in the harness's environment, which has nothing of trtrun, and in its working directory. Which of four lines
comes next is asked by likelihoods, and so is the perplexity of texts; the end of a line by a text, as a completion and
as a chat. The last line is JSON: the scores, and a digest of all that was answered, log probabilities in full.
"""

from __future__ import annotations

import hashlib
import json
import random
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NUM_ITEMS = 200
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


def run(url: str, model: str, tokenizer: str, client: str, *tasks: str) -> dict[str, Any]:
    """Let the harness run tasks, with what it writes below a folder of the client's name; its results."""
    path, options = ("chat/completions", ["--apply_chat_template"]) if "chat" in client else ("completions", [])
    arguments = {"model": model, "base_url": f"{url}/v1/{path}", "tokenizer": tokenizer, "num_concurrent": 4}
    words = [
        sys.executable, "-m", "lm_eval", "run", "--model", client, "--tasks", *tasks, "--include_path", "tasks",
        "--model_args", json.dumps(arguments | {"max_length": 1024}),
        "--output_path", client, "--log_samples", *options,
    ]  # fmt: skip
    subprocess.run(words, check=True)
    (results,) = Path(client).rglob("results_*.json")
    found: dict[str, Any] = json.loads(results.read_text(encoding="utf-8"))["results"]
    return found


def main() -> None:
    """Run all tasks, and tell what came of them."""
    url, model, tokenizer = sys.argv[1:]
    write_tasks(Path("tasks"))
    scores = {
        client: run(url, model, tokenizer, client, *tasks)
        for client, tasks in (("local-completions", [*TASKS]), ("local-chat-completions", ["line_end_text"]))
    }
    answers = [
        (file.parts[0], line["doc_id"], line["filtered_resps"])
        for file in sorted(Path().rglob("samples_*.jsonl"))
        for line in map(json.loads, file.read_text(encoding="utf-8").splitlines())
    ]
    told = {
        f"{client} {task} {metric}": value
        for client, tasks in scores.items()
        for task, metrics in tasks.items()
        for metric, value in metrics.items()
        if isinstance(value, float) and "stderr" not in metric
    }
    digest = hashlib.sha256(json.dumps(answers).encode()).hexdigest()[:16]
    print(json.dumps({"items": NUM_ITEMS, "answers": len(answers), "digest": digest, "scores": told}))


if __name__ == "__main__":
    main()
