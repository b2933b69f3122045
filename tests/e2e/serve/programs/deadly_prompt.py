"""`trtrun` with a defect: its engines die of the prompt whose tokens the variable DEADLY_PROMPT has, and of one whose
logits are asked for, once some of them are told. For `serve` where the engine is one process."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

from launch.cli import main
from launch.serve.engine import keeper as engine_keeper
from trtrun.api.llm_engine import LLMEngine
from trtrun.core.outputs import CompletionDelta

PROMPT = os.environ["DEADLY_PROMPT"].split()


def engine_command(arguments: Sequence[str]) -> list[str]:
    """The engine has the defect, too."""
    return [sys.executable, __file__, "serve-engine", *arguments]


def add_checked(engine: LLMEngine, prompt: Any, *arguments: Any, **options: Any) -> Any:
    """In place of `LLMEngine.add_checked`."""
    if list(map(str, prompt)) == PROMPT:
        os.kill(os.getpid(), signal.SIGKILL)
    return _add_checked(engine, prompt, *arguments, **options)


def step(engine: LLMEngine) -> list[CompletionDelta]:
    """In place of `LLMEngine.step`. What the step before has returned is with the kernel."""
    global has_told_logits
    if has_told_logits:
        os.kill(os.getpid(), signal.SIGKILL)
    deltas = _step(engine)
    has_told_logits = any(delta.context_logits is not None and not delta.token_ids for delta in deltas)
    return deltas


if __name__ == "__main__":
    _add_checked, _step, has_told_logits = LLMEngine.add_checked, LLMEngine.step, False
    LLMEngine.add_checked = add_checked  # type: ignore[method-assign]
    LLMEngine.step = step  # type: ignore[method-assign]
    engine_keeper.engine_command = engine_command
    main()
