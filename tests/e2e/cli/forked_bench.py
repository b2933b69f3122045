"""scripts/bench/bench_gpu.py whose commands are forked from a process that has imported torch; see
helpers/forked_commands.py.

    python forked_bench.py DESCRIPTOR ARGUMENT…

DESCRIPTOR is that of a `ForkedCommands`. Each command has its own session, environment and outputs, as ever; its ranks
are forked, too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

sys.path += [str(Path(__file__).resolve().parents[2] / "helpers"), str(Path(__file__).resolve().parents[3])]

from forked_commands import ForkedPrograms

from scripts.harness import children


def fork_commands(descriptor: int, set_attribute: Callable[[object, str, object], None] = setattr) -> None:
    """From now on what the parts of the benchmark start is forked."""
    set_attribute(children, "subprocess", ForkedPrograms(descriptor))
    set_attribute(children, "ending_with_parent", list)  # that puts another program in front


def main() -> int:
    """Run the benchmark; returns its exit status."""
    from scripts.bench import bench_gpu

    fork_commands(int(sys.argv.pop(1)))
    return bench_gpu.main()


if __name__ == "__main__":
    sys.exit(main())
