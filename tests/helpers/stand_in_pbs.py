#!/usr/bin/env python3
"""A PBS of one node for the tests: qsub, qstat, qdel and qsig, as far as trtrun uses them, and what runs the jobs.

It does as OpenPBS 23.06 was seen to do. A job runs in a session of its own, in the home directory and with an
environment of PBS's, under a login shell that reads the script's name; signals reach every process of that session, and
the job ends with its shell. There is no job history unless the file `history` is there, as OpenPBS is delivered.

Called by one of the programs' names it is that program; `install` puts all of them into a folder. In that folder lie
jobs, too: each is a file of attributes, which a process for each job keeps.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

PROGRAMS = ("qsub", "qstat", "qdel", "qsig", "run-job")
KILL_DELAY_SECONDS = 2.0
HOST = socket.gethostname()
VALUED = "-N -q -A -P -j -k -o -l -J -r -v"


def install(folder: Path) -> dict[str, str]:
    """Put the programs into a new folder; returns the environment of a login node."""
    folder.mkdir()
    for name in PROGRAMS:
        program = folder / name
        program.write_text(f"#!{sys.executable} -S\n" + Path(__file__).read_text(encoding="utf-8"), encoding="utf-8")
        program.chmod(0o755)
    paths = [path for path in os.environ["PATH"].split(os.pathsep) if not (Path(path) / "squeue").exists()]
    return {**os.environ, "PATH": os.pathsep.join([str(folder), *paths])}


def main() -> int:
    """Be the program whose name this file has."""
    folder, name, words = Path(sys.argv[0]).parent, Path(sys.argv[0]).name, sys.argv[1:]
    if "--version" in words:
        print("pbs_version = 23.06.06")
        return 0
    actions = {"qsub": submit, "qstat": show, "qdel": end, "qsig": send, "run-job": run}
    return actions[name](folder, words)


def fail(said: str) -> int:
    """Say why a program fails."""
    print(said, file=sys.stderr)
    return 153


def submit(folder: Path, words: list[str]) -> int:
    """qsub: the script is on standard input."""
    script = sys.stdin.read()
    directives = [line.removeprefix("#PBS ") for line in script.splitlines() if line.startswith("#PBS ")]
    options: dict[str, list[str]] = {}
    for given in [*(shlex.split(line) for line in directives), words]:
        if given and given[0] not in VALUED.split():
            return fail(f"qsub: invalid option {given[0]}\nusage: qsub …")
        # Those of the command line win; only -l may stand several times.
        for option, value in zip(given[::2], given[1::2], strict=True):
            options[option] = [*options.get(option, []), value] if option == "-l" else [value]
    if options.get("-q", ["workq"]) != ["workq"]:
        return fail("qsub: Unknown queue")
    number = len(list(folder.glob("*.script")))
    (folder / f"{number}.script").write_text(script, encoding="utf-8")
    name = options.get("-N", ["STDIN"])[0]
    variables = [(item if "=" in item else f"{item}={os.environ[item]}") for item in options["-v"][0].split(",")]
    job = {
        "Job_Name": name, "job_state": "R", "exec_host": f"{HOST}/0*3", "run_count": "1", "substate": "42",
        "Output_Path": f"n1:{options.get('-o', [f'{os.getcwd()}/{name}.o{number}'])[0]}",
        "Resource_List.nodect": "1", "Variable_List": ",".join(["PBS_O_HOST=n1", *variables]),
        "comment": f"Job run at Sun Nov 29 at 18:04 on ({HOST}:ncpus=3)",
    }  # fmt: skip
    write(folder, f"{number}.n1", job)
    own = {
        "PBS_O_WORKDIR": os.getcwd(),
        "PBS_O_PATH": os.environ["PATH"],
        **dict(item.split("=", 1) for item in variables),
    }
    subprocess.Popen(
        [folder / "run-job", str(number), json.dumps(own)], start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    print(f"{number}.n1")
    return 0


def run(folder: Path, words: list[str]) -> int:
    """Run a job to its end."""
    number, own = words[0], json.loads(words[1])
    (folder / f"{number}.nodes").write_text(f"{HOST}\n" * 3, encoding="utf-8")
    environment = {
        "HOME": str(folder), "PATH": f"{folder / 'bin'}:/usr/bin:/bin", "PBS_JOBID": f"{number}.n1",
        "PBS_NODEFILE": str(folder / f"{number}.nodes"), "PBS_ENVIRONMENT": "PBS_BATCH", "NCPUS": "3",
        "OMP_NUM_THREADS": "3", **own,
    }  # fmt: skip
    script = folder / f"{number}.run"
    script.write_bytes((folder / f"{number}.script").read_bytes())
    script.chmod(0o700)
    job = read(folder, f"{number}.n1")
    with open(job["Output_Path"].partition(":")[2], "ab") as log:
        shell = subprocess.Popen(
            ["-bash"], executable="/bin/bash", cwd=folder, env=environment, start_new_session=True,
            stdin=subprocess.PIPE, stdout=log, stderr=log,
        )  # fmt: skip
        assert shell.stdin is not None
        write(folder, f"{number}.n1", {**job, "session_id": str(shell.pid)})
        shell.stdin.write(f"{script}\n".encode())
        shell.stdin.close()
        status = shell.wait()
    for _ in range(round(KILL_DELAY_SECONDS * 20)):  # of a shell that a signal has ended; its script may go on
        if status >= 0 or not processes_of(str(shell.pid)):
            break
        time.sleep(0.05)
    signal_session(str(shell.pid), signal.SIGKILL)
    ended = read(folder, f"{number}.n1")
    substate = ended["substate"] if ended["substate"] == "91" else "92" if status == 0 else "93"
    status = 256 - status if status < 0 else status
    write(folder, f"{number}.n1", {**ended, "job_state": "F", "substate": substate, "Exit_status": str(status)})
    return 0


def show(folder: Path, words: list[str]) -> int:
    """qstat: one job, by its number."""
    has_history = (folder / "history").exists()
    name, separator = words[-1], words[words.index("-D") + 1]
    if "-x" in words and not has_history:
        return fail(f"qstat: PBS is not configured to maintain job history {name}.n1")
    job = read(folder, f"{name.removesuffix('.n1')}.n1")
    if not job or (job["job_state"] == "F" and not has_history):
        return fail(f"qstat: Unknown Job Id {name}.n1")
    print(separator.join([f"Job Id: {name.removesuffix('.n1')}.n1", *(f"{key}={value}" for key, value in job.items())]))
    return 0


def end(folder: Path, words: list[str]) -> int:
    """qdel."""
    for name in words:
        job = read(folder, name)
        write(folder, name, {**job, "substate": "91"})
        signal_session(job["session_id"], signal.SIGTERM)
    return 0


def send(folder: Path, words: list[str]) -> int:
    """qsig -s NAME JOB…"""
    for name in words[2:]:
        signal_session(read(folder, name)["session_id"], signal.Signals[f"SIG{words[1]}"])
    return 0


def processes_of(session: str) -> list[int]:
    """Processes of a session, children before parents."""
    found = []
    for folder in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            fields = (folder / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
            if fields[3] == session and fields[0] != "Z":
                found.append(int(folder.name))
    return sorted(found, reverse=True)


def signal_session(session: str, number: signal.Signals) -> None:
    """Signal every process of a session."""
    for process in processes_of(session):
        with suppress(ProcessLookupError):
            os.kill(process, number)


def read(folder: Path, name: str) -> dict[str, str]:
    """The attributes of a job; none of one that is not there."""
    with suppress(OSError):
        return dict(json.loads((folder / f"{name}.job").read_text(encoding="utf-8")))
    return {}


def write(folder: Path, name: str, job: dict[str, str]) -> None:
    """Replace the attributes of a job."""
    new = folder / f"{name}.{os.getpid()}"
    new.write_text(json.dumps(job), encoding="utf-8")
    new.replace(folder / f"{name}.job")


if __name__ == "__main__":
    sys.exit(main())
