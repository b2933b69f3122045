"""What programs that drive a client share: named cases, each run and told of. It knows no client.

Such a program runs in the client's environment, which has nothing of trtrun.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any

CASES: list[tuple[str, Callable[..., Any]]] = []


def case(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Names what follows as a case: a function, or a coroutine function, of the server's URL and the model's name."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        CASES.append((name, function))
        return function

    return add


def same(found: Any, wanted: Any) -> None:
    """Hold what was found to what it has to be.

    Raises:
        AssertionError: it is something else.
    """
    assert found == wanted, f"{found!r}, and not {wanted!r}"


def run_cases() -> None:
    """Run every case with the command line's words, URL and model; the last line says how many did what they should.

    Exit status: 0 all did, 1 some did not.
    """
    warnings.filterwarnings("ignore")
    done = 0
    with asyncio.Runner() as runner:  # one loop for all: clients keep connections
        for name, function in CASES:
            try:
                found = function(*sys.argv[1:])
                if inspect.iscoroutine(found):
                    runner.run(found)
            except Exception:  # a case that fails is told of, and the others are run
                print(f"✗ {name}\n{traceback.format_exc()}", flush=True)
                continue
            done += 1
            print(f"✓ {name}", flush=True)
    print(f"{done} of {len(CASES)} cases")
    sys.exit(0 if done == len(CASES) else 1)
