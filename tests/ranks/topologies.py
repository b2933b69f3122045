"""The placements that the ranks tests go through, by world size."""

from __future__ import annotations

import os

from parallel.topology import Slot, Topology


def _place(draft: str, target: str) -> Topology:
    """`_place("ab", "bc")`: the draft on devices a and b, the target on b and c."""
    return Topology.from_devices([f"cpu:{name}" for name in draft], [f"cpu:{name}" for name in target])


# from_devices never makes a world of two: one slot is a world of one, and two slots have an orchestrator beside them.
BY_WORLD_SIZE: dict[int, dict[str, Topology]] = {
    1: {"a+a": _place("a", "a")},
    2: {"one worker": Topology((Slot("cpu:0", 1, 0, 0),))},
    3: {
        "1+1": _place("a", "b"),
        "a+ab": _place("a", "ab"),
        "ab+ab": _place("ab", "ab"),
        "ab+ba": _place("ab", "ba"),
        "ab+b": _place("ab", "b"),
        "none+2": _place("", "ab"),
    },
    4: {"1+2": _place("a", "bc"), "2+1": _place("ab", "c"), "ab+bc": _place("ab", "bc"), "b+abc": _place("b", "abc")},
    5: {"2+2": _place("ab", "cd"), "ab+abcd": _place("ab", "abcd"), "1+3": _place("a", "bcd")},
}

# Those of the running job; mpirun says its size before MPI starts.
HERE = BY_WORLD_SIZE.get(int(os.environ.get("OMPI_COMM_WORLD_SIZE", "1")), {})
