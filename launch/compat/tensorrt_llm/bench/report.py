"""The report of a benchmark under trtllm-bench's keys, and one section more: acceptance.

What is not measured here is null. Percentiles are, as there, values that occurred. It knows records and the
configuration, and runs nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from statistics import fmean
from typing import Any

from launch.compat.tensorrt_llm.bench.load import Record
from trtrun import __version__
from trtrun.loading.model_settings import resolve_dtype_name
from trtrun.start.job_spec import JobSpec

_LINES = {
    "request_throughput_req_s": "Request Throughput (req/sec):",
    "system_output_throughput_tok_s": "Total Output Throughput (tokens/sec):",
    "system_total_throughput_tok_s": "Total Token Throughput (tokens/sec):",
    "total_latency_ms": "Total Latency (ms):",
    "avg_request_latency_ms": "Average request latency (ms):",
    "output_throughput_per_user_tok_s": "Per User Output Throughput [w/ ctx] (tps/user):",
    "output_throughput_per_gpu_tok_s": "Per GPU Output Throughput (tps/gpu):",
    "avg_ttft_ms": "Average time-to-first-token [TTFT] (ms):",
    "avg_tpot_ms": "Average time-per-output-token [TPOT] (ms):",
    "token_output_speed_tok_s": "Per User Output Speed (tps/user):",
    "mean_acceptance_length": "Mean acceptance length (tokens/round):",
}
"""What is printed of a report, as trtllm-bench names it."""

_SHARES = {"p50": 0.50, "p90": 0.90, "p95": 0.95, "p99": 0.99}


@dataclass(frozen=True)
class Run:
    """What was run.

    Attributes:
        spec: of the job.
        model: as --model has it.
        dataset: the file of the requests.
        records: how each went.
        streaming: whether times between tokens are asked for.
    """

    spec: JobSpec
    model: str
    dataset: Path
    records: Sequence[Record]
    streaming: bool


def percentiles(values: Iterable[float]) -> dict[str, float]:
    """The values below which shares of them lie, and their ends and mean; of one value or more."""
    found = sorted(values)
    shares = {name: found[int(len(found) * share)] for name, share in _SHARES.items()}
    return {**shares, "minimum": found[0], "maximum": found[-1], "average": fmean(found)}


def make_report(run: Run) -> dict[str, Any]:
    """The report as JSON has it."""
    report = {
        "engine": _engine(run),
        "machine": _machine(run.spec),
        "world_info": _world(run),
        "request_info": _requests(run),
        "performance": _performance(run),
    }
    if run.streaming:
        report["streaming_metrics"] = _streaming(run.records)
    if run.spec.config.is_speculative:
        report["decoding_stats"] = _decoding(run)
    report["dataset"] = _dataset(run)
    report["acceptance"] = _acceptance(run)
    return report


def describe(report: Mapping[str, Any]) -> str:
    """A report's main figures for people, a line each."""
    sections = ("performance", "streaming_metrics", "acceptance")
    found = {name: value for section in sections for name, value in (report.get(section) or {}).items()}
    return "\n".join(f"{line:<50}{found[name]:.4f}" for name, line in _LINES.items() if found.get(name) is not None)


def _engine(run: Run) -> dict[str, Any]:
    config = run.spec.config
    return {
        "model": run.model,
        "model_path": str(config.target.model),
        "engine_dir": None,
        "version": __version__,
        "backend": "trtrun",
        "dtype": resolve_dtype_name(config.target, run.spec.target),
        "kv_cache_dtype": config.kv_cache.dtype,
        "quantization": None if config.target.quantization == "none" else config.target.quantization,
    }


def _machine(spec: JobSpec) -> dict[str, Any] | None:
    """The GPU of the target's first rank, where this process is on its host."""
    import torch

    if not str(spec.config.target.devices[0]).rpartition("/")[2].startswith("cuda") or not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    return {"name": properties.name, "memory.total": properties.total_memory / 2**30, "clocks.mem": None}


def _world(run: Run) -> dict[str, Any]:
    config = run.spec.config
    started = [record.started for record in run.records]
    spread = max(started) - min(started)
    return {
        "tp_size": len(config.target.devices),
        "pp_size": 1,
        "ep_size": len(config.target.devices) if config.target.expert_parallel else None,
        "world_size": len(run.spec.topology.slots),
        "max_batch_size": config.scheduler.max_batch_size,
        "max_num_tokens": config.max_num_tokens,
        "scheduling_policy": None,
        "kv_cache_percentage": config.kv_cache.free_memory_fraction,
        "issue_rate": len(started) / spread if spread else None,
    }


def _elapsed(records: Sequence[Record]) -> float:
    return max(record.ended for record in records) - min(record.started for record in records)


def _requests(run: Run) -> dict[str, Any]:
    return {
        "num_requests": len(run.records),
        "avg_num_concurrent_requests": sum(record.latency for record in run.records) / _elapsed(run.records),
        "avg_input_length": fmean(record.num_input_tokens for record in run.records),
        "avg_output_length": fmean(len(record.tokens) for record in run.records),
    }


def _performance(run: Run) -> dict[str, Any]:
    records, elapsed = run.records, _elapsed(run.records)
    output = sum(len(record.tokens) for record in records)
    latencies = [1e3 * record.latency for record in records]
    return {
        "total_latency_ms": 1e3 * elapsed,
        "avg_request_latency_ms": fmean(latencies),
        "request_throughput_req_s": len(records) / elapsed,
        "system_output_throughput_tok_s": output / elapsed,
        "system_total_throughput_tok_s": (output + sum(record.num_input_tokens for record in records)) / elapsed,
        "output_throughput_per_user_tok_s": fmean(len(record.tokens) / record.latency for record in records),
        "output_throughput_per_gpu_tok_s": output / elapsed / len(run.spec.topology.slots),
        "request_latency_percentiles_ms": percentiles(latencies),
    }


def _streaming(records: Sequence[Record]) -> dict[str, Any]:
    """What streams show; times between tokens are those of requests with two or more, null where there is none."""
    several = [record for record in records if len(record.tokens) > 1 and record.generating > 0]
    between = [1e3 * record.generating / (len(record.tokens) - 1) for record in several]
    speeds = [(len(record.tokens) - 1) / record.generating for record in several]
    first = [1e3 * record.first_token_latency for record in records]
    return {
        "token_output_speed_tok_s": fmean(speeds) if speeds else None,
        "avg_ttft_ms": fmean(first),
        "avg_tpot_ms": fmean(between) if between else None,
        "tpot_percentiles": percentiles(between) if between else None,
        "ttft_percentiles": percentiles(first),
        "gen_tps_percentiles": percentiles(speeds) if speeds else None,
    }


def _decoding(run: Run) -> dict[str, Any]:
    """Drafts as they were verified, where trtllm-bench reckons with full ones."""
    found = [record.statistics for record in run.records]
    rates = [each.num_accepted_draft_tokens / each.num_draft_tokens for each in found if each.num_draft_tokens]
    return {
        "mode": run.spec.config.speculation.method,
        "num_draft_tokens_percentiles": percentiles(each.num_draft_tokens for each in found),
        "num_accepted_draft_tokens_percentiles": percentiles(each.num_accepted_draft_tokens for each in found),
        "draft_acceptance_rate_percentiles": percentiles(rates) if rates else None,
        "acceptance_length_percentiles": percentiles(len(each.tokens) / each.num_rounds for each in run.records),
    }


def _dataset(run: Run) -> dict[str, Any]:
    isl = [record.num_input_tokens for record in run.records]
    osl = [record.num_wanted_tokens for record in run.records]
    lengths = {"isl": isl, "osl": osl, "sequence_length": [*map(sum, zip(isl, osl, strict=True))]}
    found = {name: percentiles(values) for name, values in lengths.items()}
    return {
        "isl_stats": found["isl"],
        "osl_stats": found["osl"],
        "seq_len_stats": found["sequence_length"],
        "num_requests": len(run.records),
        "dataset_path": str(run.dataset),
        **{f"max_{name}": int(each["maximum"]) for name, each in found.items()},
        **{f"avg_{name}": int(each["average"]) for name, each in found.items()},
    }


def _acceptance(run: Run) -> dict[str, Any] | None:
    """What speculation did, over all requests; null without it."""
    config = run.spec.config
    if not config.is_speculative:
        return None
    found = [record.statistics for record in run.records]
    drafted = sum(each.num_draft_tokens for each in found)
    accepted = sum(each.num_accepted_draft_tokens for each in found)
    rounds = sum(record.num_rounds for record in run.records)
    histograms = [each.acceptance_histogram for each in found]
    return {
        "method": config.speculation.method,
        "draft_len": config.draft_len,
        "draft": str(config.draft.model) if config.draft is not None else None,
        "forced_acceptance": config.speculation.forced_acceptance,
        "num_draft_tokens": drafted,
        "num_accepted_draft_tokens": accepted,
        "acceptance_rate": accepted / drafted if drafted else None,
        "mean_acceptance_length": sum(len(record.tokens) for record in run.records) / rounds,
        "rounds_by_accepted_tokens": [*map(sum, zip_longest(*histograms, fillvalue=0))],
    }


def request_rows(records: Sequence[Record]) -> list[dict[str, Any]]:
    """What --request_json holds: each request's own times, in nanoseconds."""
    return [_request_row(record) for record in records]


def _request_row(record: Record) -> dict[str, Any]:
    count, latency, generating = len(record.tokens), _nanoseconds(record.latency), _nanoseconds(record.generating)
    return {
        "id": record.number,
        "num_input_tokens": record.num_input_tokens,
        "error_tokens": 0,
        "start_timestamp": _nanoseconds(record.started),
        "first_token_timestamp": _nanoseconds(record.started + record.first_token_latency),
        "end_timestamp": _nanoseconds(record.ended),
        "decode_iteration": record.num_rounds - 1,
        "num_total_output_tokens": count,
        "num_generated_tokens": count - 1,
        "generation_time": generating,
        "time_to_first_token": _nanoseconds(record.first_token_latency),
        "intertoken_latency": generating / (count - 1) if count > 1 else 0.0,
        "end_to_end_latency": latency,
        "total_token_throughput": count / latency if latency else None,
        "output_token_throughput": count / latency if latency else None,
        "generation_token_throughput": (count - 1) / generating if generating else None,
        "num_draft_tokens": record.statistics.num_draft_tokens,
        "num_accepted_draft_tokens": record.statistics.num_accepted_draft_tokens,
        "output": record.text,
        "output_tokens": count,
    }


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
