"""What a rank loads beside its engines: LoRA adapters, a corpus that texts are looked up in, and heads that draft."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy
import torch

from parallel.communicator import Communicator
from parallel.groups import Groups
from trtrun.configuration.config import RuntimeConfig
from trtrun.configuration.drafting.text_methods import SuffixSection
from trtrun.errors import CheckpointError, ConfigError, TrtrunError, wrap_errors
from trtrun.heads.heads import HEADS_FILES, HeadsPlan, HeadsTarget
from trtrun.kvcache.sizing import SlotMemory
from trtrun.loading.loading import (
    LoadReport,
    embedding_and_head_bytes,
    heads_bytes,
    load_embedding_and_head,
    load_heads,
    open_heads,
)
from trtrun.loading.model_settings import JobModels
from trtrun.lora.lora_config import hash_adapter_files
from trtrun.lora.lora_loading import load_adapter
from trtrun.memory.memory_requirements import head_working_bytes, kv_bytes_per_block, resolve_dtype
from trtrun.models.config import ModelConfig
from trtrun.models.decoder import CausalLM
from trtrun.speculation.suffixes.corpus import SortedCorpus, bytes_of_corpus, sort_places
from trtrun.start.job_spec import JobSpec
from trtrun.tokens.corpus import read_corpus
from trtrun.weights.model_files import hash_model_files


def load_adapters(config: RuntimeConfig, role: str, model: CausalLM) -> None:
    """Fill the slots of a rank's layers, which draft and target number alike.

    Raises:
        CheckpointError: one of them is damaged, not supported or not for this model; the line names it.
    """
    key, paths = ("adapters", config.adapters) if role == "target" else ("draft_adapters", config.draft_adapters)
    for slot, name in enumerate(config.adapters, start=1):
        if name not in paths:
            continue
        try:
            load_adapter(model, slot, paths[name])
        except CheckpointError as error:
            raise CheckpointError(f"{key}.{name}: {error}") from None


def adapter_hashes(config: RuntimeConfig) -> list[str]:
    """Tell the files of each adapter from others, and its name."""
    paths = [*config.adapters.items(), *config.draft_adapters.items()]
    return [f"{name}={hash_adapter_files(path)}" for name, path in paths]


_READS = 0
"""Of the group the rank that reads the file: ranks with other texts would propose other tokens, and part for ever."""


def corpus_bytes(config: RuntimeConfig) -> int:
    """Upper bound of what the corpus takes on each rank of the target; 0 without one."""
    section = config.speculation
    if not isinstance(section, SuffixSection) or section.suffix_corpus is None:
        return 0
    # A token is a byte of a file or more, but for those that a tokenizer puts in front of a text.
    with wrap_errors(f"speculation.suffix_corpus: {section.suffix_corpus}", ConfigError):
        most = min(section.suffix_corpus_max_tokens, 2 * section.suffix_corpus.stat().st_size)
    return bytes_of_corpus(most, section.suffix_decoding_max_tree_depth)


def load_corpus(
    config: RuntimeConfig, vocab_size: int, communicator: Communicator, device: torch.device
) -> SortedCorpus | None:
    """The corpus on this rank's device; None where the configuration names none, or the start has failed on the rank
    that reads it. Collective over the target's group.

    Raises:
        ConfigError: its file cannot be used; on the rank that reads it.
    """
    section = config.speculation
    if not isinstance(section, SuffixSection) or section.suffix_corpus is None:
        return None
    most, tokenizer = section.suffix_decoding_max_tree_depth, config.tokenizer or config.target.model
    tokens = order = numpy.empty(0, numpy.int32)
    failure: TrtrunError | None = None
    if communicator.rank == _READS:
        try:
            tokens = read_corpus(section.suffix_corpus, tokenizer, vocab_size, section.suffix_corpus_max_tokens)
            sorted_places, num_places = sort_places(torch.from_numpy(tokens), most)
            order = sorted_places[: int(num_places)].numpy()
            if not len(order):
                where = f"speculation.suffix_corpus: {section.suffix_corpus}"
                raise ConfigError(f"{where} holds no text of two tokens or more")
        except TrtrunError as error:
            failure = error
    # The others wait for what was read, and are told where nothing comes. What is wrong is the reader's to say.
    shared = [_share(None if failure else values, communicator, device) for values in (tokens, order)]
    if failure is not None:
        raise failure
    of_tokens, of_order = shared
    return None if of_tokens is None or of_order is None else SortedCorpus(of_tokens, of_order, most)


def _share(values: numpy.ndarray | None, communicator: Communicator, device: torch.device) -> torch.Tensor | None:
    """What the rank that reads has, on all of them: [n] int32; None where that is None."""
    own = None if values is None else torch.from_numpy(values).to(device)
    if communicator.size == 1:
        return own
    count = int(communicator.broadcast(torch.tensor([-1 if own is None else len(own)], device=device), _READS))
    if count < 0:
        return None
    place = own if own is not None and len(own) == count else torch.empty(count, dtype=torch.int32, device=device)
    return communicator.broadcast(place, _READS)


def demand_apart(config: RuntimeConfig, models: JobModels, plan: HeadsPlan, device: torch.device) -> SlotMemory:
    """What heads on a rank of their own need there."""
    dtype = resolve_dtype(config.target, models.target)
    assert plan.stored is not None, "heads that keep nothing sit on the target's ranks"
    return SlotMemory(
        heads_bytes(plan, 0, 1, dtype, device.type) + _ends_bytes(config, models.target, plan, device),
        kv_bytes_per_block(config, plan.stored, 1, dtype),
        head_working_bytes(config, models, plan, device),
    )


def _ends_bytes(config: RuntimeConfig, target: ModelConfig, plan: HeadsPlan, device: torch.device) -> int:
    dtype = resolve_dtype(config.target, target)
    return embedding_and_head_bytes(target, plan.target_weights(target), dtype, device, config.target.quantization)


@dataclass
class RankHeads:
    """What one rank knows of heads, and has of them.

    Attributes:
        spec: of the job.
        plan: of the heads, on ranks that have them and on the target's, which tap what they read; None elsewhere.
        are_here: whether this rank has them.
        loaded: what they compute; None until then, and where they are not.
        report: what loading them cost.
    """

    spec: JobSpec
    plan: HeadsPlan | None
    are_here: bool
    loaded: object | None = None
    report: LoadReport = field(default_factory=lambda: LoadReport(0, 0))

    @classmethod
    def read(cls, spec: JobSpec, groups: Groups) -> RankHeads:
        """Look at the heads' directory, where a rank with these groups has use for it.

        Raises:
            CheckpointError: there are none, or they do not fit the target.
        """
        group = groups.draft if spec.config.heads_apart else groups.target
        knows = group is not None or groups.target is not None
        plan = spec.heads if knows else None
        return cls(spec, plan, plan is not None and group is not None)

    @property
    def plan_here(self) -> HeadsPlan | None:
        """Plan of the heads that this rank has; None without."""
        return self.plan if self.are_here else None

    @property
    def plan_apart(self) -> HeadsPlan | None:
        """Plan of the heads that this rank has and nothing else; None elsewhere."""
        return self.plan_here if self.spec.config.heads_apart else None

    @property
    def keep(self) -> bool:
        """Whether this rank has heads that attend, in keys and values of their own or in those of the target."""
        return self.plan_here is not None and self.plan_here.stored is not None

    def load_beside(self, target: HeadsTarget, communicator: Communicator) -> None:
        """Read this rank's share of them, beside the target or what there is of it.

        Raises:
            CheckpointError: a tensor is not there, or holds what it must not.
        """
        if self.plan_here is not None:
            config = self.spec.config
            files = open_heads(self.plan_here, config.target, self.spec.target, target.device)
            self.loaded, self.report = load_heads(
                self.plan_here, target, communicator, files, kv_format=config.kv_cache.dtype
            )

    def load_apart(self, communicator: Communicator, device: torch.device) -> None:
        """Read them on a rank of their own, and what of the target they compute with.

        Raises:
            CheckpointError: anything wrong with the files, in one line.
        """
        plan, target, section = self.plan_apart, self.spec.target, self.spec.config.target
        assert plan is not None
        dtype = resolve_dtype(section, target)
        loaded = load_embedding_and_head(section, target, plan.target_weights(target), communicator, device, dtype)
        self.load_beside(loaded, communicator)
        size = self.report.shard_bytes + _ends_bytes(self.spec.config, target, plan, device)
        self.report = LoadReport(self.report.bytes_read + loaded.bytes_read, size)

    def hashes(self) -> list[str]:
        """Hashes of the files that this rank has read: the heads', and where it has nothing else the target's."""
        if self.plan_here is None:
            return []
        section = self.spec.config.target
        of_target = [hash_model_files(section.model, section.load_format != "dummy")]
        files = self.plan_here.files
        own = [] if files is None else [hash_model_files(files.path, single_files=HEADS_FILES)]
        return [*(of_target if self.plan_apart is not None else []), *own]
