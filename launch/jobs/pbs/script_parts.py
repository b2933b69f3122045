"""Parts of a batch script of PBS: the bash that warns the job before its limit, runs the command, passes signals on and
keeps its status.

PBS starts the script under a login shell, and sends signals to every process of the two; the ranks of mpirun are
elsewhere. So SIGTERM, of qdel and at the limit, needs no help to reach the command.
"""

from __future__ import annotations

from collections.abc import Iterator

from launch.exit_codes import ExitCode
from launch.jobs.batch.script_parts import go_on, run_draining

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

_DRAINED = "# Drained, the command begins nothing more, and where something is left its status is {drained}.\n"
_KEEP_SCRIPT = """script=$(<"${BASH_SOURCE[0]}") # to submit it again\n"""
_END_TIMER = """[[ -z $timer ]] || kill "$timer" 2>/dev/null\n"""

_SUBMIT_AGAIN = """\
        next=$(PATH=$PATH:$PBS_O_PATH qsub -v "TRTRUN_JOB,TRTRUN_START=$((${{TRTRUN_START:-1}} + 1))" <<<"$script") &&
            echo "trtrun: job ${{next%%.*}} goes on, with the {what} that are left" ||
            echo "trtrun: qsub did not take the next job, for the {what} that are left: submit it"\
"""


def plain_body() -> str:
    """Run the command `job`; a signal ends it."""
    return _PLAIN_BODY + _END


def draining_body(finished: tuple[str, str] | None) -> str:
    """Run the command `job` so that a signal drains it.

    Args:
        finished: as of `run_draining`.
    """
    before = _DRAINED.format(drained=int(ExitCode.DRAINED)) + ("" if finished is None else _KEEP_SCRIPT)
    behind = go_on(finished, "${TRTRUN_START:-1}", _SUBMIT_AGAIN, "not submitted")
    return before + run_draining(finished) + _END_TIMER + behind + _END
