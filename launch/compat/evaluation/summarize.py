"""The command line of TensorRT-LLM's examples/summarize.py: ROUGE and perplexity of what a model writes.

Behind scripts/summarize.py. It knows how the original asks and prints, and nothing of what answers.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import click
from typing_extensions import override

from launch.cli import guarded, leave
from launch.compat.evaluation.answers import Answer, Answerer
from launch.compat.evaluation.script import Script, run
from launch.compat.evaluation.summaries import TASKS, find_lines, make_prompt, read_lines, score
from launch.exit_codes import FailedError
from trtrun.errors import ConfigError
from trtrun.tokens.text import Tokenizer

PERPLEXITY_TASK = "eval_context_ppl"
"""One token is generated; the perplexity is the text's own."""

OUTPUT_FILES = {"TensorRT-LLM": "trtllm.out", "Hugging Face": "hf.out"}
"""By who answered."""


class Summarize(Script):
    """Summaries, and the original's other tasks."""

    name = "summarize.py"
    about = __doc__
    module = "launch.compat.evaluation.summarize"
    libraries = ("rouge_score",)

    @override
    def add_options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--eval_task", default="summarize", choices=TASKS, help="What is asked.")
        help_ = "File of JSON lines, or a folder that has one."
        parser.add_argument("--dataset_dir", "--dataset_path", dest="dataset_dir", help=help_)
        parser.add_argument("--dataset_cache_dir", help="Taken, and not needed.")
        parser.add_argument("--rouge_dir", help="Taken, and not needed.")
        parser.add_argument("--random_seed", type=int, default=0, help="Lines are shuffled by it.")
        parser.add_argument("--batch_size", type=int, default=1, help="Texts that run together.")
        parser.add_argument("--max_ite", type=int, default=20, help="Most batches.")
        parser.add_argument("--max_input_length", type=int, default=923, help="Most tokens of a prompt.")
        parser.add_argument("--min_input_length", type=int, default=0, help="Prompts up to this length are left out.")
        parser.add_argument("--output_len", type=int, default=100, help="Most tokens of an answer.")
        parser.add_argument("--no_add_special_tokens", dest="add_special_tokens", action="store_false")
        parser.add_argument("--output_dir", help="Folder for texts: trtllm.out, hf.out.")
        parser.add_argument("--eval_ppl", action="store_true", help="Perplexity of prompts with their answers.")
        help_ = "ROUGE-1, in percent, that is to be exceeded, with --check_accuracy."
        parser.add_argument("--tensorrt_llm_rouge1_threshold", type=float, default=15.0, help=help_)
        help_ = "Perplexity that is not to be reached, with --check_accuracy and --eval_ppl."
        parser.add_argument("--tensorrt_llm_ppl_threshold", type=float, default=15.0, help=help_)

    @override
    def check(self, arguments: argparse.Namespace, context: int) -> None:
        for name in ("batch_size", "max_ite", "max_input_length", "output_len"):
            if getattr(arguments, name) < 1:
                raise click.UsageError(f"--{name} {getattr(arguments, name)}: at least 1")
        longest, output_len = arguments.max_input_length, _output_len(arguments)
        if longest + output_len > context:
            raise ConfigError(
                f"--max_input_length {longest} and --output_len {output_len} are {longest + output_len} tokens, and "
                f"the model's context has {context}: give a smaller --max_input_length"
            )
        _read(arguments)
        if arguments.output_dir is not None:
            _make_folder(Path(arguments.output_dir))

    @override
    def evaluate(
        self, arguments: argparse.Namespace, answerer: Answerer, tokenizer: Tokenizer, context: int
    ) -> tuple[list[Answer], str]:
        asks_perplexity = arguments.eval_ppl or arguments.eval_task == PERPLEXITY_TASK
        task, lines = TASKS[arguments.eval_task], _read(arguments)
        prompts, references = [], []
        for text, reference in lines:
            longest = arguments.max_input_length
            prompt = make_prompt(tokenizer, text, task, longest, arguments.add_special_tokens)
            if len(prompt) > arguments.min_input_length:
                prompts.append(prompt)
                references.append(reference)
            if len(prompts) == arguments.max_ite * arguments.batch_size:
                break
        if not prompts:
            raise ConfigError(f"--min_input_length {arguments.min_input_length}: all texts are shorter")
        answers: list[Answer] = []
        for start in range(0, len(prompts), arguments.batch_size):
            batch = prompts[start : start + arguments.batch_size]
            answers += answerer.answer(batch, _output_len(arguments), asks_perplexity)
        texts = [tokenizer.decode(answer.token_ids) for answer in answers]
        if arguments.output_dir is not None:
            _write(Path(arguments.output_dir) / OUTPUT_FILES[answerer.name], texts)
        tokens = sum(len(answer.token_ids) for answer in answers)
        print(f"{answerer.name} (total latency: {answerer.seconds} sec)")
        print(f"{answerer.name} (total output tokens: {tokens})")
        print(f"{answerer.name} (tokens per second: {tokens / answerer.seconds})")
        print(f"{answerer.name} beam 0 result")
        return answers, "; ".join(self._judge(arguments, answerer, answers, texts, references))

    def _judge(
        self,
        arguments: argparse.Namespace,
        answerer: Answerer,
        answers: Sequence[Answer],
        texts: Sequence[str],
        references: Sequence[str],
    ) -> list[str]:
        """Print scores; returns those that miss what was asked for. As there, transformers' miss nothing."""
        is_checked = arguments.check_accuracy and answerer.name == "TensorRT-LLM"
        missed = []
        if arguments.eval_task != PERPLEXITY_TASK:
            scores = score(texts, references)
            for name, value in scores.items():
                print(f"  {name}: {value}")
            if is_checked and scores["rouge1"] <= arguments.tensorrt_llm_rouge1_threshold:
                missed.append(
                    f"rouge1 is {scores['rouge1']:.2f}, and more than "
                    f"{arguments.tensorrt_llm_rouge1_threshold:g} is asked for"
                )
        perplexities = [answer.perplexity for answer in answers if answer.perplexity is not None]
        if perplexities:
            mean = sum(perplexities) / len(perplexities)
            print(f"  Per-token perplexity: {mean}")
            if is_checked and mean >= arguments.tensorrt_llm_ppl_threshold:
                missed.append(
                    f"the perplexity is {mean:.2f}, and less than {arguments.tensorrt_llm_ppl_threshold:g} is asked for"
                )
        sys.stdout.flush()
        return missed


def _output_len(arguments: argparse.Namespace) -> int:
    return 1 if arguments.eval_task == PERPLEXITY_TASK else int(arguments.output_len)


def _read(arguments: argparse.Namespace) -> list[tuple[str, str]]:
    task = TASKS[arguments.eval_task]
    return read_lines(find_lines(arguments.dataset_dir, task), task, arguments.random_seed)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--output_dir {folder}: cannot make this folder: {error.strerror}") from None


def _write(path: Path, texts: Sequence[str]) -> None:
    lines = [f"[{place}] [Beam 0] {text}\n" for place, text in enumerate(texts)]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(lines), encoding="utf-8")
    except OSError as error:
        raise FailedError(f"cannot write {path}: {error.strerror}") from None


def main() -> None:
    """Entry of scripts/summarize.py and of `python -m launch.compat.evaluation.summarize`."""
    leave(guarded(lambda: run(Summarize(), sys.argv[1:])))


if __name__ == "__main__":
    main()
