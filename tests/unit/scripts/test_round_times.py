"""scripts/bench/gpu_bench/round_times.py, on a CPU slot: figures of each number of rows, and texts that tell versions
apart."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).resolve().parents[3]))
from scripts.bench.gpu_bench import round_times


def test_texts_are_the_same_until_a_model_is_another_one(capsys: pytest.CaptureFixture[str]) -> None:
    def run(shape: str) -> list[dict[str, Any]]:
        round_times.main([shape, "1,2", "--repeats", "2", "--device", "cpu:0"])
        said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert said[-1]["results"] == said[:-1]
        return said[:-1]

    results, again = run("tiny"), run("tiny")
    assert [entry["rows"] for entry in results] == [1, 2]
    assert all(0 < entry["least_ms"] <= entry["round_ms"] for entry in results)
    assert [entry["texts"] for entry in results] == [entry["texts"] for entry in again]
    other = run("tiny-experts")
    assert all(one["texts"] != two["texts"] for one, two in zip(results, other, strict=True))
