"""The command line of TensorRT-LLM's examples/mmlu.py: how many of MMLU's questions a model answers rightly.

Behind scripts/mmlu.py. Two tokens are generated greedily; an answer is right if it begins with the right letter. A
prompt that is too long has fewer shots: the last ones go, as in the original. It knows how answers are counted, and
nothing of what gives them.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from pathlib import Path

from typing_extensions import override

from launch.cli import guarded, leave
from launch.compat.evaluation.answers import Answer, Answerer
from launch.compat.evaluation.mmlu_questions import (
    CATEGORIES,
    SUBCATEGORY_OF,
    SUBJECTS,
    Question,
    find_subjects,
    read_questions,
    write_prompt,
)
from launch.compat.evaluation.script import Script, run
from trtrun.tokens.text import Tokenizer

ANSWER_TOKENS = 2


class Mmlu(Script):
    """MMLU."""

    name = "mmlu.py"
    about = __doc__
    module = "launch.compat.evaluation.mmlu"

    @override
    def add_options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--data_dir", default="data/mmlu", help="Folder with dev and test, as MMLU's data.tar has.")
        parser.add_argument("--ntrain", type=int, default=5, help="Shots: questions with answers in front.")
        parser.add_argument("--max_input_length", type=int, help="Most tokens of a prompt.  [default: the context]")
        parser.add_argument("--max_ite", type=int, default=10_000_000, help="Most questions of a subject.")
        help_ = "Percent of all answers that are to be right, with --check_accuracy."
        parser.add_argument("--accuracy_threshold", type=float, default=30, help=help_)

    @override
    def check(self, arguments: argparse.Namespace, context: int) -> None:
        for subject in find_subjects(Path(arguments.data_dir)):
            for split in ("dev", "test"):
                read_questions(Path(arguments.data_dir), split, subject)

    @override
    def evaluate(
        self, arguments: argparse.Namespace, answerer: Answerer, tokenizer: Tokenizer, context: int
    ) -> tuple[list[Answer], str]:
        # A question that is too long even without shots counts as answered wrongly.
        folder = Path(arguments.data_dir)
        longest = min(context - ANSWER_TOKENS, arguments.max_input_length or context)
        all_answers, marks = [], {}
        too_long = 0
        for subject in find_subjects(folder):
            shots = read_questions(folder, "dev", subject)[: arguments.ntrain]
            questions = read_questions(folder, "test", subject)[: arguments.max_ite]
            prompts = [make_prompt(tokenizer, subject, shots, question, longest) for question in questions]
            fitting = [number for number, prompt in enumerate(prompts) if len(prompt) <= longest]
            too_long += len(prompts) - len(fitting)
            answers = answerer.answer([prompts[number] for number in fitting], ANSWER_TOKENS)
            all_answers += answers
            right = [False] * len(questions)
            for number, answer in zip(fitting, answers, strict=True):
                right[number] = tokenizer.decode(answer.token_ids).strip().startswith(questions[number].letter)
            marks[subject] = right
            print(f"Average accuracy {sum(right) / len(right):.3f} - {subject}", flush=True)
        if too_long:
            print(f"{too_long} questions are longer than {longest} tokens, and count as wrong", flush=True)
        accuracy = print_means(marks)
        missed = ""
        if arguments.check_accuracy and accuracy < arguments.accuracy_threshold:
            missed = f"{answerer.name}: expected accuracy >= {arguments.accuracy_threshold:g}, and it is {accuracy:.2f}"
        return all_answers, missed


def make_prompt(
    tokenizer: Tokenizer, subject: str, shots: list[Question], question: Question, longest: int
) -> list[int]:
    """The tokens of a prompt, with as many of the first shots as `longest` tokens have room for; one without any may
    be longer."""
    for count in range(len(shots), -1, -1):
        prompt = tokenizer.encode(write_prompt(subject, shots[:count], question))
        if len(prompt) <= longest:
            break
    return prompt


def print_means(marks: dict[str, list[bool]]) -> float:
    """Print the shares of right answers, in percent, of the subcategories and categories that are there, and return
    that of all; each question counts once."""
    by_subcategory: dict[str, list[bool]] = defaultdict(list)
    for subject, right in marks.items():
        by_subcategory[SUBCATEGORY_OF.get(subject, "")] += right
    groups = {name: by_subcategory[name] for name in SUBJECTS}
    groups |= {name: [mark for part in parts for mark in by_subcategory[part]] for name, parts in CATEGORIES.items()}
    for name, right in groups.items():
        if right:
            print(f"Average accuracy {100 * sum(right) / len(right):.2f} - {name}")
    everything = [mark for right in marks.values() for mark in right]
    accuracy = 100 * sum(everything) / len(everything)
    print(f"MMLU weighted average accuracy: {accuracy:.2f}", flush=True)
    return accuracy


def main() -> None:
    """Entry of scripts/mmlu.py and of `python -m launch.compat.evaluation.mmlu`."""
    leave(guarded(lambda: run(Mmlu(), sys.argv[1:])))


if __name__ == "__main__":
    main()
