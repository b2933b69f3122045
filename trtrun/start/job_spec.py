"""What a job is made of: its configuration, who sits where, what config.json of its models says, and how a draft with
another tokenizer gets its tokens across.

Each file is read when it is first asked for, and once in a process: what checks a job hands the same object to its
start. Rank 0 sends the others what it has read, so that these open no config.json. It does not know devices.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parallel.topology import Topology
from trtrun.configuration.config import RuntimeConfig
from trtrun.configuration.engine_directory import is_engine
from trtrun.configuration.engine_sections import ModelSection
from trtrun.configuration.topology import make_topology
from trtrun.errors import CheckpointError, ConfigError
from trtrun.heads.heads import HeadsPlan
from trtrun.loading.model_settings import JobModels, read_target_heads
from trtrun.models.config import ModelConfig, read_model_config
from trtrun.weights.rank_files import open_checkpoint

if TYPE_CHECKING:
    from trtrun.tokens.translation import Vocabularies


@dataclass(frozen=True)
class JobSpec:
    """One job, as a process of it sees it.

    Attributes:
        config: with this host's model directories.
        model_values: config.json of models as rank 0 has read it, by role. This process reads those that are not there.
        is_awaited: whether requests wait for the job.
    """

    config: RuntimeConfig
    model_values: Mapping[str, Any] = field(default_factory=dict, repr=False)
    is_awaited: bool = False

    @cached_property
    def topology(self) -> Topology:
        """Who sits where."""
        return make_topology(self.config)

    @property
    def leaves_first_uses(self) -> bool:
        """Whether what rounds use first, such as graphs, is left to them. Not where a device may wait for its host, as
        a target's does for a draft from other ranks: a host that captures a graph waits for the device."""
        return self.is_awaited and not (self.config.drafts_apart or self.config.heads_apart)

    @cached_property
    def target(self) -> ModelConfig:
        """The target's config.json.

        Raises:
            CheckpointError: see `read_model_config`.
        """
        return self._model("target", self.config.target)

    @cached_property
    def draft(self) -> ModelConfig | None:
        """The draft's config.json; None without a draft model.

        Raises:
            CheckpointError: see `read_model_config`.
        """
        return None if self.config.draft is None else self._model("draft", self.config.draft)

    @cached_property
    def models(self) -> JobModels:
        """Both, and what follows from them.

        Raises:
            CheckpointError: see `read_model_config`.
            ConfigError: they do not go with the configuration.
        """
        return JobModels.of(self.config, self.target, self.draft)

    @cached_property
    def heads(self) -> HeadsPlan | None:
        """The heads that draft from what the target computes; None where the method has none.

        Raises:
            CheckpointError: there are none in their directory, or they do not fit the target.
        """
        return read_target_heads(self.config, self.target)

    def read_models(self) -> None:
        """Read what is not read yet of the models' configurations.

        Raises:
            CheckpointError: see `read_model_config`.
        """
        _ = self.target, self.draft

    def model_of(self, role: str) -> ModelConfig:
        """The model of an engine that the job has, "target" or "draft"."""
        model = self.draft if role == "draft" else self.target
        assert model is not None, "the job has no draft model"
        return model

    def encode_models(self) -> bytes:
        """The models for other ranks, as `with_models` takes them.

        A model whose weights are not on this host is left out, as they need be only where ranks hold them: headers of
        weights say a part of what it is, such as whether scales of keys and values are there.
        """
        models = {"target": (self.target, self.config.target), "draft": (self.draft, self.config.draft)}
        told = {
            role: model.to_values()
            for role, (model, section) in models.items()
            if model is not None and section is not None and _has_weights(section.model)
        }
        return json.dumps(told).encode()

    def with_models(self, message: bytes) -> JobSpec:
        """This job with the models that rank 0 has sent."""
        return replace(self, model_values=json.loads(message))

    def _model(self, role: str, section: ModelSection) -> ModelConfig:
        values = self.model_values.get(role)
        model = read_model_config(section.model) if values is None else ModelConfig.from_values(values)
        if section.expert_parallel:
            model = _cut_by_experts(model, role, section)
        context = self.config.scheduler.max_seq_len or model.max_position_embeddings
        if role == "draft":  # whose rows are the target's
            context = min(context, self.target.max_position_embeddings)
        return model.in_context(context)


def _cut_by_experts(model: ModelConfig, role: str, section: ModelSection) -> ModelConfig:
    """The model with experts that lie whole on ranks.

    Raises:
        ConfigError: it has none, or is an engine, whose shards hold features of each.
    """
    if is_engine(section.model):
        raise ConfigError(
            f"{role}.expert_parallel: {section.model} is an engine, which is cut by features: name the checkpoint that "
            "it was built from, or leave expert_parallel out"
        )
    try:
        return model.cut_by_experts()
    except ConfigError as error:
        raise ConfigError(f"{role}.expert_parallel: {error}") from None


def _has_weights(directory: Path) -> bool:
    """Whether all weights of a model can be opened."""
    try:
        open_checkpoint(directory).close()
    except CheckpointError:
        return False
    return True


def read_draft_vocabularies(spec: JobSpec) -> Vocabularies:
    """The vocabularies of target and draft, where the tokenizers are not the same.

    Raises:
        CheckpointError: a tokenizer is missing or damaged, or cannot be matched.
    """
    from trtrun.tokens.translation import read_vocabularies  # for these jobs alone: tokenizers take time to import

    config = spec.config
    assert config.draft is not None
    ends = (spec.model_of(role).eos_token_ids for role in ("target", "draft"))
    return read_vocabularies(config.tokenizer or config.target.model, config.draft.model, *ends)


@dataclass(frozen=True)
class DraftTranslation:
    """How drafts get from one vocabulary to the other.

    Attributes:
        vocabulary: `draft.vocabulary`, which is not `auto` any more.
        common_tokens: that both have.
        target_tokens, draft_tokens: of each vocabulary, without a model's padding.
    """

    vocabulary: str
    common_tokens: int
    target_tokens: int
    draft_tokens: int

    @classmethod
    def of(cls, spec: JobSpec) -> DraftTranslation | None:
        """The way of a job's drafts; None where nothing is translated.

        Raises:
            CheckpointError: see `read_draft_vocabularies`.
        """
        draft = spec.config.draft
        if draft is None or not draft.is_translated:
            return None
        common = read_draft_vocabularies(spec).common
        return cls(draft.vocabulary, len(common.draft_of), common.num_target, common.num_draft)

    def describe(self) -> str:
        """One line."""
        made = "are among the tokens that both have" if self.vocabulary == "intersection" else "become tokens as text"
        share, own = (self.common_tokens / max(1, size) for size in (self.target_tokens, self.draft_tokens))
        return (
            f"the draft has another tokenizer (draft.vocabulary: {self.vocabulary}): drafts {made}; "
            f"{self.common_tokens} tokens meet, {share:.0%} of the target's {self.target_tokens} and {own:.0%} of the "
            f"draft's {self.draft_tokens}"
        )
