"""`trtrun demo`: the main job on the shipped pair, text as it comes, then speculative and plain decoding side by side.

It starts ranks with mpirun: one orchestrator, one draft, two tensor-parallel targets; on fewer cores than these three
need, two that draft and verify. The last line is JSON. Behind scripts/demo.sh.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trtrun.configuration.config import load_config
from trtrun.configuration.model_paths import ASSETS
from trtrun.threads import count_cores

if TYPE_CHECKING:
    from launch.jobs.mpi.job import Job
    from trtrun.api.llm import LLM

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
CORES = 3
"""That the ranks of cpu_pair.yaml compute on."""

HELD_OUT = ASSETS / "heldout.json"


@dataclass(frozen=True)
class Measured:
    """One mode over all prompts. Rates are tokens a second, one prompt at a time."""

    mode: str
    tokens: list[tuple[int, ...]]
    seconds: float
    statistics: dict[str, Any]

    @property
    def num_tokens(self) -> int:
        """Tokens written."""
        return sum(len(tokens) for tokens in self.tokens)

    @property
    def tokens_per_s(self) -> float:
        """Over all prompts, prompt processing included."""
        return self.num_tokens / self.seconds


def choose_config(cores: int) -> Path:
    """The placement for so many cores: ranks that share one would wait for each other in every layer."""
    return CONFIGS / ("cpu_pair.yaml" if cores >= CORES else "cpu_pair_on_two_cores.yaml")


def read_prompts() -> list[str]:
    """Beginnings of source files that neither model has seen in training."""
    record = json.loads(HELD_OUT.read_text(encoding="utf-8"))
    return [entry["text"] for entry in record["prompts"]]


def play_demo(job: Job, num_prompts: int, max_tokens: int) -> int:
    """Rank 0's show; the other ranks serve inside `load_llm`."""
    from launch.batch.run import load_llm
    from launch.jobs.mpi.job import finish_mpi

    started = time.perf_counter()
    with load_llm(job.spec) as llm:
        print(f"{job.topology.world_size} ranks are up after {time.perf_counter() - started:.1f} s:")
        for rank in llm.report.ranks:
            loaded = f", read {rank.bytes_read:,} bytes of weights" if rank.bytes_read else ""
            print(f"  rank {rank.rank}: {rank.role} on {rank.host} {rank.device}{loaded}")
        prompts = read_prompts()
        _show_stream(llm, prompts[0], max_tokens)
        chosen = prompts[1 : 1 + num_prompts]
        _warm_up(llm, prompts[0])
        plain = _measure(llm, "plain", chosen, max_tokens)
        speculative = _measure(llm, "speculative", chosen, max_tokens)
    finish_mpi()
    _print_table(speculative, plain)
    print(json.dumps(_report(job, speculative, plain)), flush=True)
    return 0


def _show_stream(llm: LLM, prompt: str, max_tokens: int) -> None:
    from launch.jobs.terminal import output_console
    from trtrun.core.sampling_params import SamplingParams

    console = output_console()
    console.print("\nThe beginning of a file that the models never saw, and how the target goes on:\n", style="bold")
    console.print(prompt, style="dim", end="", soft_wrap=True)
    for chunk in llm.stream(prompt, SamplingParams(max_tokens=max_tokens)):
        sys.stdout.write(chunk.text)
        sys.stdout.flush()
    print("\n", flush=True)


def _warm_up(llm: LLM, prompt: str) -> None:
    from trtrun.core.sampling_params import SamplingParams

    for enabled in (False, True):
        llm.set_speculation(enabled)
        llm.generate([prompt], SamplingParams(max_tokens=8))


def _measure(llm: LLM, mode: str, prompts: Sequence[str], max_tokens: int) -> Measured:
    """Greedy completions, one prompt after the other."""
    from trtrun.core.sampling_params import SamplingParams

    llm.set_speculation(mode == "speculative")
    llm.reset_statistics()
    tokens = []
    started = time.perf_counter()
    for prompt in prompts:
        output = llm.generate([prompt], SamplingParams(max_tokens=max_tokens, ignore_eos=True))[0]
        tokens.append(output.completions[0].token_ids if output.completions else ())
    return Measured(mode, tokens, time.perf_counter() - started, llm.statistics())


def _report(job: Job, speculative: Measured, plain: Measured) -> dict[str, object]:
    return {
        "ranks": [job.topology.describe(rank) for rank in range(job.topology.world_size)],
        "draft_len": job.config.speculation.draft_len,
        "prompts": len(plain.tokens),
        "speculative_tokens_per_s": round(speculative.tokens_per_s, 2),
        "plain_tokens_per_s": round(plain.tokens_per_s, 2),
        "speedup": round(speculative.tokens_per_s / plain.tokens_per_s, 3),
        "mean_acceptance_length": speculative.statistics["mean_acceptance_length"],
        "speculative_rounds": speculative.statistics["num_rounds"],
        "plain_rounds": plain.statistics["num_rounds"],
        "identical": speculative.tokens == plain.tokens,
    }


def _print_table(speculative: Measured, plain: Measured) -> None:
    from rich.table import Table

    from launch.jobs.terminal import output_console

    table = Table()
    for name in ("", "tokens", "tokens/s", "rounds", "mean acceptance length", "same tokens"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    same = "yes" if speculative.tokens == plain.tokens else "NO"
    for measured in (speculative, plain):
        drafted = measured is speculative
        table.add_row(
            measured.mode,
            str(measured.num_tokens),
            f"{measured.tokens_per_s:.1f}",
            str(measured.statistics["num_rounds"]),
            f"{measured.statistics['mean_acceptance_length']:.2f}" if drafted else "",
            same if drafted else "",
        )
    output_console().print(table)
    sys.stdout.flush()


@click.command()
@click.option(
    "--config",
    "config_path",
    type=click.Path(path_type=Path),
    help="Another YAML file.  [default: the shipped pair, placed by the cores that are there]",
)
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Set any key of the YAML file.")
@click.option("--prompts", "num_prompts", default=6, show_default=True, type=click.IntRange(1), help="To measure on.")
@click.option("--max-tokens", default=64, show_default=True, type=click.IntRange(1), help="For each prompt.")
def demo(config_path: Path | None, overrides: tuple[str, ...], num_prompts: int, max_tokens: int) -> int:
    """Run the shipped pair: text as it comes, then speculative and plain decoding side by side."""
    from launch.jobs.mpi.job import Job

    # The same prompts are run twice; found again in the KV store, they would flatter the second run.
    chosen = config_path or choose_config(count_cores())
    config = load_config(chosen, [*overrides, "kv_cache.enable_block_reuse=false"])
    # Ranks are told what was chosen: mpirun may have bound them to fewer cores.
    name, *rest = sys.argv[1:]
    job = Job(config, [name, *rest] if config_path is not None else [name, "--config", str(chosen), *rest])

    def check() -> None:
        from launch.jobs.check.preflight import check_job

        check_job(job.spec)

    status = job.enter(check)
    return play_demo(job, num_prompts, max_tokens) if status is None else status
