"""The memory rule of scripts/soak/serve_load.py: what warms up and stays passes, what goes on growing does not."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from scripts.harness.server import Server
from scripts.soak.serve_load import Load

MIB = 1 << 20
SAMPLES = 720
"""Of an hour."""


@pytest.mark.parametrize(
    ("size_at", "is_fault"),
    [
        (lambda share: 200, False),
        (lambda share: 200 + 80 * (1 - math.exp(-8 * share)), False),
        (lambda share: 200 + 40 * (share > 0.3), False),
        (lambda share: 200 + 6 * math.sin(200 * share), False),
        (lambda share: 200 + 80 * share, True),
        (lambda share: 200 + 80 * max(0.0, share - 0.5), True),
    ],
    ids=["flat", "warming up", "a step", "up and down", "leaking", "leaking late"],
)
def test_growth_behind_the_warming_up_is_a_fault(
    size_at: Callable[[float], float], is_fault: bool, tmp_path: Path
) -> None:
    load = Load(Server(tmp_path, tmp_path), [], argparse.Namespace())
    load.sizes = {
        "front": [int(size_at(place / SAMPLES) * MIB) for place in range(SAMPLES)],
        "engine": [300 * MIB] * SAMPLES,
    }
    told = load.memory()
    assert told["engine"] == {"early_mib": 300, "late_mib": 300}
    assert [fault.startswith("front has grown from ") for fault in load.faults] == [True] * is_fault
