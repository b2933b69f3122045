"""The commands that look at a job before it runs: `trtrun plan`, which starts nothing, and `trtrun check`, which starts
ranks without weights.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from launch.commands.common import FiniteRange, load, with_config
from launch.commands.model_options import config_words, rank_words
from trtrun.configuration.config import RuntimeConfig
from trtrun.configuration.engine_sections import MOST_ROWS
from trtrun.configuration.yaml_source import read_values

_POSITIVE = FiniteRange(0, min_open=True)


@click.command()
@with_config
@click.option("--slurm", is_flag=True, help="Plan a batch job: show its script in place of the mpirun command.")
@click.option("--pbs", is_flag=True, help="The same for PBS.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--hosts", is_flag=True, help="Compare layouts over the hosts by what a round sends and takes.")
@click.option(
    "--links", type=click.Path(path_type=Path), metavar="FILE", help="Of --hosts: output of trtrun check --json."
)
@click.option("--link", type=click.Choice(["hdr", "ndr", "slingshot", "100gbe"]), help="Of --hosts: between hosts.")
@click.option("--within", type=click.Choice(["nvlink", "pcie", "shared-memory"]), help="Of --hosts: in a host.")
@click.option("--latency-us", type=_POSITIVE, help="Of --hosts: of a message between hosts.")
@click.option("--gbit", type=_POSITIVE, help="Of --hosts: Gbit/s between hosts.")
@click.option("--memory-gbs", type=_POSITIVE, help="Of --hosts: GB/s at which a device reads weights.")
@click.option("--gpu-gib", type=_POSITIVE, help="Of --hosts: memory of each GPU.")
@click.option(
    "--rows", type=click.IntRange(1, MOST_ROWS), default=1, show_default=True, help="Of --hosts: rows of a round."
)
def plan(
    config_path: Path,
    overrides: tuple[str, ...],
    slurm: bool,
    pbs: bool,
    as_json: bool,
    hosts: bool,
    **figures: Any,
) -> int:
    """Show each rank's host, device, role, bytes and KV tokens, the links between ranks, how long the start takes and
    why, and the command that starts it, without loading weights.

    It also plans for hosts and GPUs that this machine does not have: what only they know is left open.

    With --hosts: what a round of each layout would send over which link, how long it would take by an estimate, and
    which layout has the shortest.
    """
    _refuse_unused(hosts, figures)
    if slurm and pbs:
        raise click.UsageError("--slurm and --pbs exclude each other: a job is of one batch system")
    from launch.commands.schedulers import check_batch_sections, find_system
    from launch.jobs.batch.job import BatchJob
    from launch.jobs.batch.resources import make_plan_config, place_on_simulated_hosts, read_resources
    from launch.jobs.mpi.job import Job

    arguments = ["run", *config_words(config_path, overrides), "--prompt", "TEXT"]
    values = read_values(config_path, overrides)
    check_batch_sections(values, str(config_path))
    system = find_system(values, "slurm" if slurm else "pbs" if pbs else None)
    script = None
    if slurm or pbs:
        resources = read_resources(config_path, values, system.section_class)
        script = system.render_script(BatchJob(resources, arguments, Path.cwd()))
        config, simulated_hosts = place_on_simulated_hosts(config_path, values, resources)
    else:
        config, simulated_hosts = make_plan_config(config_path, values, system.section_class)
    if hosts:
        from launch.jobs.plan.host_layouts import Figures, plan_hosts, print_hosts_plan

        print_hosts_plan(plan_hosts(config, Figures(**figures)), as_json)
        return 0
    from launch.jobs.plan.plan import make_plan, print_plan

    print_plan(make_plan(Job(config, arguments), simulated_hosts, script), as_json)
    return 0


@click.command()
@with_config
@click.option("--against", type=click.Choice(["transformers"]), help="Compare the target's first layers instead.")
@click.option("--layers", "num_layers", type=click.IntRange(1), default=4, show_default=True, help="Of --against.")
@click.option("--prompt", help="Of --against: a text; left out, 24 random tokens.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def check(
    config_path: Path,
    overrides: tuple[str, ...],
    against: str | None,
    num_layers: int,
    prompt: str | None,
    as_json: bool,
) -> int:
    """Start the ranks without weights and prove that they can do the job.

    Every rank must be on its host, with one version of the software, its device, its model directory and enough memory;
    every link between ranks is tried with checksummed messages, and timed. Engines are read whole and compared with
    what was built. Ends within launch.check_seconds, and a second for each 100 MB of engines, and names the ranks that
    are stuck by then.

    With --against transformers no ranks are started: both compute the target's first layers in float32 on the CPU, and
    the first layer that differs is named, and which half of it.
    """
    if against is not None:
        from launch.jobs.check.comparison import compare_target
        from trtrun.start.job_spec import JobSpec

        return compare_target(JobSpec(load(config_path, overrides)), num_layers, prompt, as_json)
    from launch.jobs.mpi.job import Job
    from launch.jobs.mpi.start_progress import has_parent

    job = Job(load(config_path, overrides), rank_words(), is_check=True)

    def preflight() -> None:
        from launch.jobs.check.preflight import check_job
        from launch.jobs.check.surroundings import warn_before_mpi

        if not has_parent():  # else it has said so
            check_job(job.spec)
            _tell_formats(job.spec.config, as_json)
            warning = warn_before_mpi({**os.environ, **job.config.launch.environment}) if job.needs_mpirun else None
            if warning is not None:
                print(f"trtrun: warning: {warning}", file=sys.stderr, flush=True)

    status = job.enter(preflight)
    if status is not None:
        return status
    from launch.jobs.check.rank_check import play_check

    return play_check(job.spec, as_json)


def _refuse_unused(hosts: bool, figures: Mapping[str, object]) -> None:
    """Refuse options of --hosts without it."""
    context = click.get_current_context()
    for name in figures:
        is_given = context.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT
        if is_given and not hosts:
            raise click.UsageError(f"--{name.replace('_', '-')} goes with --hosts")


def _tell_formats(config: RuntimeConfig, as_json: bool) -> None:
    """Say in which forms a model that has chats writes calls and thoughts, which a server reads."""
    from launch.serve.application.facts import describe_formats, find_formats
    from trtrun.chats.chat_template import read_chat_template

    template = read_chat_template(config.tokenizer or config.target.model)
    if template is None or as_json:
        find_formats(config.server, template)
    else:
        print(describe_formats(config.server, template), flush=True)
