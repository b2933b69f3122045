"""scripts/pair/train_shipped_drafters.py: a run that was killed goes on."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trtrun.configuration.model_paths import ASSETS

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from scripts.pair import train_shipped_drafters as script


def test_a_killed_run_trains_on_with_the_minutes_and_data_that_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """train-drafter --resume refuses others."""
    started: list[list[str]] = []

    def start(log: Path, *words: object) -> Any:
        log.write_text("done\n")
        started.append([str(word) for word in words])
        return SimpleNamespace(poll=lambda: 0, wait=lambda seconds=None: 0)

    monkeypatch.setattr(script, "start_trtrun", start)
    arguments = Namespace(
        work_dir=tmp_path, out=tmp_path / "out", assets=ASSETS, device="cpu:0", minutes=10.0, drafters=["medusa"],
        seed=1, batch_size=8, batch_rows=4, generators=1, threads=1,
    )  # fmt: skip
    first = script.Run(arguments)
    (tmp_path / "data_1.jsonl").write_text("{}\n")
    script.generate(first)
    script.train(first)
    assert [words[0] for words in started] == ["generate-data", "train-drafter"]
    later = script.Run(arguments)
    later.begun = first.begun - 100
    script.generate(later)
    script.train(later)
    assert started[2:] == started[1:2]
