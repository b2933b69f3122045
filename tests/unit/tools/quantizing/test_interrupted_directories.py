"""Directories that a run of `trtrun quantize` may have left behind, or that are somebody else's."""

from __future__ import annotations

import resource
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint
from quantizing_runs import quantize

from trtrun.errors import CheckpointError, ConfigError
from trtrun.models.config import read_model_config
from trtrun.tools.quantizing.directory import QuantizedDirectory, check_output, forget_run, is_finished
from trtrun.tools.quantizing.texts import CalibrationTexts


@pytest.mark.parametrize("is_forced", [False, True])
def test_what_is_somebody_elses_is_kept(tmp_path: Path, is_forced: bool) -> None:
    """Whatever its folders are called."""
    source, mine = make_checkpoint(tmp_path / "source"), make_checkpoint(tmp_path / "mine")
    (mine / "quantizing").mkdir()
    with pytest.raises(ConfigError, match="was not made by trtrun quantize"):
        check_output(mine, source, is_forced)


@pytest.mark.parametrize("is_forced", [False, True])
def test_a_model_inside_the_output_is_refused(tmp_path: Path, is_forced: bool) -> None:
    """What is cleared away would be the model."""
    inner = make_checkpoint(tmp_path / "outer" / "quantizing")
    (inner / "run.json").write_text("{}")
    with pytest.raises(ConfigError, match="the model lies in it"):
        check_output(tmp_path / "outer", inner, is_forced)


@pytest.mark.parametrize("left", [(), ("run.json.new",)])
def test_a_run_that_was_killed_as_it_began(tmp_path: Path, left: Sequence[str]) -> None:
    """It has made the folder, and not told yet what it does."""
    source, output = make_checkpoint(tmp_path / "source"), tmp_path / "output"
    (output / "quantizing").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"output has no config\.json; give a Hugging Face"):
        read_model_config(output)
    (output / "quantizing" / "run.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"output has no config\.json: `trtrun quantize` has not ended there"):
        read_model_config(output)
    (output / "quantizing" / "run.json").unlink()
    for name in left:
        (output / "quantizing" / name).write_text("{")
    check_output(output, source, False)
    quantize(source, output, CalibrationTexts(), format="fp8")
    assert is_finished(output) and not (output / "quantizing").exists()


def test_a_run_that_was_killed_as_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint is whole, whatever of the run is left beside it."""
    source, output = make_checkpoint(tmp_path / "source"), tmp_path / "output"
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rmdir", _die)
        with pytest.raises(_KilledError):
            quantize(source, output, CalibrationTexts(), format="fp8")
    (output / "quantizing" / "run.json").write_text("{}")  # as if killed before it went
    assert is_finished(output)
    read_model_config(output)
    with pytest.raises(ConfigError, match="a quantized checkpoint is there; --force makes it anew"):
        check_output(output, source, False)
    forget_run(output)
    assert is_finished(output) and not (output / "quantizing").exists()


def test_a_run_that_was_killed_as_it_cleared_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same command goes on, with or without --force; nothing of the checkpoint before is taken."""
    source, output = make_checkpoint(tmp_path / "source"), tmp_path / "output"
    quantize(source, output, CalibrationTexts(), format="fp8")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "glob", _die)
        with pytest.raises(_KilledError):
            QuantizedDirectory(output, 3).begin({"format": "int8_sq"}, is_forced=True)
    assert not is_finished(output) and list(output.glob("model*.safetensors"))
    check_output(output, source, False)
    directory = QuantizedDirectory(output, 3)
    directory.begin({"format": "int8_sq"}, is_forced=False)
    assert [file.name for file in output.iterdir() if "model" in file.name] == []
    assert (output / "quantizing" / "run.json").read_text() == '{"format": "int8_sq"}\n'


def test_a_disk_that_takes_no_more_is_an_error_of_the_system(tmp_path: Path) -> None:
    """The command tells of it in one line; the library has an exception of its own. A limit for this process does for
    a full disk."""
    directory = QuantizedDirectory(tmp_path / "output", 3)
    directory.begin({}, is_forced=False)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            directory.write_shard(0, {"weight": torch.ones(8192)}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.strerror == "File too large"
    assert not directory.has_shard(0)


def test_a_damaged_shard_is_one_line(tmp_path: Path) -> None:
    """And deleting it, as the line says, is all that it needs."""
    directory = QuantizedDirectory(tmp_path / "output", 1)
    directory.begin({}, is_forced=False)
    directory.write_shard(0, {"weight": torch.ones(300)}, {})
    with open(directory.shard(0), "r+b") as file:
        file.truncate(200)
    for read in (lambda: directory.read_shard(0), lambda: directory.finish(tmp_path, {})):
        with pytest.raises(CheckpointError, match=r"model-00001-of-00001.safetensors is damaged \(.*\): delete it"):
            read()
    directory.shard(0).unlink()
    assert not directory.has_shard(0)


class _KilledError(Exception):
    pass


def _die(*_: object) -> None:
    raise _KilledError
