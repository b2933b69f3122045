"""The image that a batch job runs in: what the script says before its command, and the words that enter the image.

It knows what Apptainer, Singularity, pyxis and the Container Engine of CSCS take. It does not know what is in an image:
that has trtrun, a `python3` on PATH, and MPICH where ranks are started by srun.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from launch.jobs.batch.job import BatchJob
from launch.jobs.batch.resources import BatchResources
from launch.jobs.slurm.section import ContainerSection, SlurmSection
from trtrun.errors import ConfigError

PREFIXES = {"apptainer": "APPTAINER", "singularity": "SINGULARITY"}
"""Of variables that the runtimes with an `exec` of their own read."""

LONE_STEP = ("srun", "--mpi=none", "--nodes=1", "--ntasks=1", "--cpu-bind=none", "--kill-on-bad-exit=1")
"""Enters an image that only a step of Slurm can, for a process that is no rank itself."""


def check_container(resources: BatchResources, folders: Sequence[str]) -> None:
    """Refuse what the runtime would refuse, or misread, when the job runs.

    Args:
        resources: of the job.
        folders: as of `container_words`.

    Raises:
        ConfigError: one line that names the key.
    """
    slurm = resources.section_as(SlurmSection)
    container = slurm.container
    assert container is not None
    if slurm.launcher == "mpirun" and len(resources.hosts) > 1:
        raise ConfigError(
            "launch.slurm.container: an mpirun inside the image cannot start ranks on the other nodes: "
            "set launch.slurm.launcher: srun"
        )
    image = _image_file(container)
    if image is not None:
        path = Path(folders[0], image)
        if path.parent.is_dir() and not path.exists():  # a folder that only the nodes have cannot be looked at
            raise ConfigError(f"launch.slurm.container.image: {path} does not exist")
    wrong = next((folder for folder in folders if "," in folder or ":" in folder), None)
    if container.runtime != "ce" and wrong is not None:
        raise ConfigError(f"launch.slurm.container: {wrong} cannot be bound, for a comma or a colon in its name")


def prepare_container(container: ContainerSection, is_step: bool) -> Iterator[str]:
    """Lines before the command: the variables of the image.

    Args:
        container: the section.
        is_step: whether srun starts each rank; else one process enters the image, and has all cores of the node.
    """
    yield "# The host's own Python packages must not get into the image."
    yield "unset PYTHONPATH PYTHONHOME VIRTUAL_ENV"
    yield "export PYTHONNOUSERSITE=1"
    prefix = PREFIXES.get(container.runtime)
    if prefix is not None:
        yield f"export {prefix}_NO_EVAL=1 # values are taken as they stand"
    elif not is_step:
        yield 'export SRUN_CPUS_PER_TASK="$SLURM_CPUS_ON_NODE"'
    before = "" if prefix is None else f"{prefix}ENV_"
    for name, value in container.env.items():
        yield f"export {before}{name}={shlex.quote(value)}"


def folders_to_bind(job: BatchJob) -> list[str]:
    """The folders that an image must have of the host: the job's first, then those of files that its command names,
    such as its YAML file and prompts, and of its output."""
    texts = [word.rpartition("=")[2] if word.startswith("-") else word for word in job.words if isinstance(word, str)]
    files = [os.path.abspath(job.folder / text) for text in texts]
    parents = [Path(file).parent for file in files if os.path.isfile(file)]
    found = [job.folder]
    for parent in [*parents, *([job.output.parent] if job.output is not None else [])]:
        if parent != Path("/") and not any(parent.is_relative_to(other) for other in found):
            found.append(parent)
    return [str(item) for item in found]


def container_words(resources: BatchResources, step: Sequence[str], folders: Sequence[str]) -> list[str]:
    """The words that enter the image, in front of the command.

    Args:
        resources: of the job.
        step: srun and its options, where it starts the ranks; else nothing.
        folders: to bind beside those of the section; the first is where the job runs.
    """
    container = resources.section_as(SlurmSection).container
    assert container is not None
    folder = folders[0]
    if container.runtime in PREFIXES:
        words = [*step, container.runtime, "exec"]
        if resources.gpus:
            words.append("--nv")
        for bind in (*folders, *container.binds):
            words += ["--bind", bind]
        return [*words, "--pwd", folder, container.image]
    words = [*(step or LONE_STEP)]
    if container.runtime == "ce":
        return [*words, f"--environment={container.image}"]
    binds = [bind if ":" in bind else f"{bind}:{bind}" for bind in (*folders, *container.binds)]
    words += [f"--container-image={container.image}", f"--container-mounts={','.join(binds)}"]
    words.append(f"--container-workdir={folder}")
    if container.env:
        words.append(f"--container-env={','.join(container.env)}")
    return words


def _image_file(container: ContainerSection) -> str | None:
    """The image where it is a file or a folder; None where a registry or a search path has it."""
    image = container.image
    if container.runtime in PREFIXES:
        return None if "://" in image else image
    if container.runtime == "ce":
        return image if image.endswith(".toml") else None
    return image if image.startswith(("/", "./")) else None
