"""scripts/dev/house.py counts long parameter lists of plain functions and of kernels apart."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from scripts.dev import house

NINE = "a, b, c, d, e, f, g, h, i"
TEXT = f"""
@triton.jit
def kernel({NINE}): ...

@gluon.jit(do_not_specialize=["a"])
def step({NINE}, j): ...

@functools.cache
def plain({NINE}): ...

class Shape:
    def method(self, {NINE[3:]}): ...
    def __init__(self, {NINE}): ...
"""


def test_kernels_and_plain_functions_are_counted_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(house, "ROOT", tmp_path)
    path = tmp_path / "kernels.py"
    path.write_text(TEXT)
    found = house.find_long_lists([house.Source(path, "kernels")])
    names = {kind: [where.split()[-1] for _, where in functions] for kind, functions in found.items()}
    assert names == {
        "long_parameter_lists": ["__init__", "plain"],
        "long_kernel_parameter_lists": ["step", "kernel"],
    }
    assert set(names) <= set(house.MOST)
