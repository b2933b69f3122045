"""Settings that follow from a configuration and a model's own files together, before anything is loaded.

They need no torch, because processes that only start ranks ask for them, too. Of generation_config.json, read as vLLM's
`ModelConfig.get_diff_sampling_param` reads it, these keys have an effect where a request is silent: temperature, top_p,
top_k, min_p, repetition_penalty, and max_new_tokens, which is max_tokens here. `do_sample` alone decides nothing, but
for a temperature that is left out. Which tokens end a text `trtrun.models.config` reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtrun.configuration.config import RuntimeConfig
from trtrun.configuration.device_lists import kind_of
from trtrun.configuration.drafting.drafting_methods import METHODS, DraftModelSection
from trtrun.configuration.engine_sections import ModelSection
from trtrun.core.sampling_params import SamplingParams
from trtrun.errors import CheckpointError, ConfigError, InvalidRequestError
from trtrun.heads.head_reading import tell_heads
from trtrun.heads.heads import HeadsPlan, read_heads
from trtrun.loading.weight_check import check_heads_in_target
from trtrun.models.config import ModelConfig
from trtrun.weights.checkpoint import read_json

MADE_UP_LENGTH, MADE_UP_ROUNDS = 32, 4
"""Tokens of a row that a start makes up, where its context is not shorter, and the rounds that it may gain in."""


_READ_ALONE = 8192
"""Tokens of a prompt that a mixture reads at once on GPUs, where nobody waits for it: the more there are, the more of
them share an expert, which is read once."""


def resolve_dtype_name(section: ModelSection, config: ModelConfig) -> str:
    """Name of the dtype to compute in: the section's, or the checkpoint's for `auto`."""
    return config.checkpoint_dtype if section.dtype == "auto" else section.dtype


def read_target_heads(config: RuntimeConfig, model: ModelConfig) -> HeadsPlan | None:
    """The heads that draft from what the target computes; None where the method has none.

    Raises:
        CheckpointError: there are none in their directory, or they do not fit the target.
    """
    if config.heads is None:
        return None
    num_ranks = 1 if config.heads_apart else len(config.target.devices)
    try:
        plan = read_heads(config.heads.model, model, config.speculation, num_ranks)
        check_heads_in_target(plan, config.target, num_ranks)
        return plan
    except CheckpointError as error:
        if METHODS[config.speculation.method].drafts_from_target:
            raise
        told = tell_heads(config.heads.model, config.speculation.method)
        if told is None or "speculation.method" in str(error):
            raise
        raise CheckpointError(f"heads: {config.heads.model}: {told}") from None


def target_context(config: RuntimeConfig, model: ModelConfig) -> int:
    """Most tokens of one request.

    Raises:
        ConfigError: scheduler.max_seq_len is beyond the target's context.
    """
    wanted = config.scheduler.max_seq_len
    if wanted is not None and wanted > model.max_position_embeddings:
        raise ConfigError(
            f"scheduler.max_seq_len is {wanted}, but the target's context is {model.max_position_embeddings} tokens"
        )
    return wanted or model.max_position_embeddings


def most_tokens(config: RuntimeConfig, model: ModelConfig) -> int:
    """Tokens of the largest round of a target: more than in most rounds, where it is a mixture on GPUs and its user has
    not said how many. Of Qwen3-30B-A3B's shape a prompt of 8,000 tokens is read in 149 ms at once, by 2,048 in 187."""
    is_left_out, kind = config.scheduler.max_num_tokens is None, kind_of(config.target.devices[0])
    if is_left_out and kind == "cuda" and model.has_experts:
        return max(_READ_ALONE, config.max_num_tokens)
    return config.max_num_tokens


def row_context(config: RuntimeConfig, model: ModelConfig) -> int:
    """Tokens that tables of rows and of rotation are made for, however long a context config.json speaks of: what a row
    can come to, by `target_context` and by what the KV store may hold; the rows that a start makes up may be longer.

    Raises:
        ConfigError: as of `target_context`.
    """
    context, stored, size = target_context(config, model), config.kv_cache.max_tokens, config.kv_cache.block_size
    if stored is None:
        return context
    made_up = max(most_tokens(config, model) + 1, MADE_UP_LENGTH + MADE_UP_ROUNDS * (config.draft_len + 1))
    return min(context, max(-(-stored // size) * size, made_up))


def mask_token(config: RuntimeConfig, draft: ModelConfig | None) -> int | None:
    """The mask token of a draft model, where all tokens of a draft come from one forward; None where they do not.

    Raises:
        ConfigError: speculation.parallel_drafting is on, and the draft model has none.
    """
    section = config.speculation
    if config.draft is None or draft is None:
        return None
    if not isinstance(section, DraftModelSection) or section.parallel_drafting == "off":
        return None
    if config.draft.is_translated:
        return None  # the mask token is one of the draft's, and its places are not the target's
    if draft.mask_token is None and section.parallel_drafting == "on":
        raise ConfigError(
            f"speculation.parallel_drafting is on, but {Path(config.draft.model, 'config.json')} names no mask token "
            "(pard_token): name a draft that was trained for it, or leave parallel_drafting out"
        )
    return draft.mask_token


def check_states(config: RuntimeConfig, target: ModelConfig, draft: ModelConfig | None) -> None:
    """Raise ConfigError where layers of a model keep states of rows, and the job asks for what these cannot do."""
    engines = (("target", target, config.target), ("draft", draft, config.draft))
    for role, model, section in engines:
        layers = () if model is None else model.layers_with_states
        if not layers or section is None:
            continue
        told = f"the {role} has {len(layers)} layers that keep a state of each row in place of keys and values"
        if role == "target" and config.max_paths > 1:
            raise ConfigError(
                f"{told}: it cannot verify draft trees, which would need one for each path: "
                f"{config.speculation.way_to_chains}"
            )
        if role == "draft" and config.translates_drafts:
            raise ConfigError(
                f"{told}: a draft with a tokenizer of its own cannot have these, as its texts change where words join; "
                "take a draft of the target's vocabulary"
            )


@dataclass(frozen=True)
class JobModels:
    """What config.json says of the models of a job, and what follows from it for all ranks.

    Attributes:
        target: of the target.
        draft: of the draft model; None without one.
        context: see `row_context`.
        mask_token: see `mask_token`.
        most_tokens: see `most_tokens`.
    """

    target: ModelConfig
    draft: ModelConfig | None
    context: int
    mask_token: int | None
    most_tokens: int

    @classmethod
    def of(cls, config: RuntimeConfig, target: ModelConfig, draft: ModelConfig | None) -> JobModels:
        """The models of a configuration.

        Raises:
            ConfigError: see `row_context`, `mask_token` and `check_states`.
        """
        check_states(config, target, draft)
        return cls(target, draft, row_context(config, target), mask_token(config, draft), most_tokens(config, target))

    def of_role(self, role: str) -> ModelConfig:
        """The model of an engine that the job has, "target" or "draft"."""
        model = self.draft if role == "draft" else self.target
        assert model is not None, "the job has no draft model"
        return model


GENERATION_CONFIG = "generation_config.json"

_SAME = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def read_generation_defaults(path: Path) -> dict[str, Any]:
    """Sampling parameters by their names, those that a model's directory says; none where it has no such file.

    Raises:
        CheckpointError: one is out of its range.
    """
    values = read_json(path, GENERATION_CONFIG, required=False)
    found = {name: values[name] for name in _SAME if values.get(name) is not None}
    if type(found.get("top_k")) is int:
        found["top_k"] = max(0, found["top_k"])  # below 0 all are kept, too
    if values.get("do_sample") is True:
        found.setdefault("temperature", 1.0)  # transformers'
    if values.get("max_new_tokens") is not None:
        found["max_tokens"] = values["max_new_tokens"]
    try:
        SamplingParams.from_mapping(found)
    except InvalidRequestError as error:
        raise CheckpointError(
            f"{path / GENERATION_CONFIG}: {error}; server.generation_config: none leaves out what it says of sampling"
        ) from None
    return found


def sampling_defaults(config: RuntimeConfig) -> dict[str, Any]:
    """Sampling defaults of a job's target, unless the configuration leaves them out (`server.generation_config`).

    Raises:
        CheckpointError: as of `read_generation_defaults`.
    """
    return {} if config.server.generation_config == "none" else read_generation_defaults(config.target.model)


def describe_generation_defaults(defaults: Mapping[str, Any]) -> str:
    """One line for users; empty where there are none."""
    if not defaults:
        return ""
    said = ", ".join(f"{name} {value}" for name, value in defaults.items())
    return (
        f"sampling where a request does not say it, by the model's {GENERATION_CONFIG}: {said}; "
        "server.generation_config: none leaves it out"
    )
