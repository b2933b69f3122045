"""scripts/bench/gpu_bench/expert_tiles.py: what is tried, and what is left of a run that does not end well."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="needs triton: pip install triton")
sys.path.append(str(Path(__file__).resolve().parents[3]))
from scripts.bench.gpu_bench import expert_tiles
from scripts.bench.gpu_bench.round_parts import results_so_far
from scripts.harness.children import ChildError

SHARED = 227 << 10
PRINTS = """
import sys
print('{"shape": "a", "rows": 1, "us": 2.5}', flush=True)
print('words', flush=True)
print('{"shape": "a", "ro', end="", flush=True)
sys.exit(sys.argv[1] == "fails")
"""


@pytest.mark.parametrize("end", ["ends", "fails"])
def test_results_are_kept_however_the_program_ends(tmp_path: Path, end: str) -> None:
    words = [sys.executable, "-c", PRINTS, end]
    assert results_so_far(words, tmp_path, time.monotonic() + 60) == [{"shape": "a", "rows": 1, "us": 2.5}]


def test_a_program_without_results_says_why(tmp_path: Path) -> None:
    words = [sys.executable, "-c", "raise SystemExit('no device')"]
    with pytest.raises(ChildError, match="no results: no device"):
        results_so_far(words, tmp_path, time.monotonic() + 60)


@pytest.mark.parametrize(
    ("shape", "rows", "kinds"),
    [
        ("30b-a3b", 1, ["gates", "product"]),
        ("gpt-oss-120b", 1, ["gates", "product"]),
        ("gpt-oss-120b", 8, ["both"]),
        ("gpt-oss-120b", 256, ["both"]),
        ("gpt-oss-120b", 2048, ["both"]),
    ],
)
def test_candidates_are_tried_in_their_place_and_what_is_used_comes_back(
    monkeypatch: pytest.MonkeyPatch, shape: str, rows: int, kinds: list[str]
) -> None:
    from trtrun.kernels.triton.coded_experts import four_bits_stream

    monkeypatch.setattr(expert_tiles, "shared_bytes", lambda device: SHARED)
    monkeypatch.setattr(four_bits_stream, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(torch, "device", lambda name: None)
    changes = expert_tiles.changes_of(expert_tiles.SHAPES[shape], rows)
    assert [change.kind for change in changes] == kinds
    for change in changes:
        used, seen = change.table[change.key], []
        expert_tiles.trying(change, lambda _, seen=seen, change=change: seen.append(change.table[change.key]))
        assert seen == change.candidates and used in seen and change.table[change.key] == used
        with pytest.raises(ZeroDivisionError):
            expert_tiles.trying(change, lambda _: 1 // 0)
        assert change.table[change.key] == used
