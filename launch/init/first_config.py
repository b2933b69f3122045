"""The YAML file that `trtrun init` writes: what it finds on this host, GPUs, cores, MPI and Slurm's partitions, and a
placement that `trtrun plan` says fits, with a reason for each choice.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from launch.init.models import Drafting, FoundModel, find_models, list_draftings, name_model
from launch.jobs.check.preflight import count_gpus
from launch.jobs.mpi.job import Job
from launch.jobs.mpi.library import find_library
from launch.jobs.plan.plan import JobPlan, make_plan
from launch.jobs.plan.proposal import choose_open_keys
from launch.jobs.plan.yaml_text import comment_lines, render_yaml
from launch.jobs.slurm.client import Partition, SlurmError, list_partitions
from trtrun.configuration.config import make_config
from trtrun.configuration.model_paths import ASSET_PREFIX
from trtrun.errors import PlacementError, TrtrunError
from trtrun.kvcache.sizing import format_bytes
from trtrun.threads import count_cores

_MOST_NAMED = 5


@dataclass(frozen=True)
class Machine:
    """This host.

    Attributes:
        gpus: what each GPU is, as texts.
        partitions: of the Slurm cluster that the host belongs to; empty without one.
        slurm: why there are none; empty where there are some.
        mpi: the library that ranks load, or why there is none.
    """

    gpus: tuple[str, ...]
    partitions: tuple[Partition, ...]
    slurm: str
    mpi: str

    @property
    def partition(self) -> Partition | None:
        """Where a job goes from a host without GPUs: the first partition with some, the default one before others."""
        if self.gpus:
            return None
        with_gpus = [found for found in self.partitions if found.gpus]
        return next((found for found in with_gpus if found.is_default), next(iter(with_gpus), None))

    @property
    def num_gpus(self) -> int:
        """GPUs that a job may use on one host."""
        return self.partition.gpus if self.partition is not None else len(self.gpus)

    def describe(self) -> Iterator[str]:
        """Lines for people."""
        yield f"GPUs here: {_count_alike(self.gpus) or 'none'}."
        yield f"CPU cores: {count_cores()}."
        yield f"Slurm: {', '.join(map(str, self.partitions)) or self.slurm}."
        yield f"MPI: {self.mpi}."


def look() -> Machine:
    """This host, as this process sees it."""
    partitions: tuple[Partition, ...] = ()
    try:
        partitions, slurm = tuple(list_partitions()), "no partition is up"
    except SlurmError as error:
        slurm = str(error).partition(":")[0]
    try:
        mpi = find_library(os.environ).version.strip()
    except PlacementError as error:
        mpi = str(error)
    return Machine(tuple(map(_describe_gpu, range(count_gpus()))), partitions, slurm, mpi)


def _describe_gpu(number: int) -> str:
    seen = torch.cuda.get_device_properties(number)
    return f"{seen.name} ({format_bytes(seen.total_memory)})"


def _count_alike(names: Sequence[str]) -> str:
    return ", ".join(f"{names.count(name)} {name}" for name in dict.fromkeys(names))


@dataclass(frozen=True)
class Given:
    """What the command line says; None where it leaves a thing open. `file` is the name of what is written."""

    file: str
    model: str | None
    draft: str | None
    devices: Sequence[int | str] | None


def make_first_config(machine: Machine, given: Given) -> str:
    """The text of the file.

    Args:
        machine: this host.
        given: by the user.

    Raises:
        TrtrunError: a model that is named is not there, or does not fit; one line.
    """
    models = find_models()
    if given.model is not None:
        targets = [(name_model(given.model, "--model"), "You named it.")]
    else:
        reason = "The largest model in the Hugging Face cache that fits."
        targets = [(model, reason) for model in models if model.heads is None]
        shipped = name_model(f"{ASSET_PREFIX}target", "--model")
        targets.append((shipped, "The Hugging Face cache has no model that fits: this one ships with trtrun."))
    named = None
    if given.draft is not None:
        named = Drafting({"draft": {"model": name_model(given.draft, "--draft").name}}, "You named it.")
    error: TrtrunError | None = None
    for target, reason in targets:
        draftings = list(list_draftings(target, models)) if named is None else [named]
        for drafting in draftings:
            try:
                values, comments, plan = _place(target, drafting, machine, given)
            except TrtrunError as found:
                error = error or found
                continue
            comments["target.model"] = reason
            others = [other.name for other in draftings if other is not drafting and other.name != "ngram"]
            if others:
                comments["speculation.method"] += f" Also possible: {', '.join(others[:_MOST_NAMED])}."
            return _render(values, comments, machine, plan, given.file)
    assert error is not None
    raise error


def _place(
    target: FoundModel, drafting: Drafting, machine: Machine, given: Given
) -> tuple[dict[str, Any], dict[str, str], JobPlan]:
    """The sections of the file, the reasons for their keys, and what `trtrun plan` makes of them.

    Raises:
        TrtrunError: it does not fit.
    """
    placed = {} if given.devices is None else {"devices": list(given.devices)}
    values: dict[str, Any] = {"target": {"model": target.name, **placed}, **drafting.values}
    key = "draft.model" if "draft" in values else "speculation.method"
    comments = {"target.devices": "You named them."} if placed else {}
    comments |= {"speculation.method": "Who drafts.", key: drafting.reason}
    for choice in choose_open_keys(values, machine.num_gpus):
        section, _, name = choice.key.partition(".")
        values[section] = {**(values.get(section) or {}), name: choice.value}
        comments[choice.key] = f"{choice.reason[0].upper()}{choice.reason[1:]}."
    if machine.partition is not None and given.devices is None:
        values["launch"] = {"slurm": {"partition": machine.partition.name}}
        comments["launch"] = "This host has no GPU, and this partition has: trtrun submit sends the job there."
        comments["target.devices"] = f"On a node of {machine.partition.name}: {comments['target.devices']}"
    order = ("target", "draft", "speculation", "launch")
    values = {section: values[section] for section in order if section in values}
    return values, comments, make_plan(Job(make_config(values, Path.cwd(), "trtrun init"), []))


def _render(values: Mapping[str, Any], comments: Mapping[str, str], machine: Machine, plan: JobPlan, file: str) -> str:
    lines = ["Written by trtrun init. What it found:", *machine.describe(), _describe_fit(plan)]
    start = f"submit --config {file} -- serve" if machine.partition is not None else f"serve --config {file}"
    lines += [f"Next: trtrun check --config {file}, then trtrun {start}. Every key: docs/configuration.md."]
    return "".join(f"{line}\n" for text in lines for line in comment_lines(text)) + render_yaml(values, comments)


def _describe_fit(plan: JobPlan) -> str:
    weights = max(rank.target_shard_bytes + rank.draft_shard_bytes for rank in plan.ranks)
    held = f"at most {format_bytes(weights)} of weights on a device"
    if plan.kv_tokens is None:
        fits = f"trtrun plan accepts it: {held}; what memory is free there is not known here"
    else:
        fits = f"trtrun plan says that it fits: {held}, and room for {plan.kv_tokens} tokens of all requests together"
    return f"{fits}. A request has up to {plan.max_seq_len} (scheduler.max_seq_len)."
