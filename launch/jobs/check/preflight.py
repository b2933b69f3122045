"""What can be known to be wrong before any rank starts: model directories, their split over devices, tokenizers.

The parent process calls it so that a user's mistake is one line from one process. It reads headers and configurations,
no weights, and leaves torch alone: importing it takes longer than all of this. Only counting GPUs needs it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from launch.jobs.placement.allocation import is_local
from parallel.errors import ParallelError
from parallel.topology import Topology
from trtrun.configuration.config import RuntimeConfig
from trtrun.configuration.device_lists import kind_of
from trtrun.configuration.drafting.text_methods import SuffixSection
from trtrun.configuration.engine_sections import ModelSection
from trtrun.errors import CheckpointError, ConfigError, name_section
from trtrun.heads.head_reading import tell_heads
from trtrun.kvcache.formats import KV_FORMATS
from trtrun.loading.model_settings import (
    mask_token,
    resolve_dtype_name,
    target_context,
)
from trtrun.loading.weight_check import check_model_weights, check_split, choose_default
from trtrun.lora.lora_files import open_adapter
from trtrun.models.config import ModelConfig
from trtrun.start.job_spec import JobSpec, read_draft_vocabularies
from trtrun.tokens.corpus import read_corpus
from trtrun.tokens.text import check_same_tokenizer, read_tokenizer
from trtrun.weights.checkpoint import NoWeightsError
from trtrun.weights.weight import Share

_LOOKED_AT = 4096
"""Tokens of a corpus that are read before ranks start."""


def check_job(spec: JobSpec) -> None:
    """Raise the TrtrunError that starting this job would end in, as far as it can be told without weights."""
    check_models(spec)
    for report in inspect_weights(spec):
        if report.problem is not None and report.is_held:
            raise report.problem
    check_devices(spec.topology)
    check_tokenizers(spec)


def check_models(spec: JobSpec) -> None:
    """Raise CheckpointError or ConfigError for models that are not supported, or that cannot be split like this. Only
    their config.json is read, headers of adapters, and the first lines of a corpus."""
    config = spec.config
    KV_FORMATS.get(config.kv_cache.dtype)
    target = _check_model("target", spec)
    target_context(config, target)
    for name, path in config.adapters.items():
        open_adapter(name, path, target, config.adapter_slots.max_rank)
    if config.draft is not None:
        draft = _check_model("draft", spec)
        mask_token(config, draft)
        for name, path in config.draft_adapters.items():
            open_adapter(name, path, draft, config.adapter_slots.max_rank, "draft_adapters")
    check_corpus(config, target.vocab_size)


def check_corpus(config: RuntimeConfig, vocab_size: int) -> None:
    """Raise ConfigError for a corpus that a start would refuse, as far as its first lines tell."""
    section = config.speculation
    if isinstance(section, SuffixSection) and section.suffix_corpus is not None:
        read_corpus(section.suffix_corpus, config.tokenizer or config.target.model, vocab_size, _LOOKED_AT)


@dataclass(frozen=True)
class WeightsReport:
    """What the headers of one model's weights say on this host.

    Attributes:
        role: of the engine; "heads" are on the target's ranks, or on one of their own.
        hosts: that hold shards of it; one empty name for this host alone.
        is_held: whether this host is one of them, or stands for those that are.
        problem: what a run would be refused with; None where all is well.
    """

    role: str
    hosts: tuple[str, ...]
    is_held: bool
    problem: CheckpointError | None

    @property
    def is_absent(self) -> bool:
        """Whether there is nothing to look at."""
        return isinstance(self.problem, NoWeightsError)


def inspect_weights(spec: JobSpec, hosts_to_come: Collection[str] = ()) -> list[WeightsReport]:
    """Look at the files of each model's weights as the loader will, by their headers.

    Weights that only other hosts need may be missing here; the ranks there read them.

    Args:
        spec: a job whose models `check_models` has passed.
        hosts_to_come: simulated hosts; this one stands for them.
    """
    reports, config, topology = [], spec.config, spec.topology
    for role, section in (("target", config.target), ("draft", config.draft), ("heads", config.heads)):
        if section is None:
            continue
        drafts = role == "draft" or (role == "heads" and config.heads_apart)
        ranks = topology.draft_ranks if drafts else topology.target_ranks
        hosts = tuple(dict.fromkeys(topology.host(rank) for rank in ranks))
        is_held = any(host in hosts_to_come or is_local(host) for host in hosts)
        problem: CheckpointError | None = None
        try:
            if isinstance(section, ModelSection):
                size = len(section.devices)
                check_model_weights(section.model, spec.model_of(role), size, section.quantization, section.load_format)
            else:
                _ = spec.heads
        except NoWeightsError as error:
            problem = NoWeightsError(name_section(role, error))
        except CheckpointError as error:
            told = _of_heads(role, section.model) if role == "draft" else None
            problem = CheckpointError(name_section(role, told or error))
        reports.append(WeightsReport(role, hosts, is_held, problem))
    return reports


def check_visible_weights(spec: JobSpec, hosts_to_come: Collection[str] = ()) -> Iterator[str]:
    """Refuse weights that are here and that the job's hosts would refuse; say what could not be looked at.

    Yields:
        One text for each model that other hosts have to look at.

    Raises:
        CheckpointError: the weights that this host holds are wrong.
    """
    for report in inspect_weights(spec, hosts_to_come):
        if report.problem is None:
            continue
        if report.is_absent:
            reason = str(report.problem).removeprefix(f"{report.role}: ")
            whose = "the heads'" if report.role == "heads" else f"the {report.role}'s"
            yield f"{whose} weights were not looked at, for they are not here: {reason}"
        elif report.is_held:
            raise report.problem
        else:
            yield f"warning: {report.problem} (so it is on this host; {', '.join(report.hosts)} will look at their own)"


def check_tokenizers(spec: JobSpec) -> None:
    """Raise CheckpointError where draft and target do not spell text alike, or their tokens cannot be matched."""
    config = spec.config
    if config.translates_drafts:
        read_draft_vocabularies(spec)
        return
    tokenizer = read_tokenizer(config.tokenizer or config.target.model)
    draft_tokenizer = read_tokenizer(config.draft.model) if config.draft is not None else None
    if tokenizer is not None and draft_tokenizer is not None:
        check_same_tokenizer(tokenizer, draft_tokenizer)


def has_tokenizer(config: RuntimeConfig) -> bool:
    """Whether prompts may be text."""
    return read_tokenizer(config.tokenizer or config.target.model) is not None


def check_devices(topology: Topology) -> None:
    """Raise ConfigError for a GPU of this host that it does not have.

    A rank of another host is not checked here; its own start-up does it.
    """
    missing = missing_devices(topology)
    if missing:
        raise ConfigError(
            f"{missing[0]} is not on this host: it has {describe_gpus()}; "
            'use CPU slots such as "cpu:0" where there is no GPU'
        )


def missing_devices(topology: Topology) -> list[str]:
    """GPUs that should be on this host and are not."""
    wanted = [slot.device for slot in topology.slots if slot.device.startswith("cuda") and is_local(slot.host)]
    count = count_gpus() if wanted else 0
    return [device for device in wanted if int(device.partition(":")[2]) >= count]


def describe_gpus() -> str:
    """How many GPUs this host has, as a text: "2 (cuda:0 to cuda:1)", "none"."""
    count = count_gpus()
    return f"{count} (cuda:0 to cuda:{count - 1})" if count else "none"


def count_gpus() -> int:
    """GPUs of this host that this process may use."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _check_model(role: str, spec: JobSpec) -> ModelConfig:
    """Read one model's configuration, and try its split over the section's devices."""
    section = spec.config.draft if role == "draft" else spec.config.target
    assert section is not None
    kind = kind_of(section.devices[0])
    try:
        config = spec.model_of(role)
        default = choose_default(config, section.quantization, for_target=role == "target")
        share = Share(0, len(section.devices))
        check_split(config, share, resolve_dtype_name(section, config), kind, default)
    except (CheckpointError, ConfigError, ParallelError) as error:
        raise CheckpointError(name_section(role, _of_heads(role, section.model) or error)) from None
    return config


def _of_heads(role: str, path: Path) -> str | None:
    """What to say of a directory with heads that is taken for a model's."""
    told = tell_heads(path)
    if told is None:
        return None
    if role == "target":
        return f"{path}: it has heads, which only draft: name the model that they were trained for"
    return f"{path}: {told}, and leave draft.devices out or null"
