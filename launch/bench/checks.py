"""What `trtrun bench` checks before any rank starts. It does without torch, and measures nothing."""

from __future__ import annotations

from launch.batch.options import BenchOptions
from launch.bench.peer import check_peer
from launch.bench.trace import check_trace
from launch.jobs.check.preflight import check_job
from launch.jobs.mpi.job import Job
from trtrun.errors import ConfigError
from trtrun.loading.model_settings import target_context


def check_bench(job: Job, options: BenchOptions) -> None:
    """Raise a TrtrunError for anything that the user got wrong, before ranks start."""
    config = job.config
    if options.peer is not None:
        check_peer(job, options)
    elif options.peer_python is not None:
        raise ConfigError("--peer-python names the interpreter of a peer: add --peer, or leave it out")
    elif options.peer_options:
        raise ConfigError("--peer-options are a peer's: add --peer vllm, or leave them out")
    if options.cold and options.exact:
        raise ConfigError("--cold times the first run of every workload, and --exact would be its first: drop one")
    if options.cold and options.peer is not None:
        raise ConfigError("--cold times the first run of every workload, and a peer is warmed up first: drop one")
    if options.exact and not config.is_speculative:
        raise ConfigError("--exact compares speculative with plain decoding, and speculation.method is none")
    if options.exact and config.speculation.forced_acceptance is not None:
        raise ConfigError("--exact compares texts, and with speculation.forced_acceptance they are nobody's: drop one")
    if options.trace is not None:
        check_trace(options.trace)
    check_job(job.spec)
    context = target_context(config, job.spec.target)
    longest = max(workload.prompt_tokens for workload in options.workloads)
    if longest + options.max_tokens > context:
        raise ConfigError(
            f"prompts of {longest} tokens and --max-tokens {options.max_tokens} make {longest + options.max_tokens} "
            f"tokens, but a request may have {context}"
        )
