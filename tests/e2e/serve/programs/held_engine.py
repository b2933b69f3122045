"""`trtrun` whose engines wait with their start while the file is there that the variable HOLD names. For `serve` where
the engine is one process."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from launch.cli import main
from launch.serve.engine import keeper as engine_keeper


def engine_command(arguments: Sequence[str]) -> list[str]:
    """The engine is this program, too."""
    return [sys.executable, __file__, "serve-engine", *arguments]


if __name__ == "__main__":
    engine_keeper.engine_command = engine_command
    while "serve-engine" in sys.argv and Path(os.environ["HOLD"]).exists():
        time.sleep(0.02)
    main()
