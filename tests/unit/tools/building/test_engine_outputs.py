"""A build loses nothing that nobody gave up, and leaves nothing of the engine before; killed, it is built again."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from checkpoints import make_checkpoint
from engines import build_engine
from paged import PagedModel

from trtrun.errors import CheckpointError, ConfigError
from trtrun.models.config import read_model_config
from trtrun.tools.building.settings import building
from trtrun.tools.conversion import staged_output


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "source", tokenizer=True)


@pytest.fixture
def engine(source: Path, tmp_path: Path) -> Path:
    return build_engine(source, tmp_path / "engine", 2)


def contents(directory: Path) -> dict[str, bytes]:
    return {str(file.relative_to(directory)): file.read_bytes() for file in directory.rglob("*") if file.is_file()}


def test_only_engines_are_built_anew_and_only_by_force(source: Path, engine: Path, tmp_path: Path) -> None:
    before = contents(engine)
    with pytest.raises(ConfigError, match="an engine is there; --force builds it anew"):
        build_engine(source, engine)
    assert contents(engine) == before
    (engine / "notes.txt").write_text("mine")
    build_engine(source, engine, force=True)
    assert not (engine / "rank1.safetensors").exists() and (engine / "notes.txt").exists()
    PagedModel(engine)
    other = tmp_path / "other"
    shutil.copytree(source, other)
    for force in (False, True):
        with pytest.raises(ConfigError, match="it is not empty, and trtrun build has not made it: name another one"):
            build_engine(source, other, force=force)
    (other / "building").mkdir()
    before = contents(other)
    with pytest.raises(ConfigError, match="trtrun build has not made it"):
        build_engine(source, other)
    (other / "building" / "trtrun-convert.unfinished").touch()
    with pytest.raises(ConfigError, match="trtrun build has not made it"):
        build_engine(source, other)
    assert before.items() <= contents(other).items()
    with pytest.raises(ConfigError, match="that is the model itself"):
        build_engine(source, source, force=True)


@pytest.mark.parametrize("text", ["{}", '{"format": "onnx", "trtrun": "1"}', "[" * 100_000, "", "\ud800"])
def test_directories_of_others_stay_even_by_force(source: Path, tmp_path: Path, text: str) -> None:
    """Other programs have files of that name, too, beside ranks' weights."""
    other = tmp_path / "other"
    shutil.copytree(source, other)
    (other / "model.safetensors").rename(other / "rank0.safetensors")
    (other / "engine.json").write_text(text, errors="surrogatepass")
    before = contents(other)
    with pytest.raises(ConfigError, match="trtrun build has not made it: name another one"):
        build_engine(source, other, force=True)
    assert contents(other) == before


@pytest.mark.parametrize("name", ["building", "building as a link", "tokenizer.json"])
def test_folders_of_others_in_an_engine_stay(source: Path, engine: Path, tmp_path: Path, name: str) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "text").write_text("mine")
    name, _, is_link = name.partition(" ")
    (engine / name).unlink(missing_ok=True)
    (precious.rename if not is_link else (engine / name).symlink_to)(engine / name if not is_link else precious)
    before = contents(engine)
    with pytest.raises(ConfigError, match=f"trtrun build has not made its {name}: name another directory"):
        build_engine(source, engine, force=True)
    assert contents(engine) == before and (engine / name / "text").read_text() == "mine"


def test_nothing_of_the_engine_before_is_read_with_new_weights(source: Path, engine: Path) -> None:
    (source / "tokenizer.json").unlink()
    (source / "generation_config.json").unlink()
    (engine / "cache").mkdir()
    build_engine(source, engine, force=True)
    assert {one.name for one in engine.iterdir()} == {"cache", "config.json", "engine.json", "rank0.safetensors"} | {
        one.name for one in source.glob("tokenizer*")
    }


@pytest.mark.parametrize(("output", "message"), [("loop", "it is no directory"), ("loop/engine", "in a circle")])
def test_links_in_a_circle_are_one_line(source: Path, tmp_path: Path, output: str, message: str) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(ConfigError, match=message):
        build_engine(source, tmp_path / output)


def test_two_builds_do_not_write_to_one_directory(
    source: Path, engine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(engine)
    with pytest.raises(KeyError), building(engine, lambda: None):
        with pytest.raises(ConfigError, match="engine: another trtrun writes there now: wait for it, or name another"):
            build_engine(source, engine, force=True)
        raise KeyError
    assert contents(engine) == before and not capsys.readouterr().err
    link = tmp_path / "link"
    link.symlink_to(engine)
    build_engine(source, link, force=True)


@pytest.mark.parametrize("num_moved", [1, 3, 5])
def test_the_same_command_builds_what_a_killed_one_left(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_moved: int
) -> None:
    """Killed with some files moved to their place, engine.json among them."""

    class Killed(BaseException):
        pass

    output, moved = tmp_path / "output", list[str]()

    def replace(file: Path, place: Path) -> None:
        shutil.move(file, place)
        moved.append(place.name)
        if "engine.json" in moved and len(moved) >= num_moved:
            raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed), building(output, lambda: None) as folder:
        build_engine(source, tmp_path / "made")
        shutil.copytree(tmp_path / "made", folder, dirs_exist_ok=True)
        patch.setattr(staged_output.os, "replace", replace)
    assert (output / "engine.json").is_file() and not (output / "config.json").exists()
    (output / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="--force"):
        build_engine(source, output)
    (output / "notes.txt").unlink()
    build_engine(source, output)
    PagedModel(output)


@pytest.mark.parametrize("is_there", [False, True])
def test_a_build_that_fails_or_is_killed_leaves_what_was_there(
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    is_there: bool,
) -> None:
    output = tmp_path / "output"
    if is_there:
        build_engine(source, output, max_batch_size=3)
    before = contents(output) if is_there else None

    class Killed(BaseException):
        pass

    def killed(*arguments: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("trtrun.tools.building.engine_builder.hash_header", killed)
        with pytest.raises(Killed):
            build_engine(source, output, force=True)
    assert (contents(output) if is_there else output.exists()) == (before or False)
    with monkeypatch.context() as patch, pytest.raises(Killed), building(output, lambda: None) as folder:
        shutil.copytree(source, folder, dirs_exist_ok=True)
        patch.setattr(staged_output.os, "replace", killed)  # while files are put in place
    assert (output / "building").is_dir() and not (output / "config.json").exists()
    with pytest.raises(CheckpointError, match=r"output has no config\.json: `trtrun build` has not ended there"):
        read_model_config(output)
    assert not capsys.readouterr().err
    build_engine(source, output)
    assert "output: what a killed `trtrun build` left goes, and all is written anew" in capsys.readouterr().err
    PagedModel(output)
