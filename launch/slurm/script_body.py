"""The part of a batch script that runs the command: signals reach it, its status is kept, and the job may go on later.

It is bash, and knows trtrun's exit statuses. It does not know which command runs (slurm.py).
"""

from __future__ import annotations

import signal

from launch.exit_codes import ExitCode, status_of_signal

MOST_IDLE_STARTS = 3
"""A job that finishes no row in one of its first starts is requeued all the same: the warning may have come early.
Later on it is not, because its rows most likely do not fit into the time limit, and it would start for ever."""

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
# Rows that are finished but not yet in the output file.
count_rows() {{ cat {partial} 2>/dev/null | wc -l; }}
before=$(count_rows)
"""

_REQUEUE = """
if [[ $status == {drained} && $heard == USR1 ]]; then
    if (( $(count_rows) > before || ${{SLURM_RESTART_COUNT:-0}} < {most_idle_starts} )); then
        echo "trtrun: the job goes back into the queue, for the rows that are left"
        scontrol requeue "$SLURM_JOB_ID" # Slurm ends this script
    else
        echo "trtrun: no row was finished, and the next start would hardly get further: not requeued; ask for more time"
    fi
fi
"""


def draining_body(partial: str, drain_seconds: float, requeues: bool) -> str:
    """Run the command `job` so that a signal drains it.

    Args:
        partial: the working file of the command's output, quoted for bash.
        drain_seconds: that rows in flight have.
        requeues: put the job back into the queue when Slurm's warning has drained it.
    """
    drained = int(ExitCode.DRAINED)
    return _DRAINING_BODY.format(
        drain_seconds=drain_seconds,
        drained=drained,
        unheard=status_of_signal(signal.SIGUSR1),
        count_before=_COUNT_BEFORE.format(partial=partial) if requeues else "",
        requeue=_REQUEUE.format(drained=drained, most_idle_starts=MOST_IDLE_STARTS) if requeues else "",
    )
