"""Adapters that are being loaded, one after the other: ranks read one beside the rounds, and it is put into its slot
between two of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from trtrun.api.adapters import AdapterTable
from trtrun.errors import CheckpointError, InvalidRequestError, TrtrunError, one_line
from trtrun.rounds.orchestrator import Orchestrator


@dataclass(slots=True)
class _Load:
    """An adapter that is to be loaded, who is told, and its slot once ranks read it."""

    name: str
    path: Path
    on_end: Callable[[TrtrunError | None], None]
    slot: int | None = None


class AdapterLoads:
    """Loads of adapters that were asked for and are not done yet.

    Args:
        table: of the adapters that are there.
        ranks: that read them.
        slots_in_use: tells which slots requests have.
    """

    def __init__(self, table: AdapterTable, ranks: Orchestrator, slots_in_use: Callable[[], Collection[int]]) -> None:
        self._table, self._ranks, self._slots_in_use = table, ranks, slots_in_use
        self._loads: deque[_Load] = deque()

    def __bool__(self) -> bool:
        return bool(self._loads)

    def begin(self, name: str, path: Path, on_end: Callable[[TrtrunError | None], None]) -> None:
        """Load one behind those that were asked for before; see `LLMEngine.begin_adapter`."""
        self._loads.append(_Load(name, path, on_end))

    def go_on(self, seconds: float) -> None:
        """Begin with the next adapter, or take in what has come of the one that ranks read: `seconds` at most are
        waited for it. There is one.

        Raises:
            RankFailedError: a rank failed.
        """
        load, ranks = self._loads[0], self._ranks
        error: TrtrunError | None = None
        if load.slot is None:
            try:
                load.slot = self._table.find_slot(load.name, self._slots_in_use())
                ranks.begin_adapter(load.name, load.path)
                return
            except InvalidRequestError as refusal:
                error = refusal
        else:
            problems = ranks.take_adapter(seconds)
            if problems is None:
                return
            try:
                ranks.end_adapter(0 if problems else load.slot)
            except RuntimeError as failure:  # of the device; what the slot has then is nobody's
                problems = [f"{load.path} could not be put into its slot: {one_line(failure)}"]
            if problems:
                error = CheckpointError(problems[0])
            else:
                self._table.enter(load.name, load.slot)
        self._loads.popleft()
        load.on_end(error)

    def end_all(self, error: TrtrunError) -> None:
        """End all loads and tell everybody why."""
        while self._loads:
            self._loads.popleft().on_end(error)
