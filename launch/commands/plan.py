"""`trtrun plan`: parse its command line."""

from __future__ import annotations

from pathlib import Path

import click

from launch.commands.common import with_config


@click.command()
@with_config
@click.option("--slurm", is_flag=True, help="Plan a batch job: show its script in place of the mpirun command.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def plan(config_path: Path, overrides: tuple[str, ...], speculation: str | None, slurm: bool, as_json: bool) -> int:
    """Show each rank's host, device, role, bytes and KV tokens, the links between ranks, how long the start takes and
    why, and the command that starts it, without loading weights.

    It also plans for hosts and GPUs that this machine does not have: what only they know is left open.
    """
    from launch.jobs.mpi.job import Job
    from launch.jobs.plan.made_up_hosts import load_plan_config, place_on_made_up_hosts
    from launch.jobs.slurm.resources import read_resources

    arguments = ["run", "--config", str(config_path), *(word for value in overrides for word in ("--set", value))]
    if speculation is not None:
        arguments += ["--speculation", speculation]
        overrides += (f"speculation.method={speculation}",)
    arguments += ["--prompt", "TEXT"]
    script = None
    if slurm:
        from launch.jobs.slurm.script import BatchJob, render_script

        resources = read_resources(config_path, overrides)
        script = render_script(BatchJob(resources, arguments, Path.cwd()))
        config, made_up_hosts = place_on_made_up_hosts(config_path, overrides, resources)
    else:
        config, made_up_hosts = load_plan_config(config_path, overrides)
    from launch.jobs.plan.plan import make_plan, print_plan

    print_plan(make_plan(Job(config, arguments), made_up_hosts, script), as_json)
    return 0
