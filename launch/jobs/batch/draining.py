"""Bash of every batch script that runs the command so that a signal drains it, and has the job go on with what is left.

It does not know how a batch system signals, or how it takes a job again.
"""

from __future__ import annotations

import signal

from launch.exit_codes import ExitCode, status_of_signal

MOST_IDLE_STARTS = 3
"""A job that finishes nothing in one of its first starts goes on all the same: the warning may have come early. Later
on it does not, because what it does most likely does not fit into the time limit, and it would start for ever."""

_COUNT = """\
# {what} that are done: each is a line.
count_done() {{ cat {counted} 2>/dev/null | wc -l; }}
before=$(count_done)

"""

_RUN = """\
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
"""

_GO_ON = """
if [[ $status == {drained} && $heard == USR1 ]]; then
    if (( $(count_done) > before || {start} <= {most} )); then
{again}
    else
        echo "trtrun: no {what} were finished, nor would many be in the next start: {refusal}; ask for more time"
    fi
fi
"""


def run_draining(finished: tuple[str, str] | None) -> str:
    """Run the command `job` and keep its exit status in `status`.

    The script has a function that a signal calls: it sets `heard` to the signal and `again` to yes, and passes the
    signal on as USR1 to the process `child`, where there is one.

    Args:
        finished: as of `find_finished`.
    """
    before = "" if finished is None else _COUNT.format(counted=finished[0], what=finished[1].capitalize())
    return before + _RUN.format(unheard=status_of_signal(signal.SIGUSR1), drained=int(ExitCode.DRAINED))


def go_on(finished: tuple[str, str] | None, start: str, again: str, refusal: str) -> str:
    """Have the job go on when USR1 has drained it, as long as it gets on. Behind `run_draining`.

    Args:
        finished: as of `find_finished`; None: never.
        start: which start of the job this is, from 1 on, as bash computes it.
        again: lines that have it go on; `{what}` in them is what is counted.
        refusal: what is not done where it does not get on.
    """
    if finished is None:
        return ""
    drained, what = int(ExitCode.DRAINED), finished[1]
    return _GO_ON.format(
        drained=drained, start=start, most=MOST_IDLE_STARTS, again=again.format(what=what), what=what, refusal=refusal
    )
