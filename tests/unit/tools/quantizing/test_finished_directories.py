"""`trtrun quantize --resume` where a checkpoint is finished already."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint

from launch.exit_codes import FailedError
from launch.jobs.mpi.drain import Drain
from launch.quantize.options import QuantizeOptions
from launch.quantize.run import play_quantization
from trtrun.errors import ConfigError
from trtrun.tokens.text import read_tokenizer
from trtrun.tools.quantizing.directory import QuantizedDirectory, check_output
from trtrun.tools.quantizing.settings import QuantizingSettings

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


def test_texts_are_no_longer_than_the_models_context(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", tokenizer=True, max_position_embeddings=40)
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": "x y z " * length}) + "\n" for length in (3, 100)))
    found = QuantizeOptions(source, tmp_path / "output", file, file, ("cpu:0",), False, False, SETTINGS)
    play_quantization(found, Drain())
    last = json.loads((tmp_path / "output" / "quantization_report.jsonl").read_text().splitlines()[-1])
    tokens = len(read_tokenizer(source).encode("x y z " * 3))  # type: ignore[union-attr]
    assert 1 < tokens < 40
    assert (last["tokens"], last["held_out_tokens"]) == (tokens + 40, tokens + 40)


def test_a_report_without_a_summary_is_one_line(options: QuantizeOptions) -> None:
    report = options.output / "quantization_report.jsonl"
    for text in ("", "{}\n", "[]\n"):
        report.write_text(text)
        with pytest.raises(ConfigError, match="does not end in a summary: --force makes the checkpoint anew"):
            play_quantization(options, Drain())


def test_an_output_that_cannot_be_made_is_one_line(options: QuantizeOptions, tmp_path: Path) -> None:
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="it is no directory"):
        check_output(tmp_path / "dangling", options.model, False)
    with pytest.raises(FailedError, match="cannot write below /proc/nothing: No such file or directory"):
        play_quantization(replace(options, output=Path("/proc/nothing")), Drain())


def test_a_run_of_another_kind_is_told_of_by_its_output(tmp_path: Path) -> None:
    """Not by where a checkpoint lies that is converted in the end."""
    output = tmp_path / "ranks"
    QuantizedDirectory(output, 3, is_converted=True).begin({"format": "fp8"}, is_forced=False)
    with pytest.raises(ConfigError, match=rf"^--output {output}: it holds a run with another format"):
        QuantizedDirectory(output, 3, is_converted=True).begin({"format": "int4_awq"}, is_forced=False)


def test_a_tokenizer_of_the_model_before_does_not_stay(options: QuantizeOptions) -> None:
    """It would be read with the new weights; folders are somebody's."""
    (options.model / "tokenizer.json").unlink()
    (options.output / "tokenizer_of_mine").mkdir()
    play_quantization(replace(options, resume=False, force=True), Drain())
    assert not (options.output / "tokenizer.json").exists() and (options.output / "tokenizer_of_mine").is_dir()
