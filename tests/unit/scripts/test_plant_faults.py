"""The list of faults that scripts/dev/plant_faults.py plants: each can still be planted, and names tests that are
there."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from scripts.dev.plant_faults import ROOT, plant, read_faults


def test_every_fault_can_be_planted(tmp_path: Path) -> None:
    faults = read_faults()
    assert len(faults) >= 50
    for fault in faults:
        copy = tmp_path / fault.path
        copy.parent.mkdir(parents=True, exist_ok=True)
        text = (ROOT / fault.path).read_text()
        copy.write_text(text)
        plant(tmp_path, fault)
        assert copy.read_text() != text
        missing = [name for name in fault.tests if not (ROOT / "tests" / name.split()[-1]).exists()]
        assert fault.tests and not missing, f"{fault.path} names tests that are not there: {missing}"


def test_a_fault_whose_line_has_changed_is_told(tmp_path: Path) -> None:
    fault = read_faults()[0]
    copy = tmp_path / fault.path
    copy.parent.mkdir(parents=True)
    copy.write_text("nothing of that line\n")
    with pytest.raises(ValueError, match=f"{fault.path} does not hold .* bring this fault up to date"):
        plant(tmp_path, fault)
