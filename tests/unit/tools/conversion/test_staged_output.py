"""`trtrun convert` loses nothing that nobody gave up: strangers' files, and a checkpoint that it cannot replace."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint
from quantized_checkpoints import edit_tensors
from safetensors.torch import load_file, save_file

from launch.commands.write_models import ConvertOptions, run_conversion
from parallel.errors import ParallelError
from trtrun.errors import CheckpointError, ConfigError, TrtrunError
from trtrun.models.config import read_model_config
from trtrun.tools.conversion import staged_output


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "model", tokenizer=True)


def convert(model: Path, output: Path, *, is_forced: bool = False, **more: object) -> None:
    run_conversion(ConvertOptions(model, output, force=is_forced, **more))  # type: ignore[arg-type]


def contents(directory: Path) -> dict[str, bytes]:
    return {str(file.relative_to(directory)): file.read_bytes() for file in directory.rglob("*") if file.is_file()}


@pytest.mark.parametrize("folder", [None, "empty", "of another"])
def test_weights_without_config_are_not_taken_for_a_killed_conversion(
    model: Path, tmp_path: Path, folder: str | None
) -> None:
    output = tmp_path / "output"
    output.mkdir()
    shutil.copy(model / "model.safetensors", output)
    message = "it has model.safetensors; --force writes over what is there"
    if folder is not None:
        (output / "converting").mkdir()
    if folder == "of another":
        shutil.copy(model / "config.json", output / "converting")
        message = "it has converting, and is not written over"
    before = contents(output)
    with pytest.raises(ConfigError, match=message):
        convert(model, output)
    assert contents(output) == before
    if folder != "of another":
        convert(model, output, is_forced=True)
        assert not (output / "model.safetensors").exists() and (output / "config.json").is_file()


@pytest.mark.parametrize("is_there", [False, True])
def test_what_a_killed_conversion_left_is_written_over(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    is_there: bool,
) -> None:
    """Killed while files are put in place: by an error that nothing catches, with the first file moved."""
    output = tmp_path / "output"
    if is_there:
        convert(model, output)

    def move(source: Path, target: Path) -> None:
        shutil.move(source, target)
        raise KeyboardInterrupt

    with (
        monkeypatch.context() as patch,
        pytest.raises(KeyboardInterrupt),
        staged_output.staged(output, lambda: None) as folder,
    ):
        shutil.copytree(model, folder, dirs_exist_ok=True)
        patch.setattr(staged_output.os, "replace", move)
    assert (output / "converting").is_dir() and not (output / "config.json").exists()
    with pytest.raises(CheckpointError, match=r"output has no config\.json: `trtrun convert` has not ended there"):
        read_model_config(output)
    assert not capsys.readouterr().err
    convert(model, output)
    said = capsys.readouterr().err
    assert "output: what a killed `trtrun convert` left goes, and all is written anew" in said
    assert {"config.json", "rank0.safetensors"} < contents(output).keys()
    assert not list(output.glob("model*")) and not (output / "converting").exists()


@pytest.mark.parametrize("reason", ["ranks", "numbers", "tensor"])
def test_a_conversion_that_fails_changes_nothing(model: Path, tmp_path: Path, reason: str) -> None:
    output = tmp_path / "output"
    convert(model, output)
    before = contents(output)
    more = {"ranks": {"tp_size": 8}, "numbers": {"dtype": "float16"}, "tensor": {}}[reason]
    if reason == "numbers":
        edit_tensors(model, {"model.norm.weight": torch.full((64,), 1e6)})
    if reason == "tensor":
        tensors = load_file(model / "model.safetensors")
        del tensors["model.layers.1.mlp.down_proj.weight"]
        save_file(tensors, model / "model.safetensors")
    with pytest.raises((TrtrunError, ParallelError)):
        convert(model, output, is_forced=True, **more)
    assert contents(output) == before and not (output / "converting").exists()
    with pytest.raises((TrtrunError, ParallelError)):
        convert(model, tmp_path / "new", **more)
    assert not (tmp_path / "new").exists()


def test_a_tokenizer_of_the_checkpoint_before_does_not_stay(model: Path, tmp_path: Path) -> None:
    """It would be read with the new weights."""
    (model / "added_tokens.json").write_text("{}")
    convert(model, tmp_path / "output")
    for name in ("added_tokens.json", "tokenizer.json"):
        (model / name).unlink()
    convert(model, tmp_path / "output", is_forced=True)
    assert not {"added_tokens.json", "tokenizer.json"} & contents(tmp_path / "output").keys()


def test_two_conversions_do_not_write_to_one_directory(model: Path, tmp_path: Path) -> None:
    output = tmp_path / "output"
    with staged_output.staged(output, lambda: None) as folder:
        with pytest.raises(ConfigError, match="output: another trtrun writes there now: wait for it, or name another"):
            convert(model, output)
        (folder / "config.json").write_text("{}")
    assert contents(output) == {"config.json": b"{}"}


def test_what_came_after_the_first_look_stays(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trtrun.tools.conversion import source

    output = tmp_path / "output"

    def open_source(*arguments: object) -> object:
        monkeypatch.undo()
        convert(model, output)
        return source.open_source(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(source, "open_source", open_source)
    with pytest.raises(ConfigError, match="a checkpoint is there; --force"):
        convert(model, output, tp_size=2)
    assert "rank0.safetensors" in contents(output) and "rank1.safetensors" not in contents(output)


def test_a_model_inside_the_output_stays(model: Path, tmp_path: Path) -> None:
    (tmp_path / "output").mkdir()
    inside = tmp_path / "output" / "converting"
    shutil.copytree(model, inside)
    (inside / staged_output.MARKER).touch()
    with pytest.raises(ConfigError, match="the model lies in it"):
        convert(inside, tmp_path / "output", is_forced=True)
    assert (inside / "config.json").is_file()


def test_what_is_copied_beside_weights_is_known_again(model: Path, tmp_path: Path) -> None:
    names = ("vocab.json", "merges.txt", "added_tokens.json", "LICENSE", "NOTICE.txt", "spiece.model", "a.tiktoken")
    for name in names:
        (model / name).write_text(name)
    convert(model, tmp_path / "output")
    with pytest.raises(ConfigError, match="a checkpoint is there; --force writes over it"):
        convert(model, tmp_path / "output")
    convert(model, tmp_path / "output", is_forced=True, tp_size=2)
    assert {*names, "rank1.safetensors"} < contents(tmp_path / "output").keys()
