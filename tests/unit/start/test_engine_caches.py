"""Compiled kernels of engines: where starts leave them and find them, and what is said where they are another GPU's."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint
from engines import build_engine

from trtrun.configuration.engine_sections import ModelSection
from trtrun.start import engine_caches
from trtrun.start.engine_caches import VARIABLE, EngineCache, copy_missing, find_cache, kernels_folder

GPU = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU as far as is asked for it, and no folder of the user's."""
    monkeypatch.setenv(VARIABLE, "to be restored")
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setattr(engine_caches, "_ours", set())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H1")


@pytest.fixture
def sections(tmp_path: Path) -> dict[str, ModelSection]:
    source = make_checkpoint(tmp_path / "source")
    paths = {"source": source, **{name: build_engine(source, tmp_path / name) for name in ("first", "second")}}
    return {name: ModelSection(model=path, devices=["cuda:0"]) for name, path in paths.items()}  # type: ignore[arg-type]


def test_a_start_leaves_kernels_in_the_engine(sections: dict[str, ModelSection], tmp_path: Path) -> None:
    first = tmp_path / "first" / "cache"
    assert find_cache([sections["source"], None, sections["first"], sections["second"]]) == first
    assert kernels_folder([sections["first"]]) == str(first / "triton")
    cache = EngineCache([sections["first"]], GPU)
    cache.begin()
    assert os.environ[VARIABLE] == str(first / "triton")
    # A second engine in one process has its own, and a checkpoint the user's.
    EngineCache([sections["second"]], GPU).begin()
    assert os.environ[VARIABLE] == str(tmp_path / "second" / "cache" / "triton")
    EngineCache([sections["source"]], GPU).begin()
    assert VARIABLE not in os.environ
    EngineCache([sections["first"]], torch.device("cpu")).begin()
    assert VARIABLE not in os.environ and kernels_folder([sections["source"]]) is None


def test_a_folder_that_the_user_has_named_goes_before(
    sections: dict[str, ModelSection], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "/mine")
    cache = EngineCache([sections["first"]], GPU)
    cache.begin()
    cache.finish()
    assert os.environ[VARIABLE] == "/mine" and not (tmp_path / "first" / "cache").exists()
    assert kernels_folder([sections["first"]]) is None


def test_another_gpu_compiles_again_and_says_so(
    sections: dict[str, ModelSection], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(finds_nothing: bool = True) -> list[str]:
        caplog.clear()
        cache = EngineCache([sections["first"]], GPU)
        cache.begin()
        with caplog.at_level(logging.WARNING):
            if finds_nothing:
                cache.say_what_lacks()
        cache.finish()
        return caplog.messages

    assert start() == [] and start() == []
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H2")
    (said,) = start()
    assert "its kernels are compiled for H1, Triton" in said and "and will be for H2, Triton" in said
    assert start() == [], "another configuration on a GPU that is known"
    (Path(sections["first"].model) / "cache" / "made_for.json").write_text("damaged")
    assert start() == []


def test_what_is_read_only_is_copied_to_the_users_cache(
    sections: dict[str, ModelSection], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, mine = tmp_path / "first" / "cache" / "triton", tmp_path / "mine"
    for folder, text in ((theirs / "kernel", "new"), (theirs / "both", "theirs"), (mine / "both", "mine")):
        folder.mkdir(parents=True)
        (folder / "code").write_text(text)
    (theirs / "mark").write_text("12")
    monkeypatch.setattr(engine_caches, "_may_write", lambda cache: False)
    monkeypatch.setattr(engine_caches, "_own_folder", lambda: mine)
    cache = EngineCache([sections["first"]], GPU)
    cache.begin()
    cache.finish()
    assert VARIABLE not in os.environ and not (theirs.parent / "made_for.json").exists()
    found = {str(file.relative_to(mine)): file.read_text() for file in mine.rglob("*") if file.is_file()}
    assert found == {"kernel/code": "new", "both/code": "mine", "mark": "12"}
    copy_missing(theirs, mine)  # nothing is left to do
    assert len(list(mine.iterdir())) == 3


@pytest.mark.parametrize("place", ["cache", "cache/triton"])
def test_what_is_no_folder_is_not_compiled_to(sections: dict[str, ModelSection], tmp_path: Path, place: str) -> None:
    file = tmp_path / "first" / place
    file.parent.mkdir(exist_ok=True)
    file.write_text("mine")
    cache = EngineCache([sections["first"]], GPU)
    cache.begin()
    cache.finish()
    assert VARIABLE not in os.environ and kernels_folder([sections["first"]]) is None
    assert file.read_text() == "mine"


@pytest.mark.parametrize("is_folder", [False, True])
def test_a_copy_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_folder: bool) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "kernel").mkdir(parents=True)
    (source / "kernel" / "code").write_text("code")

    def copy(file: str | Path, place: str | Path, **more: object) -> None:
        Path(place).write_text("c")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(engine_caches.shutil, "copyfile", copy)
    with pytest.raises(OSError):
        copy_missing(source if is_folder else source / "kernel", target)
    assert list(target.iterdir()) == []
