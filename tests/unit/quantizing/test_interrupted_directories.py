"""Directories that a run of `trtrun quantize` may have left behind, or that are somebody else's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from checkpoints import make_checkpoint
from quantizing_runs import quantize

from trtrun.errors import ConfigError
from trtrun.quantizing.directory import QuantizedDirectory, check_output, forget_run, is_finished
from trtrun.quantizing.texts import CalibrationTexts


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


class _KilledError(Exception):
    pass


def _die(*_: object) -> None:
    raise _KilledError
