"""The batch script of a job of PBS: readable, complete, and the same whether it is shown or submitted.

It turns resources and settings into text, as slurm/script.py does for Slurm. It does not know the programs of PBS
(client.py). No text of the user's reaches the shell unquoted but `setup` lines, which are shell by definition.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import quote

from launch.exit_codes import ExitCode
from launch.jobs.batch.job import (
    BatchJob,
    Spelled,
    check_settings,
    check_warning,
    make_record,
)
from launch.jobs.batch.script_parts import describe_ranks, find_finished, wrap_words
from launch.jobs.pbs.script_parts import HEARING, draining_body, plain_body, timer
from launch.jobs.pbs.section import PbsSection
from trtrun.errors import ConfigError

RECORD_VARIABLE = "TRTRUN_JOB"
"""Variable of the job that `trtrun status` reads back from PBS: JSON, with a percent sign before what is no letter."""

REMOTE_SHELL = "launch.jobs.pbs.remote_shell"
TASK_VARIABLE = "PBS_ARRAY_INDEX"
END_LINE = "trtrun: job {job} ends with exit status {number}"
NEXT_LINE = "trtrun: job {number} goes on, with the "
"""Lines of the log by which `trtrun` knows a job's end and the next one, where PBS does not tell."""


@dataclass(frozen=True)
class Nodes:
    """A word that lists nodes of the allocation.

    Attributes:
        places: of each among the allocation's nodes, from 0 on.
    """

    places: tuple[int, ...]

    def spell(self, variable: str) -> str:
        """The word as bash takes it."""
        return f'"{",".join(f"${{nodes[{place}]}}" for place in self.places)}"'


def render_script(job: BatchJob) -> str:
    """The batch script.

    Raises:
        ConfigError: settings that do not fit together.
    """
    pbs = job.resources.section_as(PbsSection)
    _check(job, pbs)
    sections = [
        ["#!/bin/bash", *(f"#PBS {directive}" for directive in _directives(job, pbs))],
        [*describe_ranks(job)],
        [HEARING, *timer(pbs.seconds, pbs.signal_seconds)] if job.drains else [],
        [
            f"cd {shlex.quote(str(job.folder))} || exit {int(ExitCode.REFUSED)}",
            "number=${PBS_JOBID%%.*}",
            'echo "trtrun: $(date +%FT%T) job $number on $(uniq "$PBS_NODEFILE" | paste -s -d ,), '
            'start ${TRTRUN_START:-1}"',
        ],
        [*_environment(job, pbs)],
        ["# launch.pbs.setup", *pbs.setup] if pbs.setup else [],
        [*_command(job, pbs)],
        [draining_body(find_finished(job, TASK_VARIABLE)) if job.drains else plain_body()],
    ]
    return "\n\n".join("\n".join(lines) for lines in sections if lines) + "\n"


def _directives(job: BatchJob, pbs: PbsSection) -> Iterator[str]:
    """Options of qsub, which knows the quotes of the shell."""
    options: list[tuple[str, object]] = [
        ("-N", pbs.job_name),
        ("-q", pbs.queue),
        ("-A", pbs.account),
        ("-P", pbs.project),
        ("-j", "oe"),
        ("-k", "doe"),  # write the log as it grows, where it is to be
        ("-o", None if pbs.output is None else job.folder / pbs.output),
        ("-l", f"select={_select(job, pbs)}"),
        ("-l", f"place={pbs.place}"),
        ("-l", None if pbs.walltime is None else f"walltime={pbs.walltime}"),
        ("-l", None if pbs.filesystems is None else f"filesystems={pbs.filesystems}"),
        ("-J", job.array),
        ("-r", None if job.array is not None else "y" if pbs.requeue and job.goes_on else "n"),
        ("-v", f"{RECORD_VARIABLE}={quote(make_record(job), safe='')}"),
    ]
    for name, value in options:
        if value is not None:
            if not str(value).isprintable():
                raise ConfigError(
                    f"{str(value)!r} cannot stand in a batch script: submit from a folder with a plain name"
                )
            yield f"{name} {shlex.quote(str(value))}"
    yield from pbs.extra


def _select(job: BatchJob, pbs: PbsSection) -> str:
    """What is asked for, chunk by chunk; each is a node, as they are scattered."""
    resources = job.resources
    cores = resources.tasks_per_node * (resources.cpus_per_task or 1)
    chunk = {"ncpus": str(cores), "mpiprocs": str(resources.tasks_per_node)}
    if resources.gpus:
        chunk[pbs.gpu_resource] = str(resources.gpus)
    if pbs.memory is not None:
        chunk["mem"] = pbs.memory
    chunk.update(dict(text.partition("=")[::2] for text in pbs.resources))
    text = ":".join(f"{name}={value}" for name, value in chunk.items())
    chunks = [f"1:{text}:host={host}" for host in resources.named]
    unnamed = resources.nodes - len(chunks)
    return "+".join([*chunks, *([f"{unnamed}:{text}"] if unnamed > 0 else [])])


def _environment(job: BatchJob, pbs: PbsSection) -> Iterator[str]:
    """What the command needs of its environment, which PBS does not take along."""
    if path := os.environ.get("PYTHONPATH"):
        yield f"export PYTHONPATH={shlex.quote(path)}"
    cores = job.resources.cpus_per_task or (None if pbs.takes_whole_nodes else 1)
    if cores is None:
        yield "unset OMP_NUM_THREADS # by PBS: all cores of the node, for each rank"
    else:
        yield f"export OMP_NUM_THREADS={cores} # of each rank; PBS says all cores of the node"
    if job.resources.topology.world_size == 1:
        return
    if pbs.launcher == "pals":
        for name, value in job.resources.config.launch.environment.items():
            yield f"export {name}={shlex.quote(value)}"
    elif len(job.resources.hosts) > 1 and " " not in sys.executable:
        agent = f"{sys.executable} -m {REMOTE_SHELL}"
        yield "if PATH=$PATH:$PBS_O_PATH command -v pbs_tmrsh >/dev/null; then # PBS starts what ssh would"
        yield f"    export PRTE_MCA_plm_ssh_agent='{agent}' OMPI_MCA_plm_rsh_agent='{agent}'"
        yield f"    export HYDRA_LAUNCHER=rsh HYDRA_LAUNCHER_EXEC={sys.executable}"
        yield f"    export HYDRA_LAUNCHER_EXTRA_ARGS='-m {REMOTE_SHELL}'"
        yield "fi"


def _command(job: BatchJob, pbs: PbsSection) -> Iterator[str]:
    """The command as an array of bash, an option a line."""
    words: list[str | Spelled] = [sys.executable, "-m", "launch.cli", *job.words]
    if pbs.launcher == "pals" and job.resources.topology.world_size > 1:
        yield 'mapfile -t nodes < <(uniq "$PBS_NODEFILE")'
        # The interpreter stays beside its libraries. An exception on one rank would hang the others under plain python.
        before = ["mpiexec", "--no-transfer", "--line-buffer", "--cpu-bind", "none", *pbs.launcher_arguments]
        words = [*before, *_place_ranks(job), sys.executable, "-m", "mpi4py", *words[1:]]
    yield "job=("
    yield from (f"    {line}" for line in wrap_words(words, TASK_VARIABLE))
    yield ")"


def _place_ranks(job: BatchJob) -> Iterator[str | Spelled]:
    """PALS's options that place the ranks: it fills node after node with as many as `--ppn` says."""
    topology, resources = job.resources.topology, job.resources
    hosts = [topology.host(rank) for rank in range(topology.world_size)]
    listed = list(dict.fromkeys(hosts))
    most = hosts.count(listed[0])
    if hosts != [host for host in listed for _ in range(most)][: len(hosts)]:
        listed, most = hosts, 1  # a node for each rank, so that some stand several times
    yield from ("-n", str(len(hosts)), "--ppn", str(most), "--hosts")
    named = bool(resources.named)
    yield ",".join(listed) if named else Nodes(tuple(resources.hosts.index(host) for host in listed))


def _check(job: BatchJob, pbs: PbsSection) -> None:
    """Raise ConfigError for settings that qsub would take, and that would go wrong later."""
    check_settings(job, "qsub")
    if pbs.output is not None and not (job.folder / pbs.output).parent.is_dir():
        raise ConfigError(f"launch.pbs.output: {(job.folder / pbs.output).parent} does not exist: make it")
    if job.array is not None and pbs.output is not None and "^array_index^" not in pbs.output:
        raise ConfigError(
            "launch.pbs.output: the tasks of an array would share one log: put ^array_index^ into its name"
        )
    if job.array is not None and job.array.count == 1:
        raise ConfigError("--array 1: PBS has no arrays of one job: leave the option out")
    if pbs.requeue and job.array is not None:
        raise ConfigError("launch.pbs.requeue: an array does not go on by itself: --no-requeue, and submit it again")
    if pbs.launcher == "pals" and job.resources.named and set(job.resources.named) != set(job.resources.hosts):
        raise ConfigError(
            "launch.pbs.launcher: pals needs to know each rank's node: name all hosts, or count all devices"
        )
    if pbs.seconds is not None:
        check_warning(job, "walltime", pbs.walltime, pbs.seconds)
    elif pbs.requeue and job.goes_on:
        raise ConfigError("launch.pbs.requeue: needs launch.pbs.walltime: PBS warns no job, so the job has to know")
