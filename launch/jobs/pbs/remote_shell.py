"""Runs a command on another node of a job of PBS: what mpirun calls in place of ssh, and with the same words.

    python -m launch.jobs.pbs.remote_shell HOST WORD…

PBS's own pbs_tmrsh starts a program without a shell, and mpirun's words are meant for one. What PBS starts needs no
key, and ends with the job. It knows no MPI library.
"""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Become pbs_tmrsh; its path is where the job or its submission has it."""
    host, *words = sys.argv[1:]
    os.environ["PATH"] = os.pathsep.join(filter(None, map(os.environ.get, ("PATH", "PBS_O_PATH"))))
    os.execvp("pbs_tmrsh", ["pbs_tmrsh", host, "/bin/sh", "-c", " ".join(words)])


if __name__ == "__main__":
    main()
