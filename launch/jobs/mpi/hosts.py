"""The hosts of a job, tried before ranks are started on them: does ssh reach each, and is the same trtrun there?

mpirun says little when a host is down, and waits long. So every host that it is going to reach by ssh is asked first,
all at once and within a time limit. It does not know mpirun's command, nor what ranks do; what each rank finds on its
host is checked later, by the ranks.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from launch.jobs.mpi.flavours import Flavour
from launch.jobs.mpi.host_folders import remove_stale_folders
from launch.jobs.mpi.library import find_library
from launch.jobs.placement.allocation import in_allocation, in_slurm, is_local
from parallel.topology import Topology
from trtrun import __version__
from trtrun.configuration.process_sections import LaunchSection
from trtrun.errors import PlacementError

CONNECT_SECONDS = 8
"""For ssh to reach a host and agree with it on keys."""

ANSWER_SECONDS = 15.0
"""For the whole answer of a host; all are asked at once."""

_MOST_AT_ONCE = 256
_ANSWER = "trtrun answers: "
_NO_PROGRAM = 127
_SSH_FAILED = 255

# Runs on the other host, read from stdin: environment and paths would be seen by everybody on a command line.
_QUESTION = """
import json, os, sys
given = json.loads({given!r})
os.environ.update(given["environment"])
sys.path.insert(0, given["root"])
try:
    from launch.jobs.mpi.hosts import describe_host
    answer = describe_host(os.environ)
except Exception as error:
    answer = {{"error": f"{{type(error).__name__}}: {{error}}"}}
print({mark!r} + json.dumps(answer))
"""


def is_placed(topology: Topology) -> bool:
    """Whether mpirun has to be told each rank's host. Inside an allocation it would spread ranks over all of it."""
    return topology.hosts != ("",) and (in_allocation() or any(True for _ in remote_hosts(topology)))


def remote_hosts(topology: Topology) -> Iterator[str]:
    """Hosts of a job that are not this one."""
    return (host for host in topology.hosts if not is_local(host))


def uses_ssh(flavour: Flavour, section: LaunchSection, environment: Mapping[str, str]) -> bool:
    """Whether mpirun reaches other hosts by ssh: not inside a Slurm allocation, nor where the user has it otherwise."""
    given = [*environment, *section.mpirun_arguments]
    return not in_slurm(environment) and not any(agent in given for agent in flavour.agents)


def may_be_elsewhere(flavour: Flavour, section: LaunchSection, environment: Mapping[str, str]) -> bool:
    """Whether mpirun is told hosts by somebody else than the configuration's devices."""
    given = {word.lstrip("-").partition("=")[0] for word in section.mpirun_arguments}
    return any(name in environment or name in given for name in flavour.hosts)


def describe_host(environment: Mapping[str, str]) -> dict[str, str]:
    """What must be the same on all hosts before mpirun can start ranks there; called on each, just before that.

    Args:
        environment: of the ranks.

    Raises:
        PlacementError: no MPI library is there.
    """
    remove_stale_folders(environment)
    return {"trtrun": __version__, "MPI library": find_library(environment).version}


def check_hosts(hosts: Sequence[str], ssh_arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """Ask every host, by ssh, what it has. Takes as long as the slowest, and never longer than ANSWER_SECONDS.

    Args:
        hosts: that mpirun will reach by ssh.
        ssh_arguments: what ssh needs for them.
        environment: what ranks of other hosts will get from mpirun.

    Raises:
        PlacementError: names each host that is down, refuses, or lacks this trtrun, and says why.
    """
    if not hosts:
        return
    ssh = shutil.which("ssh")
    if ssh is None:
        raise PlacementError(f"ranks on {', '.join(hosts)} are started by ssh, which is not installed here")
    own = describe_host({**os.environ, **environment})
    with ThreadPoolExecutor(min(len(hosts), _MOST_AT_ONCE)) as pool:
        found = pool.map(lambda host: _ask(host, [ssh, *ssh_arguments], environment), hosts)
    problems = [problem for host, answer in zip(hosts, found, strict=True) for problem in _judge(host, answer, own)]
    if problems:
        raise PlacementError("; ".join(problems))


def _ask(host: str, ssh: Sequence[str], environment: Mapping[str, str]) -> dict[str, Any] | str:
    """What a host answers, or why it does not."""
    command = [ssh[0], "-oBatchMode=yes", f"-oConnectTimeout={CONNECT_SECONDS}", *ssh[1:]]
    given = {"environment": dict(environment), "root": str(Path(__file__).resolve().parents[3])}
    question = _QUESTION.format(given=json.dumps(given), mark=_ANSWER)
    try:
        asked = subprocess.run(
            [*command, host, f"{shlex.quote(sys.executable)} -"],
            input=question,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=ANSWER_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return f"host {host} does not answer within {ANSWER_SECONDS:g} s"
    for line in asked.stdout.splitlines():
        if line.startswith(_ANSWER):
            return dict(json.loads(line.removeprefix(_ANSWER)))
    said = [line.strip() for line in asked.stderr.splitlines() if line.strip() and not line.startswith("Warning: ")]
    reason = "; ".join(said[-2:]) or f"exit status {asked.returncode}"
    if asked.returncode == _SSH_FAILED:
        return f"host {host} is not reached by ssh ({reason}); try: {shlex.join(['ssh', *ssh[1:], host])}"
    if asked.returncode == _NO_PROGRAM:
        return f"host {host} has no {sys.executable}: install trtrun there in the same place as here"
    return f"host {host} cannot run {sys.executable} ({reason})"


def _judge(host: str, answer: dict[str, Any] | str, own: Mapping[str, str]) -> Iterator[str]:
    """What keeps a host from taking part."""
    if isinstance(answer, str):
        yield answer
        return
    if "error" in answer:
        yield f"host {host} has no trtrun that works for {sys.executable} ({answer['error']}): install it as here"
        return
    for name in ("trtrun", "MPI library"):
        if answer[name] != own[name]:
            yield f"host {host} has {name} {answer[name]}, and this one {own[name]}: install one version on all hosts"
