"""The orchestrator of a configuration: a scheduler within its limits, and what decides how much is drafted.

It knows the configuration and the machine's cores. It does not know how rounds run, or how those decide.
"""

from __future__ import annotations

from collections.abc import Sequence

from trtrun.configuration.config import RuntimeConfig
from trtrun.configuration.device_lists import kind_of
from trtrun.configuration.drafting.drafting_methods import METHODS
from trtrun.core.outputs import RankReport
from trtrun.memory.spaces import guess_steps
from trtrun.rounds.engine_ranks import EngineRanks
from trtrun.rounds.orchestrator import Orchestrator
from trtrun.scheduling.limits import SchedulerLimits
from trtrun.scheduling.scheduler import Scheduler
from trtrun.speculation.acceptance import AcceptanceWatch
from trtrun.speculation.ahead.policy import AheadPolicy
from trtrun.speculation.match_pacing import MatchPacer
from trtrun.speculation.pacing import Pacer, first_trial
from trtrun.speculation.round_costs import RoundCosts, assume_costs
from trtrun.start.kept_pacing import KeptPacing
from trtrun.start.rehearsed_rounds import (
    count_measured_rounds,
    count_practised_rounds,
    measure_round_costs,
    numbers_of_rows,
    practise_rounds,
)
from trtrun.threads import outnumber_cores

_DOUBTFUL = 3
"""How many times as long as a plain round one with a token drafted takes where it is measured again: something else may
have run when it was measured."""

_AT_ONCE_ON_CPUS, _AT_ONCE_ON_GPUS = 12, 200
_MODEL_SHARE, _HEADS_SHARE = 0.15, 0.05
"""Positions that take as long as reading the weights once, and what a drafted token takes of that: about, until rounds
have told."""


def make_orchestrator(
    config: RuntimeConfig, limits: SchedulerLimits, ranks: EngineRanks, reports: Sequence[RankReport] = ()
) -> Orchestrator:
    """The orchestrator of a job, over its engine ranks, which are up and have sent `reports`. Where draft_len follows
    from what rounds take, some are run here, unless an earlier run has left what it found.

    Raises:
        RankFailedError: a rank failed.
    """
    if _uses_gpus(config):
        practise_rounds(ranks, limits)
    kept = KeptPacing.of(config, [report.device_kind for report in reports]) if config.is_paced else None
    scheduler = Scheduler(limits)
    pacer = _make_pacer(config, scheduler, ranks, kept) if kept is not None else None
    has_drafts = config.is_speculative and config.speculation.forced_acceptance is None
    to_check = METHODS[config.speculation.method].to_check
    watch = AcceptanceWatch(config.draft_len, to_check) if has_drafts else None
    ahead = _ahead_policy(config)
    return Orchestrator(scheduler, ranks, pacer, ahead=ahead, watch=watch, keep=kept.write if kept else None)


def count_first_rounds(config: RuntimeConfig, limits: SchedulerLimits) -> tuple[int, int]:
    """Rounds that `make_orchestrator` runs: those of each kind, for their first uses, and those that are measured, of
    which there may be fewer."""
    practised = count_practised_rounds(limits) if _uses_gpus(config) else 0
    return practised, count_measured_rounds(limits) if config.is_paced and _measures_rounds(config) else 0


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


def _ahead_policy(config: RuntimeConfig) -> AheadPolicy | None:
    """What decides how much is drafted ahead; None where nothing is."""
    if not config.drafts_ahead:
        return None
    section = config.speculation
    return AheadPolicy(
        _guessed_steps(config),
        section.draft_len,
        always_redrafts=section.use_logits,
        always_guesses=section.drafting_ahead == "on",
    )


def _guessed_steps(config: RuntimeConfig) -> list[int]:
    """Steps that may be drafted ahead.

    CPU ranks that share cores would slow the verification that they draft beside, so nothing is guessed there unless
    the user has said so.
    """
    devices = sorted({*config.draft_devices, *config.target.devices})
    waits = config.speculation.drafting_ahead == "auto" and outnumber_cores(devices, config.threads)
    return [] if waits else guess_steps(config)
