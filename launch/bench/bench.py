"""`trtrun bench`: plain and speculative decoding in one run, on prompts that were never seen before.

Each case takes turns between the two, so that a machine that slows down slows both. It knows clocks and medians. The
peer, where one is asked for, runs afterwards in a process of its own (transformers_peer.py) with as many threads as the
job had.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from launch.batch.options import BenchOptions
from launch.batch.run import load_llm
from launch.bench.case import Case, Prompts
from launch.bench.trace import BenchTrace, check_trace
from launch.check.preflight import check_job
from launch.exit_codes import FailedError
from launch.mpi.job import Job, finish_mpi
from launch.mpi.mpirun import build_environment
from launch.terminal import output_console
from trtrun.config import RuntimeConfig
from trtrun.core import ForesightStatistics
from trtrun.errors import ConfigError, InvalidRequestError
from trtrun.llm import LLM
from trtrun.models.config import read_model_config
from trtrun.outputs import RankReport
from trtrun.roles.memory_requirements import resolve_dtype
from trtrun.roles.startup import target_context
from trtrun.sampling_params import SamplingParams
from trtrun.telemetry import ROUND_PARTS, round_parts

PLAIN = "plain"
SPECULATIVE = "speculative"
FIRST_TOKEN_ID = 3
"""Random prompts keep clear of the ids that most tokenizers give to special tokens."""

WARM_UP_TOKENS = 8


def check_bench(job: Job, options: BenchOptions) -> None:
    """Raise a TrtrunError for anything that the user got wrong, before ranks start."""
    if options.peer is not None and importlib.util.find_spec(options.peer) is None:
        raise ConfigError(f"--peer {options.peer}: it is not installed: pip install '{options.peer}'")
    if options.peer is not None and "dummy" in _load_formats(job.config).values():
        raise ConfigError(f"--peer {options.peer} reads the models' weights, and load_format is dummy: leave one out")
    if options.trace is not None:
        check_trace(options.trace)
    check_job(job.config, job.topology)
    context = target_context(job.config, read_model_config(job.config.target.model))
    needed = options.prompt_tokens + options.max_tokens
    if needed > context:
        raise ConfigError(
            f"--prompt-tokens {options.prompt_tokens} and --max-tokens {options.max_tokens} make {needed} tokens, "
            f"but a request may have {context}"
        )


def play_bench(job: Job, options: BenchOptions) -> int:
    """This rank's part of a benchmark; rank 0 prints a table and, last, one JSON object."""
    seed = options.seed if options.seed is not None else int.from_bytes(os.urandom(4), "little")
    modes = (PLAIN, SPECULATIVE) if job.config.is_speculative else (PLAIN,)
    trace = BenchTrace(options.trace, job.topology, len(modes) * len(options.rows) * options.repeats)
    results, identical, ranks = _measure(job, options, seed, modes, trace)
    gc.collect()  # the peer gets the memory
    peer = _run_peer(job, options, results) if options.peer is not None else {}
    report = _make_report(job, options, seed, results, peer, identical)
    for entry in report["results"]:
        for mode in modes:
            entry[mode] |= trace.figures(mode, entry["rows"])
    report["kernels"] = sorted({rank.kernels for rank in ranks if rank.kernels})
    if not options.as_json:
        _print_table(report)
    print(json.dumps(report), flush=True)
    try:
        trace.write()
    except OSError as error:
        raise FailedError(f"the trace {trace.path} cannot be written: {error.strerror}") from None
    return 0


def _measure(
    job: Job, options: BenchOptions, seed: int, modes: Sequence[str], trace: BenchTrace
) -> tuple[dict[int, dict[str, Case]], bool | None, tuple[RankReport, ...]]:
    """Cases by number of rows and mode, whether speculation gave plain decoding's tokens on the same prompts, ranks."""
    generator = random.Random(seed)
    identical: bool | None = None
    with load_llm(job.config) as llm:
        vocabulary = read_model_config(job.config.target.model).vocab_size
        results: dict[int, dict[str, Case]] = {}
        for rows in options.rows:
            cases = results[rows] = {mode: Case() for mode in modes}
            for mode in modes:
                llm.set_speculation(mode == SPECULATIVE)
                _generate(llm, _draw(generator, vocabulary, rows, options), min(WARM_UP_TOKENS, options.max_tokens))
            for _ in range(options.repeats):
                for mode in modes:
                    llm.set_speculation(mode == SPECULATIVE)
                    prompts = _draw(generator, vocabulary, rows, options)
                    with trace.run(llm, mode, rows):
                        _run_once(llm, cases[mode], prompts, options.max_tokens)
        if SPECULATIVE in modes and job.config.speculation.forced_acceptance is None:
            identical = _is_identical(llm, _draw(generator, vocabulary, 1, options), options.max_tokens)
        ranks = llm.report.ranks
    finish_mpi()
    return results, identical, ranks


def _draw(generator: random.Random, vocabulary: int, rows: int, options: BenchOptions) -> Prompts:
    """Random prompts, [rows][prompt_tokens]; every call draws new ones, so that no prefix is ever in the KV store."""
    low = min(FIRST_TOKEN_ID, vocabulary - 1)
    return [[generator.randrange(low, vocabulary) for _ in range(options.prompt_tokens)] for _ in range(rows)]


def _generate(llm: LLM, prompts: Prompts, max_tokens: int) -> list[tuple[int, ...]]:
    """Complete prompts greedily to exactly `max_tokens`, untimed; returns the tokens of each."""
    outputs = llm.generate(prompts, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    for output in outputs:
        if output.error is not None:
            raise InvalidRequestError(output.error)
    return [output.completions[0].token_ids for output in outputs]


def _run_once(llm: LLM, case: Case, prompts: Prompts, max_tokens: int) -> None:
    """One timed run, added to the case."""
    llm.reset_statistics()
    started = time.perf_counter()
    outputs = llm.generate(prompts, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    elapsed = time.perf_counter() - started
    tokens = 0
    for output in outputs:
        if output.error is not None:
            raise InvalidRequestError(output.error)
        times = output.completions[0].statistics
        count = len(output.completions[0].token_ids)
        tokens += count
        if times.first_token is not None and times.finished is not None:
            case.first_token_s.append(times.first_token - times.arrival)
            case.output_token_s.append((times.finished - times.first_token) / max(1, count - 1))
        case.num_row_rounds += times.num_rounds
    totals = llm.statistics()
    case.prompts.append(prompts)
    case.tokens_per_s.append(tokens / elapsed)
    case.num_rounds += totals["num_rounds"]
    case.num_draft_tokens += totals["num_draft_tokens"]
    case.num_accepted_draft_tokens += totals["num_accepted_draft_tokens"]
    case.num_guesses += totals["num_guesses"]
    case.foresight.add(ForesightStatistics(**totals["foresight"]))
    case.anticipating_s += totals["anticipating_s"]
    case.draft_losses = totals["draft_losses"]
    case.elapsed_s += elapsed
    for name, seconds in round_parts(totals, elapsed).items():
        case.parts_s[name] += seconds


def _is_identical(llm: LLM, prompts: Prompts, max_tokens: int) -> bool:
    """Whether both modes write the same tokens for the same prompts; not timed."""
    tokens = []
    for enabled in (False, True):
        llm.set_speculation(enabled)
        tokens.append(_generate(llm, prompts, max_tokens))
    return tokens[0] == tokens[1]


def _run_peer(job: Job, options: BenchOptions, results: dict[int, dict[str, Case]]) -> dict[int, dict[str, Any]]:
    """The peer's figures by number of rows, from a process of its own with the job's threads."""
    config = job.config
    task = {
        "target": str(config.target.model),
        "draft": str(config.draft.model) if config.draft is not None else None,
        "dtype": _dtype_name(config.target),
        "device": "cuda:0" if config.target.devices[0].startswith("cuda") else "cpu",
        "threads": _total_threads(job),
        "draft_len": config.speculation.draft_len,
        "max_tokens": options.max_tokens,
        "cases": [
            {"rows": rows, **{mode: case.prompts for mode, case in cases.items()}} for rows, cases in results.items()
        ],
    }
    environment = {**build_environment(), "OMP_NUM_THREADS": str(_total_threads(job))}
    for name in environment.pop("TRTRUN_SETTINGS", "").split(","):
        environment.pop(name, None)  # the peer runs as its users run it
    ended = subprocess.run(
        [sys.executable, "-m", "launch.bench.transformers_peer"],
        input=json.dumps(task),
        stdout=subprocess.PIPE,
        env=environment,
        text=True,
        check=False,
    )
    if ended.returncode != 0:
        raise ConfigError(f"the peer {options.peer} ended with exit code {ended.returncode}; its own words are above")
    answer = json.loads(ended.stdout.strip().splitlines()[-1])
    return {int(entry["rows"]): entry for entry in answer["cases"]}


def _make_report(
    job: Job,
    options: BenchOptions,
    seed: int,
    results: dict[int, dict[str, Case]],
    peer: dict[int, dict[str, Any]],
    identical: bool | None,
) -> dict[str, Any]:
    config = job.config
    entries = []
    for rows, cases in results.items():
        entry: dict[str, Any] = {"rows": rows, **{mode: case.as_dict() for mode, case in cases.items()}}
        if rows in peer:
            entry[options.peer or "peer"] = {name: value for name, value in peer[rows].items() if name != "rows"}
        entry["ratios"] = _ratios(entry, peer.get(rows, {}))
        entries.append(entry)
    return {
        "seed": seed,
        "target": str(config.target.model),
        "draft": str(config.draft.model) if config.draft is not None else None,
        "target_quantization": config.target.quantization,
        "draft_quantization": config.draft.quantization if config.draft is not None else None,
        "dtype": _dtype_name(config.target),
        "load_format": _load_formats(config),
        "ranks": [job.topology.describe(rank) for rank in range(job.topology.world_size)],
        "total_threads": _total_threads(job),
        "method": config.speculation.method,
        "draft_len": config.draft_len,
        "forced_acceptance": config.speculation.forced_acceptance,
        "prompt_tokens": options.prompt_tokens,
        "max_tokens": options.max_tokens,
        "repeats": options.repeats,
        "identical_to_plain": identical,
        "results": entries,
    }


def _load_formats(config: RuntimeConfig) -> dict[str, str]:
    """Where the weights of each model come from."""
    sections = {"target": config.target, "draft": config.draft}
    return {role: section.load_format for role, section in sections.items() if section is not None}


def _ratios(entry: dict[str, Any], peer: dict[str, Any]) -> dict[str, float]:
    """How many times faster, for each pair of figures that is there."""
    plain = entry[PLAIN]["tokens_per_s"]
    speculative = entry.get(SPECULATIVE, {}).get("tokens_per_s")
    pairs = {
        "speculative_over_plain": (speculative, plain),
        "plain_over_peer_plain": (plain, peer.get("plain_tokens_per_s")),
        "speculative_over_peer_assisted": (speculative, peer.get("assisted_tokens_per_s")),
    }
    return {name: round(ours / theirs, 3) for name, (ours, theirs) in pairs.items() if ours and theirs}


def _print_table(report: dict[str, Any]) -> None:
    table = Table(title=f"seed {report['seed']}, {report['dtype']}, {report['total_threads']} threads in all")
    for name in ("rows", "mode", "tokens/s", "ms/token", "first token ms", "acceptance length", "ratio to plain"):
        table.add_column(name, justify="left" if name == "mode" else "right", no_wrap=True)
    for entry in report["results"]:
        plain = entry[PLAIN]["tokens_per_s"]
        for mode in (PLAIN, SPECULATIVE):
            if mode in entry:
                case = entry[mode]
                length = f"{case['mean_acceptance_length']:.2f}" if mode == SPECULATIVE else ""
                table.add_row(
                    str(entry["rows"]),
                    mode,
                    f"{case['tokens_per_s']:.1f}",
                    f"{case['time_per_output_token_ms']:.2f}",
                    f"{case['time_to_first_token_ms']:.1f}",
                    length,
                    f"{case['tokens_per_s'] / plain:.2f}",
                )
        for name, rate, length in _peer_lines(entry):
            ratio = f"{rate / plain:.2f}"
            table.add_row(
                str(entry["rows"]), name, f"{rate:.1f}", f"{1e3 / rate * entry['rows']:.2f}", "", length, ratio
            )
    output_console().print(table)
    if report["forced_acceptance"] is not None:
        output_console().print(
            f"forced acceptance: {report['forced_acceptance']:g} tokens a round, not the target's verdict"
        )
    output_console().print(_round_table(report))
    sys.stdout.flush()


def _round_table(report: dict[str, Any]) -> Table:
    """Where the time of a round goes; the parts add up to the last column."""
    table = Table(title="milliseconds of a round, on average")
    table.add_column("rows", justify="right", no_wrap=True)
    table.add_column("mode", no_wrap=True)
    for name in (*ROUND_PARTS, "round"):
        table.add_column(name.replace("_", " "), justify="right")
    for entry in report["results"]:
        for mode in (PLAIN, SPECULATIVE):
            if mode in entry:
                case = entry[mode]
                figures = (*case["round_ms"].values(), case["round_wall_ms"])
                table.add_row(str(entry["rows"]), mode, *(f"{figure:.2f}" for figure in figures))
    return table


def _peer_lines(entry: dict[str, Any]) -> Sequence[tuple[str, float, str]]:
    peer = entry.get("transformers", {})
    lines = []
    for mode in ("plain", "assisted"):
        rate = peer.get(f"{mode}_tokens_per_s")
        if rate:
            length = peer.get("assisted_mean_acceptance_length") if mode == "assisted" else None
            lines.append((f"transformers {mode}", rate, f"{length:.2f}" if length else ""))
    return lines


def _total_threads(job: Job) -> int:
    return job.threads * len(job.topology.slots)


def _dtype_name(section: Any) -> str:
    return str(resolve_dtype(section, read_model_config(section.model))).removeprefix("torch.")
