"""Has pytest's ranks forked, for scripts/test.sh: those of all its parts under mpirun, from one process that has
imported what they import.

    python forked_phases.py

It writes the words that stand before `python -m pytest …` in mpirun's command, and ends with its input. It knows no
test.
"""

from __future__ import annotations

import os
import shlex
import sys

from forked_commands import ForkedCommands
from forked_ranks import stand_in

TAKE_LONG = ("_pytest.config", "transformers.models.auto")
"""Beside what commands import: pytest's ranks read tests, and compare what they get with transformers. Its models
import Triton, which complains at the end of a process that was forked."""


def main() -> None:
    """Fork until nobody is left to ask."""
    commands = ForkedCommands(dict(os.environ), TAKE_LONG)
    print(shlex.join(stand_in(commands.address)), flush=True)
    sys.stdin.read()
    commands.close()


if __name__ == "__main__":
    main()
