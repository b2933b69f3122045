"""`trtrun bench`: parse its command line and play this process's part."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from launch.commands.common import FiniteRange, load, with_config
from launch.commands.model_options import rank_words

if TYPE_CHECKING:
    from launch.batch.options import Workload


WORKLOAD = re.compile(r"(?P<rows>[0-9]{1,9})(x(?P<prompt_tokens>[0-9]{1,9}))?(@(?P<temperature>[0-9.]{1,20}))?")


@click.command()
@with_config
@click.option(
    "--rows",
    default="1,4,16",
    show_default=True,
    help="Numbers of prompts that run together; 8x2000 are 8 prompts of 2000 tokens, 8@0.8 are 8 at temperature 0.8.",
)
@click.option("--max-tokens", default=64, show_default=True, type=click.IntRange(2), help="Tokens for each prompt.")
@click.option("--prompt-tokens", default=32, show_default=True, type=click.IntRange(1), help="Length of each prompt.")
@click.option("--temperature", default=0.0, show_default=True, type=FiniteRange(0), help="0 is greedy.")
@click.option("--top-p", default=1.0, show_default=True, type=FiniteRange(0, 1, min_open=True), help="With it.")
@click.option("--repeats", default=3, show_default=True, type=click.IntRange(1), help="Medians are over these.")
@click.option(
    "--cold", is_flag=True, help="Time the first run of each of --rows and the next five: what its first users get."
)
@click.option("--exact", is_flag=True, help="Count the texts that speculation leaves as they are, for each of --rows.")
@click.option(
    "--peer", type=click.Choice(["transformers", "vllm"]), help="Measure this on the same weights and prompts too."
)
@click.option("--peer-python", metavar="PATH", help="The interpreter that has the peer.  [default: this one]")
@click.option(
    "--peer-options",
    metavar="JSON",
    help='Fields of vLLM\'s speculative_config, such as \'{"draft_sample_method": "probabilistic"}\'.',
)
@click.option("--seed", type=click.IntRange(0), help="Of the random prompts.  [default: drawn, and printed]")
@click.option("--trace", metavar="F", help="Write a trace of the timed runs' rounds to this file, for Perfetto.")
@click.option("--json", "as_json", is_flag=True, help="Print the JSON line only.")
def bench(
    config_path: Path,
    overrides: tuple[str, ...],
    rows: str,
    prompt_tokens: int,
    temperature: float,
    peer_options: str | None,
    **others: Any,
) -> int:
    """Measure plain and speculative decoding in one run, on fresh random prompts; the last line is JSON."""
    from launch.batch.options import BenchOptions
    from launch.jobs.mpi.job import Job

    workloads = parse_workloads(rows, prompt_tokens, temperature)
    job = Job(load(config_path, overrides), rank_words())
    options = BenchOptions(workloads=workloads, peer_options=parse_peer_options(peer_options), **others)

    def check() -> None:
        from launch.bench.checks import check_bench

        check_bench(job, options)

    status = job.enter(check)
    if status is not None:
        return status
    from launch.bench.bench import play_bench

    return play_bench(job, options)


def parse_workloads(rows: str, prompt_tokens: int, temperature: float) -> list[Workload]:
    """What --rows names, each workload once; the others are the options that hold where it does not say.

    Raises:
        click.BadParameter: it is something else.
    """
    from launch.batch.options import Workload
    from trtrun.core.sampling_params import SamplingParams
    from trtrun.errors import InvalidRequestError

    workloads = []
    for part in rows.split(","):
        match = WORKLOAD.fullmatch(part.strip())
        values = match.groupdict() if match else {}
        try:
            given = values["temperature"] if values["temperature"] is not None else temperature
            workload = Workload(int(values["rows"]), int(values["prompt_tokens"] or prompt_tokens), float(given))
            SamplingParams(temperature=workload.temperature)
        except (KeyError, ValueError):
            workload = Workload(0, 0)
        except InvalidRequestError as error:
            raise click.BadParameter(f"{part}: {error}", param_hint="'--rows'") from None
        if not workload.rows or not workload.prompt_tokens:
            raise click.BadParameter(
                "write numbers with commas between, such as 1,4,16, 8x2000 for 8 prompts of 2000 tokens, "
                "or 8@0.8 for 8 at temperature 0.8",
                param_hint="'--rows'",
            )
        workloads.append(workload)
    return list(dict.fromkeys(workloads))


def parse_peer_options(text: str | None) -> dict[str, Any]:
    """The fields that --peer-options names; none where it is not given.

    Raises:
        click.BadParameter: it is not a JSON object, or has a name twice.
    """
    from trtrun.core.values import unique_keys

    if text is None:
        return {}
    try:
        options = json.loads(text, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:  # a key that stands twice is a ValueError, too
        raise click.BadParameter(f"not valid JSON: {error}", param_hint="'--peer-options'") from None
    if not isinstance(options, dict):
        raise click.BadParameter('write a JSON object, such as {"name": 1}', param_hint="'--peer-options'")
    return options
