"""What a job is made of: its configuration, who sits where, and what config.json of its models says.

Each file is read when it is first asked for, and once in a process: what checks a job hands the same object to its
start. Rank 0 sends the others what it has read, so that these open no config.json. It does not know weights or devices.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from parallel.topology import Topology
from trtrun.configuration.config import RuntimeConfig
from trtrun.configuration.model_sections import ModelSection
from trtrun.configuration.topology import make_topology
from trtrun.heads.heads import HeadsPlan
from trtrun.loading.model_settings import JobModels, read_target_heads
from trtrun.models.config import ModelConfig, read_model_config


@dataclass(frozen=True)
class JobSpec:
    """One job, as a process of it sees it.

    Attributes:
        config: with this host's model directories.
        told: config.json of each model as rank 0 has read it, by role; None where this process reads them.
    """

    config: RuntimeConfig
    told: Mapping[str, Any] | None = field(default=None, repr=False)

    @cached_property
    def topology(self) -> Topology:
        """Who sits where."""
        return make_topology(self.config)

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

    def tell_models(self) -> bytes:
        """The models for other ranks, as `told_by` takes them."""
        models = {"target": self.target, "draft": self.draft}
        told = {role: model.to_values() for role, model in models.items() if model is not None}
        return json.dumps(told).encode()

    def told_by(self, message: bytes) -> JobSpec:
        """The same job with the models that rank 0 has told."""
        return replace(self, told=json.loads(message))

    def _model(self, role: str, section: ModelSection) -> ModelConfig:
        return read_model_config(section.model) if self.told is None else ModelConfig.from_values(self.told[role])
