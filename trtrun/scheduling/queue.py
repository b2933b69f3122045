"""The waiting queue: completions without a row, in fair queuing between those who asked for them.

Completions that were asked for together are a group: those of one request, or of one call. Groups have an owner, such
as the key of a server's client. The owner with the fewest rows is next, and of several such owners the one that has
waited longest since it came, or since its number of rows changed. Of the owner's groups it is the next one by the same
rule; within a group it is first come first served. So a group of many completions keeps no other one waiting, nor an
owner of many groups another owner, and none is ever passed by for good: once it has no row, only those that were there
before it go first. (Max-min fairness of rows.) Preempted completions have had their turn: they come before all others
of their owner, the earliest admitted first.

A completion may be held until its guide is built, a preempted one, too. It is passed by then, in its group and with it,
and takes the place that it would have had once it is released.

It knows the order only; when a completion may leave the queue is `admission.py`'s decision.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from itertools import count, zip_longest
from typing import Generic, TypeVar

from trtrun.core.guide import GuideStart
from trtrun.scheduling.completions import Completion

_KEPT_SHARE = 4
"""One place in so many is kept for who has few of them, where several want some."""


def has_share(count: int, own: int, total: int, most: int, num_others: int) -> bool:
    """Whether somebody may have `count` more of `most` places. Alone one may have all of them. Where others want some,
    too, everybody may have an equal part, or a first request whatever its size; more than that as long as a part of
    all places stays free, so that those who ask for little are let in beside one who asks for all.

    Args:
        count: places that are asked for.
        own: that who asks has.
        total: that all have.
        most: that there are.
        num_others: who else wants some.
    """
    if total + count > most:
        return False
    if not num_others or not own or own + count <= most // (1 + num_others):
        return True
    return total + count <= most - most // _KEPT_SHARE


@dataclass(eq=False)
class _Sharer:
    """Who has rows, and wants more.

    Attributes:
        num_rows: of completions that have one.
        turn: of those with as many rows the one with the lowest is next.
    """

    num_rows: int = 0
    turn: int = 0


_SharerT = TypeVar("_SharerT", bound=_Sharer)


class _FairQueue(Generic[_SharerT]):
    """Owners or groups of which a completion may have a row, the next one first: by their number of rows, and of those
    with as many the ones that have been there longest first."""

    def __init__(self) -> None:
        self._of_rows: dict[int, OrderedDict[_SharerT, None]] = {}

    def __iter__(self) -> Iterator[_SharerT]:
        for num_rows in sorted(self._of_rows):
            yield from self._of_rows[num_rows]

    def __bool__(self) -> bool:
        return bool(self._of_rows)

    def __contains__(self, sharer: _SharerT) -> bool:
        return sharer in self._of_rows.get(sharer.num_rows, ())

    def enter(self, sharer: _SharerT) -> None:
        """Enter one that has something that may have a row; its rows and turn stay until it leaves."""
        sharers = self._of_rows.setdefault(sharer.num_rows, OrderedDict())
        last = next(reversed(sharers), None)
        sharers[sharer] = None
        if last is None or last.turn < sharer.turn:
            return
        # One that was held goes before those that came meanwhile.
        for later in [other for other in sharers if other.turn > sharer.turn]:
            sharers.move_to_end(later)

    def leave(self, sharer: _SharerT) -> None:
        """Take out one that is changed, or has nothing any more; one that is not there is passed over."""
        sharers = self._of_rows.get(sharer.num_rows, OrderedDict())
        sharers.pop(sharer, None)
        if not sharers:
            self._of_rows.pop(sharer.num_rows, None)


@dataclass(eq=False)
class _Owner(_Sharer):
    """Who asks.

    Attributes:
        name: of the owner.
        groups: the groups in which a completion waits, in fair order.
        preempted: completions that have lost a row, the earliest admitted first.
        num_groups: of the owner.
        num_waiting: of the owner's completions, those that never had a row.
    """

    name: Hashable = None
    groups: _FairQueue[_Group] = field(default_factory=lambda: _FairQueue[_Group]())
    preempted: deque[Completion] = field(default_factory=deque)
    num_groups: int = 0
    num_waiting: int = 0


@dataclass(eq=False, kw_only=True)
class _Group(_Sharer):
    """Completions that were asked for together.

    Attributes:
        owner: who asked for them.
        waiting: those that never had a row, in order of arrival.
        held: those whose guide is not built, in order of arrival.
    """

    owner: _Owner
    waiting: deque[Completion] = field(default_factory=deque)
    held: list[Completion] = field(default_factory=list)


class WaitingQueue:
    """Completions without a row. It is told of all that get one, and lose it."""

    def __init__(self) -> None:
        self._held_preempted: set[Completion] = set()
        self._groups: dict[tuple[Hashable, Hashable], _Group] = {}  # by owner and name
        self._owners: dict[Hashable, _Owner] = {}
        self._owners_waiting: _FairQueue[_Owner] = _FairQueue()
        self._holding: dict[_Group, None] = {}
        self._num_waiting = 0
        self._num_held = 0
        self._num_preempted = 0
        self._arrivals, self._next_turns = count(), count()

    def __len__(self) -> int:
        return self._num_preempted + self._num_waiting

    @property
    def num_ready(self) -> int:
        """Completions that are not held."""
        return len(self) - self._num_held

    @property
    def num_preempted(self) -> int:
        """Completions that have lost a row."""
        return self._num_preempted

    def num_waiting_of(self, name: Hashable, owner: Hashable = None) -> int:
        """Completions of an owner's group that never had a row."""
        group = self._groups.get((owner, name))
        return len(group.waiting) + len(group.held) if group is not None else 0

    def in_turn(self) -> Iterator[Completion]:
        """The completions that may leave the queue now, the next one first: of each owner a preempted one, or each
        group's first. The queue must not be changed meanwhile."""
        for owner in self._owners_waiting:
            preempted = self._next_preempted(owner)
            if preempted is not None:
                yield preempted
                continue
            for group in owner.groups:
                yield group.waiting[0]

    def first_without_rows(self) -> Completion | None:
        """The next completion of an owner that has no row at all; None where there is none."""
        first = next(self.in_turn(), None) if len(self._owners) > 1 else None
        return None if first is None or self.has_rows(first.owner) else first

    def has_share(self, owner: Hashable, count: int, most: int) -> bool:
        """Whether `count` more of an owner may wait, of `most` in all; see `has_share`."""
        known = self._owners.get(owner)
        own = known.num_waiting if known is not None else 0
        others = sum(1 for other in self._owners.values() if other.num_waiting and other is not known)
        return has_share(count, own, len(self), most, others)

    def has_rows(self, owner: Hashable) -> bool:
        """Whether an owner of whom a completion waits has a row."""
        return self._owners[owner].num_rows > 0

    @property
    def num_owners(self) -> int:
        """Owners of completions, with a row or without."""
        return len(self._owners)

    def add(self, completion: Completion, *, is_held: bool = False) -> None:
        """A new completion arrives."""
        group = self._group_of(completion)
        owner = group.owner
        if not group.waiting and not group.held:
            group.turn = next(self._next_turns)
        if not owner.num_waiting and not owner.preempted:
            owner.turn = next(self._next_turns)
        owner.num_waiting += 1
        completion.arrival = next(self._arrivals)
        self._num_waiting += 1
        if is_held:
            group.held.append(completion)
            self._holding[group] = None
            self._num_held += 1
            return
        group.waiting.append(completion)
        if len(group.waiting) == 1:
            self._leave(group)
            self._enter(group)

    def _group_of(self, completion: Completion) -> _Group:
        """The completion's group, a new one where there is none, and so its owner."""
        key = completion.owner, completion.group
        group = self._groups.get(key)
        if group is None:
            owner = self._owners.setdefault(completion.owner, _Owner(name=completion.owner))
            owner.num_groups += 1
            group = self._groups[key] = _Group(owner=owner)
        return group

    def _next_preempted(self, owner: _Owner) -> Completion | None:
        return next((one for one in owner.preempted if one not in self._held_preempted), None)

    def held_starts(self) -> Iterator[GuideStart]:
        """What completions are held for, in turns as rows are given; some more than once."""
        for owner in sorted(self._owners.values(), key=lambda owner: (owner.num_rows, owner.turn)):
            for completion in owner.preempted:
                if completion in self._held_preempted and completion.guide_start is not None:
                    yield completion.guide_start
        groups = sorted(
            self._holding, key=lambda group: (group.owner.num_rows, group.owner.turn, group.num_rows, group.turn)
        )
        for of_groups in zip_longest(*(group.held for group in groups)):
            for completion in of_groups:
                if completion is not None and completion.guide_start is not None:
                    yield completion.guide_start

    def release(self, start: GuideStart) -> None:
        """Let in those that are held for a start."""
        for completion in [held for held in self._held_preempted if held.guide_start == start]:
            group = self._groups[completion.owner, completion.group]
            self._leave(group)
            self._unhold_preempted(completion)
            self._enter(group)
        for group in list(self._holding):
            released = [held for held in group.held if held.guide_start == start]
            if not released:
                continue
            self._leave(group)
            for completion in released:
                self._unhold(group, completion)
            group.waiting = deque(sorted([*group.waiting, *released], key=lambda completion: completion.arrival))
            self._enter(group)

    def take(self, completion: Completion) -> None:
        """One of those in turn gets a row."""
        group = self._groups[completion.owner, completion.group]
        self._leave(group)
        if completion in group.owner.preempted:
            assert completion not in self._held_preempted
            group.owner.preempted.remove(completion)
            self._num_preempted -= 1
        else:
            assert group.waiting[0] is completion
            group.waiting.popleft()
            self._num_waiting -= 1
            group.owner.num_waiting -= 1
        self._change_rows(group, 1)

    def put_back(self, completion: Completion, *, is_held: bool = False) -> None:
        """A completion was preempted, behind those that it goes before: others of its owner that were."""
        group = self._groups[completion.owner, completion.group]
        self._leave(group)
        group.owner.preempted.appendleft(completion)
        self._num_preempted += 1
        if is_held:
            self._held_preempted.add(completion)
            self._num_held += 1
        self._change_rows(group, -1)

    def end_row(self, completion: Completion) -> None:
        """A completion with a row has ended."""
        group = self._groups[completion.owner, completion.group]
        self._leave(group)
        self._change_rows(group, -1)
        self._forget_if_empty(completion)

    def remove(self, completion: Completion) -> None:
        """Take a completion out wherever it stands."""
        group = self._groups[completion.owner, completion.group]
        self._leave(group)
        if completion in group.owner.preempted:
            group.owner.preempted.remove(completion)
            self._num_preempted -= 1
            if completion in self._held_preempted:
                self._unhold_preempted(completion)
        else:
            self._num_waiting -= 1
            group.owner.num_waiting -= 1
            if completion in group.held:
                self._unhold(group, completion)
            else:
                group.waiting.remove(completion)
        self._enter(group)
        self._forget_if_empty(completion)

    def _unhold_preempted(self, completion: Completion) -> None:
        self._held_preempted.remove(completion)
        self._num_held -= 1

    def _unhold(self, group: _Group, completion: Completion) -> None:
        group.held.remove(completion)
        self._num_held -= 1
        if not group.held:
            del self._holding[group]

    def _change_rows(self, group: _Group, change: int) -> None:
        """Count rows of a group that has left, and of its owner; both enter again."""
        for sharer in (group, group.owner):
            sharer.num_rows += change
            sharer.turn = next(self._next_turns)
        self._enter(group)

    def _leave(self, group: _Group) -> None:
        """A group and its owner are about to change."""
        self._owners_waiting.leave(group.owner)
        group.owner.groups.leave(group)

    def _enter(self, group: _Group) -> None:
        """They have changed."""
        if group.waiting:
            group.owner.groups.enter(group)
        if group.owner.groups or self._next_preempted(group.owner) is not None:
            self._owners_waiting.enter(group.owner)

    def _forget_if_empty(self, completion: Completion) -> None:
        """Its group, and so its owner."""
        key = completion.owner, completion.group
        group = self._groups[key]
        is_preempted = any(one.group == completion.group for one in group.owner.preempted)
        if group.num_rows or group.waiting or group.held or is_preempted:
            return
        del self._groups[key]
        group.owner.num_groups -= 1
        if not group.owner.num_groups:
            del self._owners[group.owner.name]
