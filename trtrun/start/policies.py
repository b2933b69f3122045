"""The orchestrator of a configuration: a scheduler within its limits, and what decides how much is drafted.

It knows the configuration and the machine's cores. It does not know how rounds run, or how those decide.
"""

from __future__ import annotations

from trtrun.configuration.config import RuntimeConfig
from trtrun.roles.engine_ranks import EngineRanks
from trtrun.roles.orchestrator import Orchestrator
from trtrun.scheduling.limits import SchedulerLimits
from trtrun.scheduling.scheduler import Scheduler
from trtrun.speculation.ahead.policy import AheadPolicy
from trtrun.speculation.pacing import Pacer, first_trial
from trtrun.start.memory_requirements import guess_steps
from trtrun.threads import outnumber_cores


def make_orchestrator(config: RuntimeConfig, limits: SchedulerLimits, ranks: EngineRanks) -> Orchestrator:
    """The orchestrator of a job, over its engine ranks."""
    pacer = Pacer(config.speculation.draft_len) if config.is_paced else None
    return Orchestrator(Scheduler(limits), ranks, pacer, ahead=_ahead_policy(config))


def sure_draft_lens(config: RuntimeConfig) -> set[int]:
    """What rounds are sure to draft: as much as is configured, and what pacing tries first."""
    most = config.draft_len
    return {most, first_trial(most)} if config.is_paced else {most}


def _ahead_policy(config: RuntimeConfig) -> AheadPolicy | None:
    """What decides how much is drafted ahead; None where nothing is.

    CPU ranks that share cores would slow the verification that they draft beside, so nothing is guessed there unless
    the user has said so.
    """
    if not config.drafts_ahead:
        return None
    assert config.draft is not None
    devices = sorted({*config.draft.devices, *config.target.devices})
    waits = config.speculation.drafting_ahead == "auto" and outnumber_cores(devices, config.threads)
    steps = [] if waits else guess_steps(config)
    return AheadPolicy(steps, config.speculation.draft_len, always_redrafts=config.speculation.use_logits)
