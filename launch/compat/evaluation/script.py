"""How an evaluation of TensorRT-LLM's runs: common options, the job, transformers beside it, what both agree on.

It knows the options that mmlu.py and summarize.py share, and nothing of what either asks.
"""

from __future__ import annotations

import argparse
import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import click

from launch.compat.evaluation.answers import Answer, Answerer, TransformersAnswerer, TrtrunAnswerer
from launch.compat.tensorrt_llm.engine_options import (
    add_engine_options,
    check_engine_options,
    has_gpu,
    make_runtime_config,
    say_slots,
)
from launch.compat.tensorrt_llm.quoting_fixes import LenientParser
from launch.exit_codes import ExitCode, FailedError
from launch.jobs.mpi.job import Job, finish_mpi
from trtrun.configuration.model_paths import find_model
from trtrun.errors import ConfigError
from trtrun.tokens.text import Tokenizer, read_tokenizer

DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
"""The original's short names."""

IDLE = (
    *("temperature", "top_p", "length_penalty", "beam_search_diversity_rate", "early_stopping", "log_level"),
    *("multi_block_mode", "max_tokens_in_paged_kv_cache", "gpu_weights_percent", "tokenizer_type", "vocab_file"),
    *("max_attention_window_size", "sink_token_length", "streaming_interval", "num_return_sequences"),
)
"""Options of the original with a value that change nothing where the likeliest token is taken, or that there is nothing
to do for."""

IDLE_FLAGS = (
    *("enable_context_fmha_fp32_acc", "cuda_graph_mode", "enable_chunked_context", "hf_device_map_auto"),
    *("no_prompt_template", "debug_mode", "streaming"),
)
"""The same, without a value."""


class Script(ABC):
    """One evaluation.

    Attributes:
        name: of the script.
        about: for --help.
        module: that ranks run as a program.
        libraries: that it needs beside trtrun's own, of the extra `eval`.
    """

    name: str
    about: str | None
    module: str
    libraries: tuple[str, ...] = ()

    @abstractmethod
    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Add the script's own options."""

    @abstractmethod
    def check(self, arguments: argparse.Namespace, context: int) -> None:
        """Raise a TrtrunError for data that is not there, or does not fit `context` tokens. Called before ranks start,
        in the process that starts them and on rank 0."""

    @abstractmethod
    def evaluate(
        self, arguments: argparse.Namespace, answerer: Answerer, tokenizer: Tokenizer, context: int
    ) -> tuple[list[Answer], str]:
        """Ask everything, and print scores.

        Returns:
            All answers, the same number in the same order for each answerer; and how the scores miss what was asked for
            by --check_accuracy, or nothing.
        """


def run(script: Script, words: Sequence[str]) -> int:
    """Evaluate what the command line names; returns the exit status.

    Raises:
        FailedError: scores are below what was asked for.
    """
    arguments = parse_arguments(script, words)
    _check_extra(script, arguments)
    tokenizer = _read_tokenizer(arguments)
    problems, found = [], []
    context = None
    if arguments.test_trt_llm:
        config = make_runtime_config(arguments, has_gpu(), _dtype(arguments.data_type), script.name)
        job = Job(config, list(words), module=script.module, nests=True)
        context = job.spec.target.max_position_embeddings

        def check() -> None:
            from launch.jobs.check.preflight import check_job

            check_job(job.spec)
            script.check(arguments, job.spec.target.max_position_embeddings)
            say_slots(script.name, arguments, job)

        status = job.enter(check)
        if status is not None:
            return status
        answers, problem = _evaluate_job(script, arguments, job, tokenizer)
        found.append(answers)
        problems.append(problem)
    if arguments.test_hf:
        directory = find_model(Path(arguments.hf_model_dir), None, "--hf_model_dir")
        beside = TransformersAnswerer(directory, _dtype(arguments.hf_data_type or arguments.data_type))
        context = context or beside.context
        script.check(arguments, context)
        print(f"{beside.name}:", flush=True)
        answers, problem = script.evaluate(arguments, beside, tokenizer, context)
        found.append(answers)
        problems.append(problem)
    if len(found) == 2:
        same = sum(one.token_ids == other.token_ids for one, other in zip(*found, strict=True))
        print(f"The answers of both are the same tokens: {same} of {len(found[0])}", flush=True)
    if any(problems):
        raise FailedError(next(filter(None, problems)))
    return ExitCode.DONE


def _evaluate_job(
    script: Script, arguments: argparse.Namespace, job: Job, tokenizer: Tokenizer
) -> tuple[list[Answer], str]:
    """This rank's part of the job; of ranks other than 0 it does not return."""
    from launch.batch.run import load_llm

    with load_llm(job.spec) as llm:
        answerer = TrtrunAnswerer(llm)
        found = script.evaluate(arguments, answerer, tokenizer, job.spec.target.max_position_embeddings)
    finish_mpi()
    if answerer.compared:
        print(
            f"With drafts the answers are the plain ones, token by token: {answerer.same} of {answerer.compared}",
            flush=True,
        )
    return found


def parse_arguments(script: Script, words: Sequence[str]) -> argparse.Namespace:
    """Parse a command line.

    Raises:
        click.UsageError: an option is unknown, lacks its value or is not supported.
    """
    parser = LenientParser(prog=script.name, description=script.about, allow_abbrev=False)
    parser.add_argument(
        "--hf_model_dir", help="Hugging Face's directory: for --test_hf, the tokenizer, and the target."
    )
    parser.add_argument("--engine_dir", help="The target's engine, or model directory.  [default: --hf_model_dir]")
    parser.add_argument("--test_trt_llm", action="store_true", help="Evaluate the engine, by trtrun.")
    parser.add_argument("--test_hf", action="store_true", help="Evaluate --hf_model_dir by transformers, too.")
    parser.add_argument("--check_accuracy", action="store_true", help="End with status 1 below the threshold.")
    parser.add_argument("--data_type", help="fp32, fp16 or bf16, of model directories.  [default: the checkpoint's]")
    parser.add_argument("--hf_data_type", help="The same, of transformers' model.  [default: --data_type]")
    parser.add_argument("--top_k", type=int, default=1, help="Only 1: the likeliest token is taken.")
    script.add_options(parser)
    add_engine_options(parser)
    for name in IDLE:
        parser.add_argument(f"--{name}", nargs="+", help="Taken, and not needed.")
    for name in IDLE_FLAGS:
        parser.add_argument(f"--{name}", action="store_true", help="Taken, and not needed.")
    parser.set_defaults(kv_cache_enable_block_reuse=True)
    arguments = parser.parse_mended(words)
    if not arguments.test_trt_llm and not arguments.test_hf:
        raise click.UsageError("nothing to evaluate: give --test_trt_llm, --test_hf or both")
    if arguments.test_hf and arguments.hf_model_dir is None:
        raise click.UsageError("--test_hf needs --hf_model_dir")
    arguments.engine_dir = arguments.engine_dir or arguments.hf_model_dir
    if arguments.engine_dir is None:
        raise click.UsageError("no model: give --engine_dir or --hf_model_dir")
    if arguments.top_k != 1:
        raise click.UsageError(f"--top_k {arguments.top_k}: evaluations take the likeliest token; leave the option out")
    check_engine_options(arguments)
    arguments.tokenizer_dir = arguments.tokenizer_dir or arguments.hf_model_dir
    return arguments


def _check_extra(script: Script, arguments: argparse.Namespace) -> None:
    needed = [*script.libraries, *(["transformers"] if arguments.test_hf else [])]
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"{script.name} needs the extra 'eval', of which {', '.join(missing)} is missing: "
            "pip install 'trtrun[eval]', or scripts/install.sh eval"
        )


def _dtype(name: str | None) -> str:
    return "auto" if name is None else DTYPES.get(name, name)


def _read_tokenizer(arguments: argparse.Namespace) -> Tokenizer:
    directory = find_model(Path(arguments.tokenizer_dir or arguments.engine_dir), None, "--tokenizer_dir")
    tokenizer = read_tokenizer(directory)
    if tokenizer is None:
        raise ConfigError(f"{directory} has no tokenizer: name one by --tokenizer_dir")
    return tokenizer
