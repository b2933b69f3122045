"""Programs that compile Triton's kernels for a device that need not be there."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from forked_commands import shared_commands


def last_line(program: str, cache: Path, seconds: float = 240) -> str:
    """The last line that a program prints, in a process without Triton's interpreter, which compiles into `cache`.

    It is forked from one that has imported torch, but not Triton.
    """
    file = cache / "program.py"
    file.write_text(program)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache)}
    done = shared_commands().run([str(file)], environment, Path.cwd(), seconds, program=[sys.executable])
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]
