"""trtllm-bench's command line: throughput, latency and prepare-dataset, answered by the engine that serves.

Behind scripts/trtllm_bench.py. It knows these options, of which launch/migration has those that are servers' too, and
what is run in which order; not how requests go, nor what a report holds.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from launch.cli import guarded, leave
from launch.commands.common import FiniteRange, load
from launch.commands.model_options import Settled, settle
from launch.compat.tensorrt_llm.bench.dataset import (
    BenchRequest,
    as_lines,
    normal_lengths,
    random_requests,
    read_dataset,
    uniform_lengths,
)
from launch.compat.tensorrt_llm.bench.load import Demand, Prompts, Record, play_load
from launch.compat.tensorrt_llm.bench.report import Run, describe, make_report, request_rows
from launch.exit_codes import ExitCode, FailedError
from launch.jobs.mpi.job import Job, finish_mpi
from launch.jobs.terminal import Bar
from launch.migration.command_words import Reading, read_fields
from launch.migration.flags import Takes
from launch.migration.serving_flags import BY_NAME, normal_name
from parallel.mpi_rank import find_mpi_rank
from trtrun.configuration.model_paths import find_model
from trtrun.core.sampling_params import SamplingParams
from trtrun.errors import ConfigError
from trtrun.loading.model_settings import target_context
from trtrun.models.config import read_model_config

if TYPE_CHECKING:
    from trtrun.api.llm import LLM

MODULE = "launch.compat.tensorrt_llm.bench.command_line"
SCRIPT = "trtllm_bench.py"
SERVER_OPTIONS = (
    *("--backend", "--max_batch_size", "--max_num_tokens", "--max_seq_len", "--beam_width"),
    *("--kv_cache_free_gpu_mem_fraction", "--tp", "--pp", "--ep", "--cluster_size"),
    *("--scheduler_policy", "--enable_chunked_context"),
)
"""Options that servers have as well."""

IDLE = {
    "workspace": "nothing is built",
    "log_level": "results are printed",
    **dict.fromkeys(("target_input_len", "target_output_len"), "rows are not tuned by it"),
}
FILES = ("report_json", "output_json", "request_json", "iteration_log")
"""Options that name a file to write."""

Command = TypeVar("Command", bound=Callable[..., Any])


@dataclass(frozen=True)
class Options:
    """What is measured, beside the configuration.

    Attributes:
        model: as --model has it.
        dataset: file of the requests.
        num_requests: so many of them at most; 0 is all.
        warmup: requests before the clock starts.
        demand: how requests come.
        sampling: of all requests.
        streaming: whether times between tokens are reported.
        files: where results go, by the names in FILES.
    """

    model: str
    dataset: Path
    num_requests: int
    warmup: int
    demand: Demand
    sampling: SamplingParams
    streaming: bool
    files: Mapping[str, Path]


def _with_options(command: Command) -> Command:
    """Add what throughput and latency have in common."""
    path = click.Path(path_type=Path)
    options = [
        click.option("--dataset", type=path, required=True, help="Requests, as prepare-dataset writes them."),
        click.option("--num_requests", type=int, default=0, help="So many of them at most.  [default: all]"),
        click.option("--warmup", type=int, default=2, show_default=True, help="Requests before the clock starts."),
        *map(_server_option, SERVER_OPTIONS),
        click.option("--config", "--extra_llm_api_options", "api_options", type=path, help="YAML of the LLM API."),
        click.option("--sampler_options", type=path, help="YAML of sampling parameters.  [default: greedy]"),
        *(click.option(f"--{name}", type=path, help="File to write.") for name in ("report_json", "iteration_log")),
        click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Set any key of the YAML file."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def _server_option(name: str) -> Callable[[Command], Command]:
    flag = BY_NAME[normal_name(name)]
    does = f"Sets {flag.here}" if flag.here else f"Nothing to do{', else refused' * flag.refuses}: {flag.says}"
    if flag.takes is Takes.NONE:
        return click.option(name, is_flag=True, default=None, help=f"{does}.")
    return click.option(name, metavar="VALUE", help=f"{does}.")


@click.group()
@click.option("--model", "-m", required=True, help="Directory, org/name of the Hugging Face cache, or asset:target.")
@click.option("--model_path", help="Directory of the weights, where --model is only a name.")
@click.option("--workspace", "-w", help="Taken, and not needed.")
@click.option("--log_level", help="Taken, and not needed.")
@click.pass_context
def cli(context: click.Context, /, **given: Any) -> None:
    """trtllm-bench's commands."""
    context.obj = given


@cli.command()
@_with_options
@click.option("--concurrency", type=int, default=-1, show_default=True, help="Requests in work; no limit below 1.")
@click.option("--request_rate", type=float, default=-1, show_default=True, help="Requests a second; all at once below.")
@click.option("--streaming", is_flag=True, help="Report times between tokens.")
@click.option("--eos_id", type=int, default=-1, show_default=True, help="Token that ends an output; -1: none does.")
@click.option("--target_input_len", type=int, help="Taken, and not needed.")
@click.option("--target_output_len", type=int, help="Taken, and not needed.")
@click.option("--output_json", type=click.Path(path_type=Path), help="File for the texts.")
@click.option("--request_json", type=click.Path(path_type=Path), help="File for each request's own times.")
@click.pass_obj
def throughput(model: Mapping[str, Any], /, **given: Any) -> int:
    """How many tokens a second all requests get together."""
    return _measure({**model, **given})


@cli.command()
@_with_options
@click.option("--concurrency", type=int, default=1, show_default=True, help="Requests in work; no limit below 1.")
@click.pass_obj
def latency(model: Mapping[str, Any], /, **given: Any) -> int:
    """How long requests take, one behind the other."""
    return _measure({"streaming": True, "is_latency": True, **model, **given})


@cli.group("prepare-dataset")
@click.option("--output", type=click.Path(path_type=Path), default="preprocessed_dataset.json", show_default=True)
@click.option("--stdout", is_flag=True, help="Print it instead.")
@click.option("--tokenizer", help="Directory whose tokens are drawn.  [default: the model's]")
@click.option("--random-seed", type=int, default=420, show_default=True)
@click.option("--trust-remote-code", is_flag=True, help="Nothing to do: no code of a checkpoint is run.")
@click.pass_context
def prepare_dataset(context: click.Context, /, **given: Any) -> None:
    """Write requests of random tokens."""
    context.obj = {**context.obj, **given}


@prepare_dataset.command("token-norm-dist")
@click.option("--num-requests", type=click.IntRange(1), required=True)
@click.option("--input-mean", type=FiniteRange(), required=True)
@click.option("--input-stdev", type=FiniteRange(0), required=True)
@click.option("--output-mean", type=FiniteRange(), required=True)
@click.option("--output-stdev", type=FiniteRange(0), required=True)
@click.pass_obj
def token_norm_dist(group: Mapping[str, Any], /, num_requests: int, **given: float) -> int:
    """Lengths of a normal distribution."""
    draw = partial(normal_lengths, count=num_requests, seed=group["random_seed"])
    inputs = draw(given["input_mean"], given["input_stdev"])
    return _write_dataset(group, inputs, draw(given["output_mean"], given["output_stdev"]))


@prepare_dataset.command("token-unif-dist")
@click.option("--num-requests", type=click.IntRange(1), required=True)
@click.option("--input-min", type=click.IntRange(1), required=True)
@click.option("--input-max", type=click.IntRange(1), required=True)
@click.option("--output-min", type=click.IntRange(1), required=True)
@click.option("--output-max", type=click.IntRange(1), required=True)
@click.pass_obj
def token_unif_dist(group: Mapping[str, Any], /, num_requests: int, **given: int) -> int:
    """Lengths between two, all as likely."""
    draw = partial(uniform_lengths, count=num_requests, seed=group["random_seed"])
    for kind in ("input", "output"):
        if given[f"{kind}_min"] > given[f"{kind}_max"]:
            raise click.UsageError(f"--{kind}-min is more than --{kind}-max")
    inputs = draw(given["input_min"], given["input_max"])
    return _write_dataset(group, inputs, draw(given["output_min"], given["output_max"]))


def _write_dataset(group: Mapping[str, Any], inputs: Sequence[int], outputs: Sequence[int]) -> int:
    directory = group["tokenizer"] or group["model_path"] or group["model"]
    model = read_model_config(find_model(Path(directory), None, SCRIPT))
    lengths = list(zip(inputs, outputs, strict=True))
    text = as_lines(random_requests(lengths, model.vocab_size, model.eos_token_ids, group["random_seed"]))
    if group["stdout"]:
        print(text, end="")
    else:
        _write(group["output"], text)
    return ExitCode.DONE


def _measure(given: Mapping[str, Any]) -> int:
    """Settle the configuration, and play this process's part in the job."""
    settled = _settle(given)
    chosen = [word for change in settled.chosen for word in ("--set", change)]
    job = Job(load(settled.path, settled.overrides), [*sys.argv[1:], *chosen], module=MODULE, nests=True)
    options = Options(
        *(given["model"], given["dataset"], given["num_requests"], given["warmup"]),
        *(Demand(given["concurrency"], given.get("request_rate", -1.0)), _read_sampling(given), given["streaming"]),
        {name: given[name] for name in FILES if given.get(name) is not None},
    )
    requests: list[BenchRequest] = []

    def check() -> None:
        from launch.jobs.check.preflight import check_job

        requests.extend(read_dataset(options.dataset, options.num_requests))
        for name, file in options.files.items():
            if not file.absolute().parent.is_dir():
                raise ConfigError(f"--{name}: no such directory: {file.absolute().parent}")
            if file.is_dir():
                raise ConfigError(f"--{name}: {file} is a directory: name a file")
        check_job(job.spec)
        for request in requests:
            if not isinstance(request.prompt, str):
                _check_length(job, request, len(request.prompt))

    status = job.enter(check)
    return _play(job, options, requests) if status is None else status


def _settle(given: Mapping[str, Any]) -> Settled:
    """The configuration that the options stand for; what is left open is chosen, and told once."""
    # As there, a warm-up leaves nothing to reuse.
    changes = {"target.model": given["model_path"] or given["model"], "kv_cache.enable_block_reuse": False}
    if given.get("is_latency") and given["concurrency"] > 0:
        changes["scheduler.max_batch_size"] = given["concurrency"]
    reading = Reading(changes, show=_as_keys)
    for name in SERVER_OPTIONS:
        value = given[name.removeprefix("--")]
        if value is not None:
            reading.add(name, BY_NAME[normal_name(name)], value)
    if given["api_options"] is not None:
        reading.add_api_options(given["api_options"])
    reading.idle += [f"--{name} (nothing to do: {why})" for name, why in IDLE.items() if given.get(name) is not None]
    drafting = ("speculation", "draft")
    if not any(change.startswith(drafting) for change in (*reading.changes, *given["overrides"])):
        reading.changes["speculation.method"] = "none"  # as there: nothing is drafted unless asked for
    settled = settle(None, [*_as_keys(reading.changes), *given["overrides"]], None, {})
    rank = find_mpi_rank()
    if rank is None or rank.size == 1:
        if reading.hint is not None:
            print(f"{SCRIPT}: {reading.hint}", file=sys.stderr, flush=True)
        for choice in settled.choices:
            print(f"{SCRIPT}: chosen: {choice.key} {choice.value} ({choice.reason})", file=sys.stderr, flush=True)
    return settled


def _read_sampling(given: Mapping[str, Any]) -> SamplingParams:
    """How all requests are sampled: to their last token, whatever the model says."""
    path: Path | None = given["sampler_options"]
    values = {} if path is None else read_fields(path, "temperature: 0.8")
    ends = [given["eos_id"]] if given.get("eos_id", -1) >= 0 else []
    return SamplingParams.from_mapping({"temperature": 0.0, **values, "ignore_eos": True, "stop_token_ids": ends})


def _as_keys(changes: Mapping[str, object]) -> list[str]:
    return [f"{key}={json.dumps(value)}" for key, value in changes.items()]


def _play(job: Job, options: Options, requests: Sequence[BenchRequest]) -> int:
    """This rank's part: worker ranks serve inside `load_llm`, rank 0 goes on with the requests."""
    from launch.batch.run import load_llm

    with load_llm(job.spec) as llm:
        prompts = _encode(job, llm, options, requests)
        records = _run(llm, options, prompts)
    report = make_report(Run(job.spec, options.model, options.dataset, records, options.streaming))
    _write_results(options, report, records)
    print(describe(report))
    print(json.dumps(report), flush=True)
    finish_mpi()
    return ExitCode.DONE


def _encode(job: Job, llm: LLM, options: Options, requests: Sequence[BenchRequest]) -> Prompts:
    """Each request's tokens, before the clock starts, and its sampling."""
    prompts: list[tuple[Sequence[int], SamplingParams]] = []
    for request in requests:
        if isinstance(request.prompt, str) and llm.tokenizer is None:
            raise ConfigError("the model has no tokenizer: give input_ids, or name one by --set tokenizer=…")
        tokens = request.prompt
        if isinstance(tokens, str):
            assert llm.tokenizer is not None
            tokens = tuple(llm.tokenizer.encode(tokens))
            _check_length(job, request, len(tokens))
        prompts.append((tokens, replace(options.sampling, max_tokens=request.output_tokens)))
    return prompts


def _check_length(job: Job, request: BenchRequest, num_tokens: int) -> None:
    context = target_context(job.config, job.spec.target)
    if num_tokens + request.output_tokens > context:
        raise ConfigError(
            f"task {request.task_id}: {num_tokens} tokens and {request.output_tokens} of output are more than the "
            f"{context} that a request may have"
        )


def _run(llm: LLM, options: Options, prompts: Prompts) -> list[Record]:
    """Warm up, and run what is measured."""
    warming = [prompts[number % len(prompts)] for number in range(options.warmup)]
    play_load(llm.engine, warming, replace(options.demand, request_rate=-1.0), lambda _: None)
    llm.reset_statistics()
    path = options.files.get("iteration_log")
    with Bar("requests") as bar, nullcontext() if path is None else path.open("w", encoding="utf-8") as log:
        return play_load(llm.engine, prompts, options.demand, lambda done: bar.update(done, len(prompts)), log)


def _write_results(options: Options, report: Mapping[str, Any], records: Sequence[Record]) -> None:
    made = {
        "report_json": report,
        "output_json": {str(record.number): record.text for record in records},
        "request_json": request_rows(records),
    }
    for name, values in made.items():
        if name in options.files:
            _write(options.files[name], json.dumps(values, indent=4) + "\n")


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise FailedError(f"cannot write {path}: {error.strerror}") from None


def main() -> None:
    """Entry of scripts/trtllm_bench.py and of `python -m launch.compat.tensorrt_llm.bench.command_line`."""
    leave(guarded(lambda: int(cli.main(args=sys.argv[1:] or ["--help"], prog_name=SCRIPT, standalone_mode=False) or 0)))


if __name__ == "__main__":
    main()
