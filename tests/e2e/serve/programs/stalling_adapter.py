"""`trtrun` on a disk that does not answer: its engines never get on with an adapter whose directory is called "stalls".
For `serve` where the engine is one process."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from launch.cli import main
from launch.serve.engine import keeper as engine_keeper
from trtrun.engine.runner import Engine


def engine_command(arguments: Sequence[str]) -> list[str]:
    """The engine has the disk, too."""
    return [sys.executable, __file__, "serve-engine", *arguments]


def read_adapter(engine: Engine, path: Path, on_progress: Callable[[], None]) -> Callable[[int], None]:
    """In place of `Engine.read_adapter`."""
    if path.name == "stalls":
        threading.Event().wait()
    return _read_adapter(engine, path, on_progress)


if __name__ == "__main__":
    _read_adapter = Engine.read_adapter
    Engine.read_adapter = read_adapter  # type: ignore[method-assign]
    engine_keeper.engine_command = engine_command
    main()
