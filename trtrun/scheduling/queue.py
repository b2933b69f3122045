"""The waiting queue: completions without a row, in turns between those who asked for them.

Completions that were asked for together are a group: those of one request, or of one call. The group with the fewest
rows is next, and of several such groups the one that has waited longest since it came, or since its number of rows
changed; within a group it is first come first served. So a group of many completions keeps no other one waiting, and is
itself never passed by for good: once it has no row, only groups that were there before it go first. (Max-min fairness
of rows.) Preempted completions have had their turn: they come before all others, the earliest admitted first.

A completion may be held until its guide is built, a preempted one, too. It is passed by then, in its group and with it,
and takes the place that it would have had once it is released.

It knows the order only; when a completion may leave the queue is `admission.py`'s decision.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from itertools import count, zip_longest

from trtrun.core.guide import GuideStart
from trtrun.scheduling.batch import Completion


@dataclass(eq=False, slots=True)
class _Group:
    """Completions that were asked for together.

    Attributes:
        num_rows: of them that have a row.
        waiting: those that never had one, in order of arrival.
        held: those whose guide is not built, in order of arrival.
        turn: of groups with as many rows the one with the lowest is next.
    """

    num_rows: int = 0
    waiting: deque[Completion] = field(default_factory=deque)
    held: list[Completion] = field(default_factory=list)
    turn: int = 0


class WaitingQueue:
    """Completions without a row. It is told of all that get one, and lose it."""

    def __init__(self) -> None:
        self._preempted: deque[Completion] = deque()
        self._held_preempted: set[Completion] = set()
        self._groups: dict[Hashable, _Group] = {}
        # Groups in which a completion waits, by their number of rows, those that have been there longest first.
        self._turns: dict[int, OrderedDict[_Group, None]] = {}
        self._holding: dict[_Group, None] = {}
        self._num_waiting = 0
        self._num_held = 0
        self._arrivals, self._next_turns = count(), count()

    def __len__(self) -> int:
        return len(self._preempted) + self._num_waiting

    @property
    def num_ready(self) -> int:
        """Completions that are not held."""
        return len(self) - self._num_held

    @property
    def num_preempted(self) -> int:
        """Completions that have lost a row."""
        return len(self._preempted)

    def num_waiting_of(self, name: Hashable) -> int:
        """Completions of a group that never had a row."""
        group = self._groups.get(name)
        return len(group.waiting) + len(group.held) if group is not None else 0

    def in_turn(self) -> Iterator[Completion]:
        """The completions that may leave the queue now, the next one first: a preempted one, or each group's first.
        The queue must not be changed meanwhile."""
        preempted = next((one for one in self._preempted if one not in self._held_preempted), None)
        if preempted is not None:
            yield preempted
            return
        for num_rows in sorted(self._turns):
            for group in self._turns[num_rows]:
                yield group.waiting[0]

    def add(self, completion: Completion, *, is_held: bool = False) -> None:
        """A new completion arrives."""
        group = self._groups.setdefault(completion.group, _Group())
        if not group.waiting and not group.held:
            group.turn = next(self._next_turns)
        completion.arrival = next(self._arrivals)
        self._num_waiting += 1
        if is_held:
            group.held.append(completion)
            self._holding[group] = None
            self._num_held += 1
            return
        group.waiting.append(completion)
        if len(group.waiting) == 1:
            self._enter(group)

    def held_starts(self) -> Iterator[GuideStart]:
        """What completions are held for, in turns as rows are given; some more than once."""
        for completion in self._preempted:
            if completion in self._held_preempted and completion.guide_start is not None:
                yield completion.guide_start
        groups = sorted(self._holding, key=lambda group: (group.num_rows, group.turn))
        for of_groups in zip_longest(*(group.held for group in groups)):
            for completion in of_groups:
                if completion is not None and completion.guide_start is not None:
                    yield completion.guide_start

    def release(self, start: GuideStart) -> None:
        """Let in those that are held for a start."""
        for completion in [held for held in self._held_preempted if held.guide_start == start]:
            self._unhold_preempted(completion)
        for group in list(self._holding):
            released = [held for held in group.held if held.guide_start == start]
            if not released:
                continue
            if group.waiting:
                self._leave(group)
            for completion in released:
                self._unhold(group, completion)
            group.waiting = deque(sorted([*group.waiting, *released], key=lambda completion: completion.arrival))
            self._enter(group)

    def take(self, completion: Completion) -> None:
        """One of those in turn gets a row."""
        if completion in self._preempted:
            assert completion not in self._held_preempted
            self._preempted.remove(completion)
            self._change_rows(completion, 1)
            return
        group = self._groups[completion.group]
        assert group.waiting[0] is completion
        self._leave(group)
        group.waiting.popleft()
        self._num_waiting -= 1
        group.num_rows += 1
        group.turn = next(self._next_turns)
        self._enter(group)

    def put_back(self, completion: Completion, *, is_held: bool = False) -> None:
        """A completion was preempted, and goes before those that were before it."""
        self._change_rows(completion, -1)
        self._preempted.appendleft(completion)
        if is_held:
            self._held_preempted.add(completion)
            self._num_held += 1

    def end_row(self, completion: Completion) -> None:
        """A completion with a row has ended."""
        self._change_rows(completion, -1)

    def remove(self, completion: Completion) -> None:
        """Take a completion out wherever it stands."""
        if completion in self._preempted:
            self._preempted.remove(completion)
            if completion in self._held_preempted:
                self._unhold_preempted(completion)
            return
        group = self._groups[completion.group]
        self._num_waiting -= 1
        if completion in group.held:
            self._unhold(group, completion)
            self._forget_if_empty(completion.group)
            return
        group.waiting.remove(completion)
        if not group.waiting:
            self._leave(group)
            self._forget_if_empty(completion.group)

    def _unhold_preempted(self, completion: Completion) -> None:
        self._held_preempted.remove(completion)
        self._num_held -= 1

    def _unhold(self, group: _Group, completion: Completion) -> None:
        group.held.remove(completion)
        self._num_held -= 1
        if not group.held:
            del self._holding[group]

    def _change_rows(self, completion: Completion, change: int) -> None:
        group = self._groups.setdefault(completion.group, _Group())
        if group.waiting:
            self._leave(group)
        group.num_rows += change
        group.turn = next(self._next_turns)
        self._enter(group)
        self._forget_if_empty(completion.group)

    def _enter(self, group: _Group) -> None:
        if not group.waiting:
            return
        groups = self._turns.setdefault(group.num_rows, OrderedDict())
        last = next(reversed(groups), None)
        groups[group] = None
        if last is None or last.turn < group.turn:
            return
        # One that was held goes before those that came meanwhile.
        for later in [other for other in groups if other.turn > group.turn]:
            groups.move_to_end(later)

    def _leave(self, group: _Group) -> None:
        groups = self._turns[group.num_rows]
        del groups[group]
        if not groups:
            del self._turns[group.num_rows]

    def _forget_if_empty(self, name: Hashable) -> None:
        group = self._groups[name]
        if not group.num_rows and not group.waiting and not group.held:
            del self._groups[name]
