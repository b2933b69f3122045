"""The command line of TensorRT-LLM's quantize.py: what becomes of its options."""

from __future__ import annotations

import sys
from pathlib import Path

import click
import pytest

from launch.compat.tensorrt_llm.quantize import make_options, parse_arguments, read_documentation

GIVEN = ["--model_dir", "model", "--output_dir", "out"]


def test_options_become_settings() -> None:
    words = "--dtype bfloat16 --qformat int4_awq --awq_block_size 64 --batch_size 12 --tp_size 2 --calib_size 9"
    options = make_options(parse_arguments([*GIVEN, *words.split(), "--calib_dataset", "texts.jsonl"]))
    settings = options.settings
    assert (settings.format, settings.group_size, settings.samples, settings.tp_size) == ("int4_awq", 64, 9, 2)
    assert (settings.dtype, options.calibration, options.force) == ("bfloat16", Path("texts.jsonl"), False)
    plain = make_options(parse_arguments([*GIVEN, "--qformat", "fp8_pb_wo", "--device", "cpu", "--force"]))
    assert (plain.settings.format, plain.settings.dtype, plain.calibration) == ("fp8_block", None, None)
    assert plain.devices == ("cpu:0",) and plain.force


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--qformat int4_awk", r"'int4_awk' is not supported \(did you mean 'int4_awq'\?\)"),
        ("--qformat fp8 --pp_size 2", "--pp_size 2: only tensor parallelism"),
        ("--qformat fp8 --awq_blocksize 64", r"unknown option '--awq_blocksize' \(did you mean '--awq_block_size'\?\)"),
    ],
)
def test_what_is_not_supported_is_refused(words: str, message: str) -> None:
    with pytest.raises(click.UsageError, match=message):
        make_options(parse_arguments([*GIVEN, *words.split()]))


def test_a_data_set_is_a_file_of_its_name_or_pythons_documentation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--model_dir", "a", "--output_dir", "b", "--qformat", "int4_awq", "--calib_dataset", "ccdv/cnn_dailymail"]
    assert make_options(parse_arguments(words)).calibration is None
    Path("cnn_dailymail.jsonl").write_text("{}")
    assert make_options(parse_arguments(words)).calibration == Path("cnn_dailymail.jsonl")
    assert sum(map(len, read_documentation().values())) > 400_000
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(click.UsageError, match=r"there are no texts here: give a FILE\.jsonl"):
        read_documentation()
