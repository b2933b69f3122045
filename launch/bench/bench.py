"""`trtrun bench`: plain and speculative decoding in one run, on prompts that were never seen before.

Who measures what, and the report. The peer, where one is asked for, runs afterwards in a
process of its own (peer.py) with as many threads as the job had.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from launch.batch.options import BenchOptions, Workload
from launch.bench.measure import COLD_RUNS, PLAIN, SPECULATIVE, Case, Measured, measure
from launch.bench.peer import PeerFigures, run_peer
from launch.bench.tables import print_tables
from launch.bench.trace import BenchTrace
from launch.exit_codes import FailedError
from launch.jobs.mpi.job import Job
from launch.jobs.placement.memory import JobMemory
from trtrun.configuration.config import RuntimeConfig
from trtrun.core.outputs import RankReport
from trtrun.garbage import collect_all
from trtrun.loading.model_settings import resolve_dtype_name


def play_bench(job: Job, options: BenchOptions) -> int:
    """This rank's part of a benchmark; rank 0 prints tables and, last, one JSON object.

    Raises:
        FailedError: the peer or the trace failed; what was measured is printed all the same.
    """
    seed = options.seed if options.seed is not None else int.from_bytes(os.urandom(4), "little")
    modes = (PLAIN, SPECULATIVE) if job.config.is_speculative else (PLAIN,)
    num_runs = COLD_RUNS if options.cold else options.repeats
    trace = BenchTrace(options.trace, job.topology, len(modes) * len(options.workloads) * num_runs)
    measured = measure(job, options, seed, modes, trace)
    _give_memory_back()
    peer = run_peer(job, options, measured.cases) if options.peer is not None else None
    report = _make_report(job, options, seed, measured, peer, trace)
    if not options.as_json:
        print_tables(report, peer)
    print(json.dumps(report), flush=True)
    try:
        trace.write()
    except OSError as error:
        raise FailedError(f"the trace {trace.path} cannot be written: {error.strerror}") from None
    if peer is not None and peer.error is not None:
        raise peer.error
    return 0


def _give_memory_back() -> None:
    """The peer gets what this process had."""
    collect_all()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


def _make_report(
    job: Job, options: BenchOptions, seed: int, measured: Measured, peer: PeerFigures | None, trace: BenchTrace
) -> dict[str, Any]:
    config, drafting = job.config, job.config.draft or job.config.heads
    return {
        "seed": seed,
        "target": str(config.target.model),
        "draft": str(drafting.model) if drafting is not None else None,
        "target_quantization": config.target.quantization,
        "draft_quantization": config.draft.quantization if config.draft is not None else None,
        "draft_vocabulary": config.draft.vocabulary if config.draft is not None else None,
        "dtype": resolve_dtype_name(config.target, job.spec.target),
        "load_format": _load_formats(config),
        "ranks": [job.topology.describe(rank) for rank in range(job.topology.world_size)],
        "total_threads": job.threads * len(job.topology.slots),
        "method": config.speculation.method,
        "draft_len": config.draft_len,
        "parallel_drafting": job.spec.models.mask_token is not None,
        "forced_acceptance": config.speculation.forced_acceptance,
        "prompt_tokens": options.workloads[0].prompt_tokens,
        "max_tokens": options.max_tokens,
        "top_p": options.top_p,
        "repeats": COLD_RUNS if options.cold else options.repeats,
        "cold": options.cold,
        "start_s": round(measured.start_s, 3),
        "start_phases_s": measured.report.phase_seconds(),
        "memory": _memory(job, measured.report.ranks),
        "identical_to_plain": measured.identical,
        "peer": peer.as_dict() if peer is not None else None,
        "results": [
            _entry(options, workload, cases, measured.equal_rows, peer, trace)
            for workload, cases in measured.cases.items()
        ],
        "kernels": sorted({rank.kernels for rank in measured.report.ranks if rank.kernels}),
    }


def _entry(
    options: BenchOptions,
    workload: Workload,
    cases: Mapping[str, Case],
    equal_rows: Mapping[Workload, int],
    peer: PeerFigures | None,
    trace: BenchTrace,
) -> dict[str, Any]:
    """What is told of one workload."""
    entry = asdict(workload)
    entry |= {mode: case.as_dict() | trace.figures(mode, workload) for mode, case in cases.items()}
    if options.cold:
        for mode, case in cases.items():
            entry[mode]["first_over_next"] = case.first_over_next
    if workload in equal_rows:
        entry["equal_rows"] = equal_rows[workload]
    figures = peer.cases.get(workload, {}) if peer is not None else {}
    if peer is not None and figures:
        entry[peer.program.name] = figures
    entry["ratios"] = _ratios(entry, figures, peer)
    return entry


def _memory(job: Job, ranks: Sequence[RankReport]) -> list[dict[str, Any]]:
    """What each rank holds, and what a plan says of it. Bytes."""
    plan = JobMemory.read(job.spec)
    return [
        {
            "rank": rank.rank,
            "role": rank.role,
            "device": rank.device,
            "shard_bytes": rank.shard_bytes,
            "planned_shard_bytes": sum(plan.shard_bytes(rank.rank)),
            "working_bytes": rank.working_bytes,
            "planned_working_bytes": plan.working_bytes(rank.rank),
            "kv_bytes": rank.kv_bytes,
            "kv_tokens": rank.kv_tokens,
            "device_used_bytes": rank.device_used_bytes,
        }
        for rank in ranks
        if job.topology.slot(rank.rank) is not None
    ]


def _load_formats(config: RuntimeConfig) -> dict[str, str]:
    """Where the weights of each model come from."""
    sections = {"target": config.target, "draft": config.draft}
    return {role: section.load_format for role, section in sections.items() if section is not None}


def _ratios(entry: Mapping[str, Any], figures: Mapping[str, Any], peer: PeerFigures | None) -> dict[str, float]:
    """How many times faster, for each pair of figures that is there."""
    plain = entry[PLAIN]["tokens_per_s"]
    speculative = entry.get(SPECULATIVE, {}).get("tokens_per_s")
    pairs = {"speculative_over_plain": (speculative, plain)}
    if peer is not None:
        word = peer.program.speculative
        pairs["plain_over_peer_plain"] = (plain, figures.get("plain_tokens_per_s"))
        pairs[f"speculative_over_peer_{word}"] = (speculative, figures.get(f"{word}_tokens_per_s"))
    return {name: round(ours / theirs, 3) for name, (ours, theirs) in pairs.items() if ours and theirs}
