"""A rank of a server is killed under streams: whether all end with the tokens that they would have had, how long they
wait, and what they wait for.

It knows serve_chaos.py's JSON. It does not know when it runs.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence

from scripts.bench.gpu_bench.placements import Placement
from scripts.bench.gpu_bench.workbench import Workbench
from scripts.harness.children import ChildError, run
from scripts.harness.processes import ROOT

CHAOS = ROOT / "scripts" / "soak" / "serve_chaos.py"
KILLS = 2
_PIECE = re.compile(r"([a-z][^:;]*?) (\d+\.\d)(?:;|$)")


def read_pieces(told: str) -> dict[str, float]:
    """What the line says that an engine is up again: seconds by what they went to; none where it is another line."""
    _, _, pieces = told.partition(" s: ")
    return {name.strip(): float(seconds) for name, seconds in _PIECE.findall(pieces)}


def play_served_loss(bench: Workbench, placement: Placement, ranks: Sequence[int], *, standby: bool = False) -> None:
    """A server of the 8B pair, all of whose clients stream; ranks are killed in turns, KILLS times each.

    A lost draft rank stays away as long as the job goes on without it: a target rank that is killed behind it brings it
    back. With `standby` the next engine's processes wait.

    Raises:
        ChildError: a text was another one, or a stream did not end with its text.
    """
    config = bench.config("8b", placement)
    words = [sys.executable, CHAOS, "--config", config, "--clients", bench.options.scale.streams]
    words += ["--kills", KILLS, "--victims", ",".join(f"rank {rank}" for rank in ranks), "--streams-all"]
    words += ["--standby"] if standby else []
    for override in bench.options.overrides:
        words += ["--set", override]
    ended = run(words, bench.folder, bench.deadline)
    report = ended.last_json()
    bench.keep({"report": report})
    each = [(victim, one) for victim, told in report["victims"].items() for one in told["each"]]
    pieces = [read_pieces(one["told"]) for _, one in each]
    names = list(dict.fromkeys(name for found in pieces for name in found))
    columns = ("killed", "streams that were read", "longest gap s", "noticing s", *(f"{name} s" for name in names))
    beside = ", an engine stands by" if standby else ""
    table = bench.table(f"Ranks of a server are killed: {placement.about}{beside}", *columns, "the rest of the gap s")
    for (victim, one), found in zip(each, pieces, strict=True):
        known = (one["noticed_s"] or 0.0) + sum(found.values())
        taken = (found.get(name) for name in names)
        table.add(victim, one["streams"], one["pause_s"], one["noticed_s"], *taken, one["pause_s"] - known)
    requests = ", ".join(f"{count} {verdict}" for verdict, count in report["requests"].items())
    bench.table("Answers", "of all", "faults").add(requests, len(report["faults"]))
    if set(report["requests"]) != {"exact"} or ended.status != 0:
        raise ChildError(f"not all answers were those of trtrun run: {requests}; {'; '.join(report['faults'])[:300]}")
