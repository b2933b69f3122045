"""Programs that compile Triton's kernels for a device that need not be there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def last_line(program: str, cache: Path, seconds: float = 240) -> str:
    """The last line that a program prints, in a process without Triton's interpreter, which compiles into `cache`."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment | {"TRITON_CACHE_DIR": str(cache)},
        capture_output=True, text=True, timeout=seconds, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]
