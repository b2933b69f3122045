"""Parts that every batch script has: the ranks' places, the words of the command, and the bash that runs it so that a
signal drains it, and has the job go on with what is left.

It does not know how a batch system signals, or how it takes a job again.
"""

from __future__ import annotations

import shlex
import signal
from collections.abc import Iterable, Iterator

from launch.exit_codes import ExitCode, status_of_signal
from launch.jobs.batch.job import BatchJob, Spelled, Word, part_output

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


def describe_ranks(job: BatchJob) -> Iterator[str]:
    """Comments that tell each rank's place."""
    topology, resources = job.resources.topology, job.resources
    made_up = [host for host in resources.hosts if host not in resources.named]
    which = f" ({made_up[0]} is the allocation's first node)" if made_up and not resources.named else ""
    yield f"# Ranks{which}:"
    for rank in range(topology.world_size):
        yield f"#   {topology.describe(rank)}"


def wrap_words(words: Iterable[str | Spelled], variable: str) -> Iterator[str]:
    """Quoted words, with a new line before each long option of trtrun's command.

    Args:
        words: of the whole command.
        variable: that holds the number of an array's task.
    """
    line: list[str] = []
    is_command = False
    for word in words:
        if is_command and isinstance(word, str) and word.startswith("--"):
            yield " ".join(line)
            line = []
        is_command = is_command or word == "launch.cli"
        line.append(shlex.quote(word) if isinstance(word, str) else word.spell(variable))
    yield " ".join(line)


def find_finished(job: BatchJob, variable: str) -> tuple[str, str] | None:
    """The file that has a line for each row or step that is done, quoted for bash, and what a line stands for.

    Args:
        job: that may go on by itself.
        variable: that holds the number of an array's task.

    Returns:
        Both; None for a job that does not.
    """
    if not (job.goes_on and job.resources.section.requeue):
        return None
    if job.output is None:
        return shlex.quote(str(job.steps)), "steps"
    if job.array is None:
        return shlex.quote(f"{job.output}.partial"), "rows"
    word = part_output(job.output, job.array.count)
    return Word(word.before, f"{word.after}.partial").spell(variable), "rows"


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
