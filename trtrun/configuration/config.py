"""The YAML file of a run: what may stand in it, what it means when left out, and what is refused.

It knows names, types and ranges. It does not know which ranks follow from the devices (`parallel.topology`), whether
the model directories hold models (`trtrun.models`), or how much memory there is (`trtrun.kvcache.sizing`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, cast

from pydantic import AliasChoices, BeforeValidator, Field, model_validator
from typing_extensions import override

from parallel.topology import Role
from trtrun.configuration.device_lists import host_of, kind_of
from trtrun.configuration.drafting.drafting_methods import (
    METHODS,
    NO_DRAFTS,
    DraftModelSection,
    check_heads_devices,
    is_unknown,
    name_method,
    needs_draft_model,
    needs_heads,
    place_heads,
    read_speculation,
    settle_vocabulary,
)
from trtrun.configuration.drafting.speculation_section import DraftSize, SpeculationSection
from trtrun.configuration.drafting.text_methods import SuffixSection
from trtrun.configuration.engine_defaults import Drafts, check_fit, find_engines, shorten_drafts, take_over
from trtrun.configuration.engine_sections import (
    AdapterSlotsSection,
    DraftSection,
    HeadsSection,
    KVCacheSection,
    ModelSection,
    OfHeads,
    SchedulerSection,
    check_section,
)
from trtrun.configuration.model_paths import ASSET_NAMES, ASSET_PREFIX, find_file, find_model
from trtrun.configuration.process_sections import FilePath, LaunchSection, Line, Number, Section, ServerSection
from trtrun.configuration.yaml_source import read_values
from trtrun.errors import ConfigError, nearest, shorten, wrap_errors

_USUAL_TOKENS = 2048
"""Of a round: dense models read prompts no faster by more, and rows that decode wait for all of them."""


class RuntimeConfig(Section):
    """Everything that one run needs to know, from one YAML file.

    Attributes:
        target: the model whose distribution the output follows.
        draft: the model that proposes, or the heads; forgotten where `speculation.method` needs none.
        adapters: LoRA adapters of the target, as PEFT saves them: `{name: directory}`. Requests name one.
        draft_adapters: of the draft model, by names in `adapters`: rows with that adapter are drafted for with it. Left
            out: without. Forgotten as `draft` is.
        adapter_slots: room for adapters.
        tokenizer: directory of the tokenizer, or a name as in `model`. Left out: the target's.
        speculation: how tokens are proposed and accepted.
        kv_cache: the paged store of keys and values.
        scheduler: limits of one round.
        threads: CPU threads of each slot. Left out: the cores of the host divided among its slots.
        cuda_graphs: replay the forwards of a round as CUDA graphs; without effect on the CPU.
        launch: how the ranks are started, watched and ended.
        server: what `trtrun serve` listens on, and what it lets in.
    """

    target: ModelSection
    draft: Annotated[
        DraftSection | None, BeforeValidator(lambda value: None if isinstance(value, OfHeads) else value)
    ] = None
    # The same key of the file: whose it is `speculation.method` says.
    heads: Annotated[
        HeadsSection | None, BeforeValidator(lambda value: value.values if isinstance(value, OfHeads) else None)
    ] = Field(default=None, validation_alias=AliasChoices("draft"))
    adapters: dict[Line, FilePath] = Field(default_factory=dict)
    draft_adapters: dict[Line, FilePath] = Field(default_factory=dict)
    adapter_slots: AdapterSlotsSection = AdapterSlotsSection()
    tokenizer: FilePath | None = None
    speculation: Annotated[SpeculationSection, BeforeValidator(read_speculation)] = DraftModelSection()
    kv_cache: KVCacheSection = KVCacheSection()
    scheduler: SchedulerSection = SchedulerSection()
    threads: Annotated[int, Number, Field(ge=1, le=1024)] | None = None
    cuda_graphs: bool = True
    launch: LaunchSection = LaunchSection()
    server: ServerSection = ServerSection()

    @model_validator(mode="before")
    @classmethod
    def _place_draft(cls, values: object) -> object:
        """Forget the draft when the method needs none: it is not loaded and has no rank. Nor is it known what it must
        be where the method is not."""
        if not isinstance(values, dict):
            return values
        speculation = name_method(values.get("speculation"), values.get("draft"), values.get("target"))
        if needs_draft_model(speculation) and not is_unknown(speculation):
            return values
        placed = {key: value for key, value in values.items() if key not in ("draft", "draft_adapters")}
        if speculation is not None:
            placed["speculation"] = speculation
        if needs_heads(speculation):
            heads = place_heads(speculation, values.get("draft"), values.get("target"))
            if heads is not None:
                placed["draft"] = OfHeads(heads)
        return placed

    @classmethod
    @override
    def known_keys(cls) -> list[str]:
        return [key for key in cls.model_fields if key != "heads"]

    @property
    def _shipped_draft(self) -> str:
        """What ships for the method, where the target is the shipped one."""
        name = {"draft_target": "draft"}.get(self.speculation.method, self.speculation.method)
        if name not in ASSET_NAMES or str(self.target.model) != f"{ASSET_PREFIX}target":
            return ""
        return f" ({ASSET_PREFIX}{name} is for this target)"

    @model_validator(mode="after")
    def _check_sections_fit(self) -> RuntimeConfig:
        if needs_draft_model(self.speculation) and self.draft is None:
            raise ValueError(
                f"draft: missing, though speculation.method is {self.speculation.method}: "
                f"add a draft section{self._shipped_draft} or set speculation.method to none"
            )
        if needs_heads(self.speculation) and self.heads is None:
            raise ValueError(
                f"draft: missing, though speculation.method is {self.speculation.method}: name the directory of its "
                f"heads as draft.model{self._shipped_draft}, or set speculation.method to none"
            )
        if self.heads is not None and self.heads.devices is not None:
            check_heads_devices(self.speculation.method, self.heads.devices, self.target.devices)
        devices = self.target.devices + self.draft_devices
        kinds = sorted({kind_of(device) for device in devices})
        if len(kinds) > 1:
            raise ValueError(
                f"target.devices: CPU slots and GPUs cannot be mixed in one run ({', '.join(devices)}): "
                "use one kind for target and draft"
            )
        hosts = {host_of(device) for device in devices}
        if "" in hosts and len(hosts) > 1:
            raise ValueError(
                f"target.devices: some devices name a host and some do not ({', '.join(devices)}): "
                "name the host of each, in target and draft"
            )
        if self.launch.orchestrator_host is not None and self.launch.orchestrator_host not in hosts:
            raise ValueError(
                f"launch.orchestrator_host: {self.launch.orchestrator_host} has none of the devices "
                f"({', '.join(devices)}): name one of their hosts"
            )
        if self.speculation.drafting_ahead == "on" and not self.drafts_apart:
            raise ValueError(
                f"speculation.ahead: is on, but draft and target share devices ({', '.join(devices)}): give the draft "
                "devices of its own, or set it to auto"
            )
        most = self.adapter_slots.max_loaded
        if most is not None and most < len(self.adapters):
            raise ValueError(
                f"adapter_slots.max_loaded: is {most}, but adapters names {len(self.adapters)}: set it to that or more"
            )
        for name in self.draft_adapters:
            if name not in self.adapters:
                raise ValueError(f"draft_adapters: {shorten(name)} is none of adapters{nearest(name, self.adapters)}")
        if self.server.adapter_directory is not None and not self.num_adapter_slots:
            raise ValueError(
                "adapter_slots.max_loaded: missing: say how many adapters may be loaded (server.adapter_directory)"
            )
        rows, tokens, verified = self.scheduler.max_batch_size, self.scheduler.max_num_tokens, self._most_verified
        if tokens is not None and tokens < verified:
            raise ValueError(
                f"scheduler.max_num_tokens: {tokens} is too small to verify {verified // rows} tokens of "
                f"each of {rows} rows: set it to {verified} or more, or lower scheduler.max_batch_size"
                f"{f' or speculation.{self.speculation.tree_key}' if self.max_paths > 1 else ''}"
            )
        return self

    @property
    def _most_verified(self) -> int:
        """Tokens of a round in which those of all rows' drafts are verified."""
        return self.scheduler.max_batch_size * (1 + self.draft_size(self.draft_len).nodes)

    @property
    def max_num_tokens(self) -> int:
        """Tokens of one round; of a prompt that is read alone there may be more (`most_tokens`)."""
        given = self.scheduler.max_num_tokens
        return max(_USUAL_TOKENS, self._most_verified) if given is None else given

    @property
    def num_adapter_slots(self) -> int:
        """Adapters that may be loaded at once; 0 where there are none."""
        most = self.adapter_slots.max_loaded
        return len(self.adapters) if most is None else most

    @property
    def is_speculative(self) -> bool:
        """Whether tokens are drafted at all, by whatever method."""
        return self.speculation.method != NO_DRAFTS

    @property
    def has_draft_engine(self) -> bool:
        """Whether a draft model runs beside the target, with ranks and a KV store of its own."""
        return self.draft is not None

    @property
    def draft_len(self) -> int:
        """Tokens drafted for a row in one round, at most; 0 where nothing is drafted."""
        return self.speculation.draft_len if self.is_speculative else 0

    @property
    def max_paths(self) -> int:
        """Paths of a row's draft, at most; 1 where drafts are chains."""
        return self.draft_size(self.draft_len).paths

    def draft_size(self, draft_len: int) -> DraftSize:
        """How large a row's draft of `draft_len` tokens, one behind the other, is, at most."""
        return self.speculation.size_of(draft_len)

    @property
    def draft_nodes(self) -> tuple[int, ...]:
        """Tokens of a row's draft, by how many of them follow one another, from none on."""
        return tuple(self.draft_size(length).nodes for length in range(self.draft_len + 1))

    @property
    def is_paced(self) -> bool:
        """Whether draft_len follows from what rounds took (see SpeculationSection.pacing)."""
        speculation = self.speculation
        return self.is_speculative and speculation.pacing == "measured" and not speculation.use_logits

    @property
    def drafts_apart(self) -> bool:
        """Whether draft and target share no device, so that they can work at the same time."""
        return bool(self.draft_devices) and not set(self.draft_devices) & set(self.target.devices)

    @property
    def heads_apart(self) -> bool:
        """Whether heads draft on a rank of their own, which the target's hidden states travel to."""
        return self.heads is not None and self.heads.devices is not None

    @property
    def drafting_role(self) -> Role | None:
        """The ranks that draft; None where none do."""
        return Role.DRAFT if self.heads_apart else METHODS[self.speculation.method].placement

    @property
    def drafts_ahead(self) -> bool:
        """Whether draft ranks draft for verdicts that are not there yet (see SpeculationSection.drafting_ahead)."""
        return self.drafts_apart and self.speculation.drafting_ahead != "off" and not self.translates_drafts

    @property
    def translates_drafts(self) -> bool:
        """Whether a draft model runs whose tokenizer is not the target's."""
        return self.draft is not None and self.draft.is_translated

    @property
    def plans_ahead(self) -> int:
        """Plans sent before the results of the round before are back: always one where drafts are made ahead.

        A GPU would have nothing to do while the next round is planned; a CPU slot does the work of both itself.
        """
        if self.drafts_ahead:
            return 1
        usual = int(kind_of(self.target.devices[0]) == "cuda")
        return usual if self.scheduler.plans_ahead is None else self.scheduler.plans_ahead

    @property
    def draft_devices(self) -> tuple[str, ...]:
        """Devices of the draft engine, or of heads with a rank of their own; empty without these."""
        if self.draft is not None:
            return self.draft.devices
        return self.heads.devices or () if self.heads is not None else ()


def load_config(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> RuntimeConfig:
    """Read a YAML file, apply `a.b=value` overrides and check everything.

    Args:
        path: the YAML file. Model directories in it that are not absolute are looked for beside the file first, then
            in the working directory, then as names in the Hugging Face cache.
        overrides: `key.path=value` strings; each value is read as YAML.

    Raises:
        ConfigError: one line that names the file and the key.
    """
    return make_config(read_values(path, overrides), base=Path(path).resolve().parent, where=str(path))


def make_config(values: Mapping[str, Any], base: Path | None = None, where: str = "configuration") -> RuntimeConfig:
    """Check a mapping of the YAML's shape and resolve its model directories.

    Args:
        values: what the YAML file would hold.
        base: directory that relative model paths are looked for in, before the working directory.
        where: what to call the source in messages.

    Raises:
        ConfigError: one line that names the source and the key.
    """
    with wrap_errors(where, ConfigError):
        config = _check_values(values, base, where)
        changes: dict[str, object] = {}
        for name, key in (("target", "target"), ("draft", "draft"), ("heads", "draft")):
            section = cast(ModelSection | HeadsSection | None, getattr(config, name))
            if section is not None:
                model = find_model(section.model, base, f"{where}: {key}.model")
                changes[name] = section.model_copy(update={"model": model})
        for key, paths in (("adapters", config.adapters), ("draft_adapters", config.draft_adapters)):
            changes[key] = {name: find_model(path, base, f"{where}: {key}.{name}") for name, path in paths.items()}
        if config.tokenizer is not None:
            changes["tokenizer"] = find_model(config.tokenizer, base, f"{where}: tokenizer")
        if isinstance(config.speculation, SuffixSection) and config.speculation.suffix_corpus is not None:
            corpus = find_file(config.speculation.suffix_corpus, base, f"{where}: speculation.suffix_corpus")
            changes["speculation"] = config.speculation.model_copy(update={"suffix_corpus": corpus})
        if config.draft is not None:
            tokenizer = changes.get("tokenizer") or cast(ModelSection, changes["target"]).model
            draft = cast(DraftSection, changes["draft"])
            changes["draft"] = settle_vocabulary(draft, config.speculation, cast(Path, tokenizer), where)
        return config.model_copy(update=changes)


def _check_values(values: Mapping[str, Any], base: Path | None, where: str) -> RuntimeConfig:
    """The sections, with what engines among the models say in the place of defaults."""
    engines = find_engines(values, base, where)
    if not engines:
        return check_section(RuntimeConfig, values, where)
    filled = take_over(values, engines, where)
    config = check_section(RuntimeConfig, filled, where)
    shortened = shorten_drafts(filled, _drafts_of(config), engines)
    config = config if shortened is None else check_section(RuntimeConfig, shortened, where)
    sections = {"target": config.target, "draft": config.draft}
    check_fit(sections, config.scheduler, _drafts_of(config), engines, where)
    return config


def _drafts_of(config: RuntimeConfig) -> Drafts:
    return Drafts(config.speculation, config.draft_nodes[-1], config.max_paths > 1)


def make_one_device_config(
    target: str | os.PathLike[str] | None,
    draft: str | os.PathLike[str] | None,
    device: str,
    dtype: str,
    quantizations: tuple[str, str],
    speculation: Mapping[str, object],
    adapters: Mapping[str, str | os.PathLike[str]] | None = None,
    generation_config: str = "auto",
) -> RuntimeConfig:
    """The configuration of both models on one device.

    Args:
        target, draft: directories; a draft of None runs the target alone.
        device: such as "cuda:0".
        dtype: of both, as in the YAML file.
        quantizations: of the target and of the draft, as there.
        speculation: keys of the section, without the method.
        adapters: directories by name.
        generation_config: as `server.generation_config` in the YAML file.

    Raises:
        TrtrunError: no target, or something in it is wrong.
    """

    def model(path: object, quantization: str) -> dict[str, Any]:
        rounded = {} if quantization == "none" else {"quantization": quantization}  # an engine says its own
        return {"model": str(path), "devices": [device], "dtype": dtype, **rounded}

    values: dict[str, Any] = {
        "target": model(target if target is not None else "", quantizations[0]),
        "speculation": {"method": "none" if draft is None else "draft_target", **speculation},
        "server": {"generation_config": generation_config},
    }
    if target is None:
        raise ConfigError("LLM needs `target`, the directory of a model, or `config`")
    if draft is not None:
        values["draft"] = model(draft, quantizations[1])
    values["adapters"] = adapters or {}
    if isinstance(adapters, Mapping):  # what is something else is refused below
        values["adapters"] = {name: str(path) for name, path in adapters.items()}
    return make_config(values, base=Path.cwd(), where="LLM")
