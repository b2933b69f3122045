"""From a configuration to the orchestrator and what it decides by: lengths of drafts, drafts ahead, and what is kept on
disk of rounds that earlier runs have measured.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import torch

from trtrun import __version__
from trtrun.configuration.config import RuntimeConfig
from trtrun.configuration.device_lists import kind_of
from trtrun.configuration.drafting.drafting_methods import METHODS
from trtrun.core.outputs import RankReport
from trtrun.environment import PACING_FOLDER
from trtrun.heads.heads import HEADS_FILES
from trtrun.kernels.cpu.object_cache import cache_folder
from trtrun.lora.lora_config import hash_adapter_files
from trtrun.memory.spaces import guess_steps
from trtrun.rounds.engine_ranks import EngineRanks
from trtrun.rounds.orchestrator import Orchestrator
from trtrun.scheduling.limits import SchedulerLimits
from trtrun.scheduling.scheduler import Scheduler
from trtrun.speculation.acceptance import AcceptanceWatch, DraftRecord
from trtrun.speculation.ahead.policy import AheadPolicy
from trtrun.speculation.match_pacing import MatchPacer
from trtrun.speculation.pacing import Pacer, first_trial
from trtrun.speculation.round_costs import RoundCosts, assume_costs
from trtrun.start.ahead_rounds import count_ahead_rounds, measure_ahead_costs
from trtrun.start.job_spec import JobSpec
from trtrun.start.warm_up_rounds import (
    count_measured_rounds,
    count_practised_rounds,
    measure_round_costs,
    numbers_of_rows,
    practise_rounds,
)
from trtrun.threads import outnumber_cores
from trtrun.weights.model_files import hash_model_files

_MOST_FILES = 256
"""That are kept; those that were written first go first."""

_MOST_BYTES = 1 << 16
_MOST_SETTINGS = 8
"""Placements and limits of a pair whose costs are kept; those that were written first go first."""

_UNRELATED = {"draft_len", "pacing"}
"""Options that do not change how often a draft token is right."""


def pacing_folder() -> Path | None:
    """Where the files lie; None where the environment names no folder for them."""
    named = os.environ.get(PACING_FOLDER)
    if named is not None:
        return Path(named) if os.path.isabs(named) else None
    kernels = cache_folder()
    return None if kernels is None else kernels.parent / "pacing"


_Count = Annotated[float, msgspec.Meta(ge=0)]
_CostTable = dict[
    Annotated[int, msgspec.Meta(ge=1)], dict[Annotated[int, msgspec.Meta(ge=0)], Annotated[float, msgspec.Meta(gt=0)]]
]


class _Drafts(msgspec.Struct, frozen=True):
    """A DraftRecord, as it lies on disk."""

    offered: tuple[_Count, ...]
    accepted: tuple[_Count, ...]
    stake: float
    pays: bool


class _Kept(msgspec.Struct, frozen=True):
    """What a file says: seconds by setting, rows and draft_len, and what was seen of drafts."""

    costs: dict[str, _CostTable] = {}
    drafts: _Drafts | None = None


@dataclass(frozen=True)
class KeptPacing:
    """What is kept for one job.

    Attributes:
        path: of its file; None where nothing can be kept.
        setting: tells placement and limits, which what rounds take depends on, from others.
    """

    path: Path | None
    setting: str

    @classmethod
    def of(cls, config: RuntimeConfig, kinds: Iterable[str]) -> KeptPacing:
        """What belongs to a configuration on devices of `kinds` (`device_kind`), with files as they are here."""
        folder = pacing_folder()
        speculation = config.speculation.model_dump(mode="json")
        options = {name: value for name, value in speculation.items() if name not in _UNRELATED}
        models = [section for section in (config.target, config.draft) if section is not None]
        hashes = [hash_model_files(section.model, section.load_format != "dummy") for section in models]
        if config.heads is not None:
            hashes.append(hash_model_files(config.heads.model, single_files=HEADS_FILES))
        for name, path in (*config.adapters.items(), *config.draft_adapters.items()):
            hashes.append(f"{name}={hash_adapter_files(path)}")
        key = _digest([__version__, torch.__version__, options, hashes, sorted({*kinds} - {""})])
        return cls(None if folder is None else folder / f"{key}.json", describe_setting(config))

    def read(self) -> tuple[RoundCosts | None, DraftRecord | None]:
        """What rounds take, and what was seen of drafts; None for what is not there."""
        kept = self._load()
        return _costs_of(kept.costs.get(self.setting)), _record_of(kept.drafts)

    def write(self, costs: RoundCosts | None, drafts: DraftRecord | None) -> None:
        """Keep what is given, and of the rest what there is. Does nothing where it cannot be kept."""
        if self.path is None:
            return
        kept = self._load()
        of_settings = {setting: table for setting, table in kept.costs.items() if setting != self.setting}
        if costs is not None:
            of_settings[self.setting] = {rows: dict(of_rows) for rows, of_rows in costs.seconds.items()}
        elif self.setting in kept.costs:
            of_settings[self.setting] = kept.costs[self.setting]
        of_drafts = kept.drafts
        if drafts is not None:
            of_drafts = _Drafts(drafts.offered, drafts.accepted, drafts.stake, drafts.pays)
        written = _Kept(costs=dict(list(of_settings.items())[-_MOST_SETTINGS:]), drafts=of_drafts)
        with suppress(OSError):
            _write_whole(self.path, msgspec.json.encode(written))

    def _load(self) -> _Kept:
        """The file, or one that says nothing where it is not whole."""
        try:
            if self.path is None or self.path.stat().st_size > _MOST_BYTES:
                return _Kept()
            return msgspec.json.decode(self.path.read_bytes(), type=_Kept)
        except (OSError, msgspec.DecodeError, RecursionError):
            return _Kept()


def describe_setting(config: RuntimeConfig) -> str:
    """Tells from others what rounds of a pair take, beside the pair itself and its kinds of devices."""
    sections = [section for section in (config.target, config.draft, config.heads) if section is not None]
    models = [section.model_dump(mode="json", exclude={"model", "load_format"}) for section in sections]
    scheduler = config.scheduler
    limits = (scheduler.max_batch_size, config.max_num_tokens, config.plans_ahead, config.draft_len)
    return _digest([models, config.threads, config.kv_cache.dtype, config.cuda_graphs, limits])


def device_kind(device: torch.device) -> str:
    """The make of a device: the GPU's name, or the processor's and what kernels use of it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"{next(names, platform.machine())}, {torch.backends.cpu.get_cpu_capability()}"


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _costs_of(table: _CostTable | None) -> RoundCosts | None:
    """None where they are not whole."""
    seconds = {rows: dict(sorted(of_rows.items())) for rows, of_rows in sorted((table or {}).items())}
    are_whole = bool(seconds) and all(len(of_rows) > 1 and 0 in of_rows for of_rows in seconds.values())
    return RoundCosts(seconds) if are_whole else None


def _record_of(drafts: _Drafts | None) -> DraftRecord | None:
    """None where counts are not whole."""
    if drafts is None or len(drafts.offered) != len(drafts.accepted):
        return None
    if any(kept > count for count, kept in zip(drafts.offered, drafts.accepted, strict=True)):
        return None
    return DraftRecord(drafts.offered, drafts.accepted, drafts.stake, drafts.pays)


def _write_whole(path: Path, content: bytes) -> None:
    """Put a file in place whole: several processes may write it at once, and one of them is last."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    is_new = not path.exists()
    handle, name = tempfile.mkstemp(dir=path.parent, suffix=".new")
    try:
        with open(handle, "wb") as file:
            file.write(content)
        os.replace(name, path)
    except OSError:
        os.unlink(name)
        raise
    if not is_new:
        return
    written = sorted(path.parent.glob("*.json"), key=lambda one: one.stat().st_mtime_ns)
    for old in written[:-_MOST_FILES]:
        old.unlink(missing_ok=True)


_DOUBTFUL = 3
"""How many times as long as a plain round one with a token drafted takes where it is measured again: something else may
have run when it was measured."""

_AT_ONCE_ON_CPUS, _AT_ONCE_ON_GPUS = 12, 200
_MODEL_SHARE, _HEADS_SHARE = 0.15, 0.05
"""Positions that take as long as reading the weights once, and what a drafted token takes of that: about, until rounds
have told."""


def make_orchestrator(
    spec: JobSpec, limits: SchedulerLimits, ranks: EngineRanks, reports: Sequence[RankReport] = ()
) -> Orchestrator:
    """The orchestrator of a job, over its engine ranks, which are up and have sent `reports`. Where draft_len follows
    from what rounds take, some are run here, unless an earlier run has left what it found; and others for first uses of
    something, unless these are left to requests.

    Raises:
        RankFailedError: a rank failed.
    """
    config = spec.config
    if _uses_gpus(config) and not spec.leaves_first_uses:
        practise_rounds(ranks, limits)
    kept = KeptPacing.of(config, [report.device_kind for report in reports]) if config.is_paced else None
    scheduler = Scheduler(limits)
    pacer = _make_pacer(config, scheduler, ranks, kept) if kept is not None else None
    has_drafts = config.is_speculative and config.speculation.forced_acceptance is None
    to_check = METHODS[config.speculation.method].to_check
    watch = AcceptanceWatch(config.draft_len, to_check) if has_drafts else None
    ahead = _ahead_policy(config, limits, ranks)
    return Orchestrator(scheduler, ranks, pacer, ahead=ahead, watch=watch, keep=kept.write if kept else None)


def count_first_rounds(config: RuntimeConfig, limits: SchedulerLimits) -> tuple[int, int, int]:
    """Rounds that `make_orchestrator` runs: those of each kind, for their first uses; those that are measured, of which
    there may be fewer; and those of drafting ahead and behind, of which there may be fewer, too."""
    practised = count_practised_rounds(limits) if _uses_gpus(config) else 0
    paced = count_measured_rounds(limits) if config.is_paced and _measures_rounds(config) else 0
    return practised, paced, count_ahead_rounds(limits, _compared_steps(config))


def sure_draft_lens(config: RuntimeConfig) -> set[int]:
    """What rounds are sure to draft: as much as is configured, and what pacing tries first."""
    most = config.draft_len
    return {most, first_trial(most)} if config.is_paced else {most}


def _make_pacer(config: RuntimeConfig, scheduler: Scheduler, ranks: EngineRanks, kept: KeptPacing) -> Pacer:
    """Begins with what earlier runs have left; what rounds cost is measured where that does not say it."""
    costs, seen = kept.read()
    limits = scheduler.limits
    if not _has_costs(config):
        return Pacer(config.speculation.draft_len, None, seen)
    assumed = assumed_costs(config, limits)
    if _measures_rounds(config) and (costs is None or costs.estimate(1, 1) > _DOUBTFUL * costs.estimate(1, 0)):
        costs = measure_round_costs(ranks, limits, assumed)
        kept.write(costs, None)
    costs = assumed if costs is None else costs.continued(assumed)
    if limits.match_rule is not None:
        others = limits.match_rule.has_others
        return MatchPacer(config.speculation.draft_len, scheduler.matches, costs, seen, has_other_texts=others)
    return Pacer(config.speculation.draft_len, costs, seen)


def _has_costs(config: RuntimeConfig) -> bool:
    """Where drafts are made ahead a round that foresaw nothing says little of those that did."""
    return not (config.drafts_ahead and _guessed_steps(config))


def _measures_rounds(config: RuntimeConfig) -> bool:
    """Whether rounds are measured where nothing was kept: what texts say costs nothing but its verification."""
    method = METHODS[config.speculation.method]
    return _has_costs(config) and (method.needs_draft_model or method.needs_heads)


def assumed_costs(config: RuntimeConfig, limits: SchedulerLimits) -> RoundCosts:
    """What rounds may cost, where it was not measured."""
    method = METHODS[config.speculation.method]
    share = _MODEL_SHARE if method.needs_draft_model else _HEADS_SHARE if method.needs_heads else 0.0
    at_once = _AT_ONCE_ON_GPUS if _uses_gpus(config) else _AT_ONCE_ON_CPUS
    rows = numbers_of_rows(limits.max_batch_size)
    return assume_costs(rows, config.speculation.draft_len, limits.num_verified, at_once, share)


def _uses_gpus(config: RuntimeConfig) -> bool:
    return any(kind_of(device) == "cuda" for device in (*config.target.devices, *config.draft_devices))


def _ahead_policy(config: RuntimeConfig, limits: SchedulerLimits, ranks: EngineRanks) -> AheadPolicy | None:
    """What decides how much is drafted ahead; None where nothing is. Where it is to choose between both ways, some
    rounds of both are run here."""
    if not config.drafts_ahead:
        return None
    section = config.speculation
    return AheadPolicy(
        _guessed_steps(config),
        section.draft_len,
        always_redrafts=section.use_logits,
        always_guesses=section.drafting_ahead == "on",
        costs=measure_ahead_costs(ranks, limits, _compared_steps(config), assumed_costs(config, limits)),
    )


def _compared_steps(config: RuntimeConfig) -> list[int]:
    """Steps that the start compares with drafting behind verdicts: a head's wait for their first texts."""
    is_compared = config.drafts_ahead and config.speculation.drafting_ahead == "auto"
    return _guessed_steps(config) if is_compared and METHODS[config.speculation.method].needs_draft_model else []


def _guessed_steps(config: RuntimeConfig) -> list[int]:
    """Steps that may be drafted ahead.

    CPU ranks that share cores would slow the verification that they draft beside, so nothing is guessed there unless
    the user has said so.
    """
    devices = sorted({*config.draft_devices, *config.target.devices})
    waits = config.speculation.drafting_ahead == "auto" and outnumber_cores(devices, config.threads)
    return [] if waits else guess_steps(config)
