"""Serve jobs that follow each other: each submits the next one, which begins before the time limit of the one before.

It writes bash. It does not know how the servers in the jobs hand over to each other (`launch.serve.handover`): all that
they are told is the name's file.
"""

from __future__ import annotations

from collections.abc import Iterator

from launch.exit_codes import ExitCode
from launch.jobs.batch.job import Chain
from launch.jobs.slurm.section import SlurmSection
from trtrun.errors import ConfigError

FOLLOWS = "trtrun: follows"
"""Begins the comment of a job that another one has submitted, whose number is behind it."""

_BEGIN = """\
# Job $place of {count}. The next one begins {lead} s before this one's time limit; it gets nothing of this one's
# allocation but where Slurm's configuration is.
place=${{1:-1}} next=''
if (( place < {count} )); then
    comment="{follows} $SLURM_JOB_ID"
    next=$(
        unset -v $(compgen -e SLURM_ | grep -vx SLURM_CONF)
        exec sbatch --parsable --begin=now+{seconds} --comment="$comment" "$0" $((place + 1))
    )
    next=${{next%%;*}}
    if [[ $next ]]; then
        echo "trtrun: job $next follows, {lead} s before the time limit"
    else
        echo 'trtrun: WARNING: the next job cannot be submitted from this node: none follows'
    fi
fi\
"""

END = f"""
if [[ $next && $heard != USR1 ]]; then
    if [[ $heard == TERM || $status == {int(ExitCode.REFUSED)} ]]; then
        scancel --state=PENDING "$next"
    else # ended before its time
        scontrol update JobId="$next" StartTime=now 2>/dev/null # refused where it runs already
    fi
fi
"""
"""Bash behind the command: `heard` is the signal that has drained it, `status` its exit status."""


def submit_next(chain: Chain, slurm: SlurmSection, limit: float | None) -> Iterator[str]:
    """Lines of bash that submit the next job.

    Args:
        chain: of the job.
        slurm: its settings.
        limit: seconds of `slurm.time`; None where it says none.

    Raises:
        ConfigError: the next job would not begin between the start and the end of this one.
    """
    lead = slurm.chain_lead_seconds
    if limit is None:
        raise ConfigError("launch.slurm.time: a chain needs to know when a job ends: give --time")
    if lead >= limit:
        raise ConfigError(
            f"launch.slurm.chain_lead_seconds: the next job is to begin {lead} s before a time limit of {slurm.time}: "
            "ask for more time, or for less before the limit"
        )
    if lead <= slurm.signal_seconds:
        raise ConfigError(
            f"launch.slurm.chain_lead_seconds: {lead} s before the time limit is too late for the next job, as this "
            f"one ends launch.slurm.signal_seconds ({slurm.signal_seconds}) before it"
        )
    yield _BEGIN.format(count=chain.count, lead=lead, follows=FOLLOWS, seconds=int(limit - lead))
