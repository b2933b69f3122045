"""Parts of a batch script of PBS: the bash that warns the job before its limit, runs the command, passes signals on and
keeps its status.

PBS starts the script under a login shell, and sends signals to every process of the two; the ranks of mpirun are
elsewhere. So SIGTERM, of qdel and at the limit, needs no help to reach the command.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator

from launch.exit_codes import ExitCode, status_of_signal
from launch.jobs.slurm.script_parts import MOST_IDLE_STARTS

HEARING = """\
# URG comes from `trtrun cancel`, USR1 from the timer below; TERM from PBS, which sends it to the command, too.
child='' heard='' again=yes
hear() {
    [[ $heard && $1 == USR1 ]] || heard=$1
    again=yes
    [[ -z $child || $1 == TERM ]] || kill -s USR1 "$child"
}
for name in URG USR1 TERM; do trap "hear $name" "$name"; done"""


def timer(seconds: int | None, signal_seconds: int) -> Iterator[str]:
    """Lines that warn the job before its limit, which PBS does not do.

    Args:
        seconds: of the whole job; None where the limit is not known.
        signal_seconds: how long before.
    """
    if seconds is None:
        yield "timer='' # launch.pbs.walltime would warn the job before its end"
        return
    yield f"# {signal_seconds} s before its walltime is over the job is warned, and drains."
    yield "("
    yield """    trap 'kill "$!" 2>/dev/null' TERM"""
    yield f'    sleep {seconds - signal_seconds} & wait "$!" && kill -s USR1 "$$"'
    yield ") &"
    yield "timer=$!"


_END = """\
echo "trtrun: job $number ends with exit status $status"
exit "$status"\
"""

_PLAIN_BODY = """\
"${job[@]}" &
child=$!
trap 'kill -s TERM "$child"' URG # from `trtrun cancel`
trap : TERM # from PBS, which sends it to the command, too
wait "$child" || wait "$child"
status=$?
"""

_DRAINING_BODY = """\
# Drained, the command begins nothing more, and where something is left its status is {drained}.
{count_before}\
"${{job[@]}}" &
child=$!
[[ -z $heard ]] || kill -s USR1 "$child"
while [[ $again ]]; do # a signal ends `wait` before the command has ended
    again=''
    wait "$child"
    status=$?
done
child=''
[[ -z $timer ]] || kill "$timer" 2>/dev/null
[[ $status != {unheard} ]] || status={drained} # the signal came before the command could hear it
{requeue}\
"""

_COUNT_BEFORE = """\
script=$(<"${{BASH_SOURCE[0]}}") # to submit it again
# {what} that are done: each is a line.
count_done() {{ cat {counted} 2>/dev/null | wc -l; }}
before=$(count_done)
"""

_REQUEUE = """
if [[ $status == {drained} && $heard == USR1 ]]; then
    if (( $(count_done) > before || ${{TRTRUN_START:-1}} <= {most_idle_starts} )); then
        next=$(PATH=$PATH:$PBS_O_PATH qsub -v "TRTRUN_JOB,TRTRUN_START=$((${{TRTRUN_START:-1}} + 1))" <<<"$script") &&
            echo "trtrun: job ${{next%%.*}} goes on, with the {what} that are left" ||
            echo "trtrun: qsub did not take the next job, for the {what} that are left: submit it"
    else
        echo "trtrun: no {what} were finished, nor would many be in the next start: not submitted; ask for more time"
    fi
fi
"""


def plain_body() -> str:
    """Run the command `job`; a signal ends it."""
    return _PLAIN_BODY + _END


def draining_body(counted: str | None = None, what: str = "rows") -> str:
    """Run the command `job` so that a signal drains it.

    Args:
        counted: submit the job again when the timer has drained it, as long as it gets on: by the lines of this file,
            quoted for bash. None: never.
        what: its lines stand for.
    """
    drained, count_before, requeue = int(ExitCode.DRAINED), "", ""
    if counted is not None:
        count_before = _COUNT_BEFORE.format(counted=counted, what=what.capitalize())
        requeue = _REQUEUE.format(drained=drained, what=what, most_idle_starts=MOST_IDLE_STARTS)
    unheard = status_of_signal(signal.SIGUSR1)
    body = _DRAINING_BODY.format(drained=drained, unheard=unheard, count_before=count_before, requeue=requeue)
    return body + _END
