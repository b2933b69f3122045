"""`trtrun quantize --resume` where a checkpoint is finished already."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint

from launch.mpi.drain import Drain
from launch.quantize.options import QuantizeOptions
from launch.quantize.run import play_quantization
from trtrun.errors import ConfigError
from trtrun.quantizing.settings import QuantizingSettings

SETTINGS = QuantizingSettings("fp8")


@pytest.fixture
def options(tmp_path: Path) -> QuantizeOptions:
    """Of a run that is done."""
    source = make_checkpoint(tmp_path / "source", tokenizer=True)
    found = QuantizeOptions(source, tmp_path / "output", None, None, ("cpu:0",), False, False, SETTINGS)
    play_quantization(found, Drain())
    return replace(found, resume=True)


def test_the_same_run_again_is_no_error(options: QuantizeOptions, capsys: pytest.CaptureFixture[str]) -> None:
    assert [play_quantization(options, Drain()) for _ in range(2)] == [0, 0]
    found = capsys.readouterr()
    assert found.err.count("nothing left to quantize") == 2
    last = (options.output / "quantization_report.jsonl").read_text().splitlines()[-1]
    assert found.out.splitlines().count(last) == 2


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"settings": QuantizingSettings("fp8_block")}, "format"),
        ({"settings": QuantizingSettings("fp8", dtype="bfloat16")}, "dtype"),
        ({"model": "other"}, "model"),
        ({"held_out": "texts.jsonl"}, "texts"),
    ],
)
def test_another_run_is_refused(options: QuantizeOptions, tmp_path: Path, changed: dict[str, Any], name: str) -> None:
    make_checkpoint(tmp_path / "other", tokenizer=True, tie_word_embeddings=True)
    (tmp_path / "texts.jsonl").write_text(json.dumps({"text": "def main"}))
    given = {key: tmp_path / value if isinstance(value, str) else value for key, value in changed.items()}
    with pytest.raises(ConfigError, match=f"a checkpoint with another {name} is there: name another directory"):
        play_quantization(replace(options, **given), Drain())
