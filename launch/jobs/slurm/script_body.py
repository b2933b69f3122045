"""The part of a batch script that runs the command: signals reach it, its status is kept, and the job may go on later.

It is bash, and knows trtrun's exit statuses. It does not know which command runs (slurm.py).
"""

from __future__ import annotations

import signal

from launch.exit_codes import ExitCode, status_of_signal

MOST_IDLE_STARTS = 3
"""A job that finishes nothing in one of its first starts is requeued all the same: the warning may have come early.
Later on it is not, because what it does most likely does not fit into the time limit, and it would start for ever."""

PLAIN_BODY = """\
# A signal ends the command. It also ends the first `wait`, and the second one takes the command's status.
"${job[@]}" &
child=$!
trap 'kill -s TERM "$child"' TERM
wait "$child" || wait "$child"\
"""

_DRAINING_BODY = """\
# USR1 is Slurm's warning before the time limit, TERM comes from `trtrun cancel`. Either makes the command drain: it
# begins nothing more, what is in flight has {drain_seconds:g} s, and where something is left the status is {drained}.
child='' heard='' again=yes
hear() {{
    heard=$1 again=yes
    [[ -z $child ]] || kill -s USR1 "$child"
}}
trap 'hear USR1' USR1
trap 'hear TERM' TERM
{count_before}
"${{job[@]}}" &
child=$!
[[ -z $heard ]] || kill -s USR1 "$child"
while [[ $again ]]; do # a signal ends `wait` before the command has ended
    again=''
    wait "$child"
    status=$?
done
child=''
[[ $status != {unheard} ]] || status={drained} # the signal came before the command could hear it: nothing had begun
{requeue}\
exit "$status"\
"""

_COUNT_BEFORE = """
# {what} that are done: each is a line.
count_done() {{ cat {counted} 2>/dev/null | wc -l; }}
before=$(count_done)
"""

_REQUEUE = """
if [[ $status == {drained} && $heard == USR1 ]]; then
    if (( $(count_done) > before || ${{SLURM_RESTART_COUNT:-0}} < {most_idle_starts} )); then
        echo "trtrun: the job goes back into the queue, for the {what} that are left"
        scontrol requeue "$SLURM_JOB_ID" # Slurm ends this script
    else
        echo "trtrun: no {what} were finished, nor would many be in the next start: not requeued; ask for more time"
    fi
fi
"""


def draining_body(drain_seconds: float, counted: str | None = None, what: str = "rows") -> str:
    """Run the command `job` so that a signal drains it.

    Args:
        drain_seconds: that rows in flight have.
        counted: put the job back into the queue when Slurm's warning has drained it, as long as it gets on: by the
            lines of this file, quoted for bash. None: never.
        what: its lines stand for.
    """
    drained, count_before, requeue = int(ExitCode.DRAINED), "", ""
    if counted is not None:
        count_before = _COUNT_BEFORE.format(counted=counted, what=what.capitalize())
        requeue = _REQUEUE.format(drained=drained, what=what, most_idle_starts=MOST_IDLE_STARTS)
    return _DRAINING_BODY.format(
        drain_seconds=drain_seconds,
        drained=drained,
        unheard=status_of_signal(signal.SIGUSR1),
        count_before=count_before,
        requeue=requeue,
    )
