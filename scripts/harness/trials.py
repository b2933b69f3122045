"""What every trial of a server does alike: it reads options, tells faults as they come, and prints its figures last.

It does not know what is tried.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from scripts.harness.children import ChildError


class Trial:
    """Something that is tried.

    Attributes:
        faults: what must not be.
    """

    def __init__(self) -> None:
        self.faults: list[str] = []

    def tell_fault(self, fault: str) -> None:
        """Keep a fault, and print it at once."""
        self.faults.append(fault)
        print(f"FAULT: {fault}", flush=True)


def make_parser(about: str | None, *, clients: int | None = None, ranks: int | None = None) -> argparse.ArgumentParser:
    """Options that trials share.

    Args:
        about: the docstring of the script, whose first line is shown.
        clients: how many there are unless --clients says; None where it is no option.
        ranks: the same of --ranks, with --config beside it.
    """
    parser = argparse.ArgumentParser(description=(about or "").partition("\n")[0])
    if clients is not None:
        parser.add_argument("--clients", type=int, default=clients)
    if ranks is not None:
        parser.add_argument("--config", type=Path, help="what to serve instead of the shipped pair")
        parser.add_argument("--ranks", type=int, default=ranks, help="of the shipped pair: 1 (no mpirun), 3, 4 or 5")
    parser.add_argument("--seed", type=int, default=1, help="of what is asked, and of what clients do")
    return parser


def play_trial(
    run: Callable[[argparse.Namespace, Path], Awaitable[dict[str, Any]]], options: argparse.Namespace
) -> int:
    """Run a trial in a folder of its own, and print its figures as the last line.

    Args:
        run: the trial; returns its figures, `faults` among them.
        options: of the command line.

    Returns:
        The exit status: 1 where there are faults.
    """

    async def play(folder: Path) -> dict[str, Any]:
        return await run(options, folder)

    with exiting_clearly(), tempfile.TemporaryDirectory(prefix=f"{Path(sys.argv[0]).stem}-") as name:
        figures = asyncio.run(play(Path(name)))
    print(json.dumps(figures))
    return 1 if figures["faults"] else 0


@contextmanager
def exiting_clearly() -> Iterator[None]:
    """Have the script end with status 1 and the error's own words where a command of its is not as it has to be."""
    try:
        yield
    except ChildError as error:
        sys.exit(f"{Path(sys.argv[0]).name}: {error}")
