"""Which directories clients may have adapters loaded from."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from launch.serve.admission.refusals import Refusal
from launch.serve.frontend.adapters import AdapterDesk
from launch.serve.frontend.frontend import Frontend


class Asked(Exception):
    """The engine is asked to load a directory."""


class PlayedFrontend:
    """That has one name, and no adapters."""

    model_name = "base"
    adapters: tuple[str, ...] = ()

    @property
    def client(self) -> Any:
        return self

    async def change_adapters(self, change: Any) -> None:
        raise Asked(change.path)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """`good`, `linked` to it, and what leads elsewhere: by a directory, by a file of one, and in a circle."""
    below = tmp_path / "below"
    for path in (tmp_path / "elsewhere", below / "good", below / "cache", below / "config", below / "weights"):
        path.mkdir(parents=True)
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            (path / name).write_text("{}", encoding="utf-8")
    (below / "linked").symlink_to("good")
    (below / "outside").symlink_to(tmp_path / "elsewhere")
    (below / "circle").symlink_to("circle")
    for place, name in (("config", "adapter_config.json"), ("weights", "adapter_model.safetensors")):
        (below / place / name).unlink()
        (below / place / name).symlink_to(tmp_path / "elsewhere" / name)
    (below / "cache" / "adapter_config.json").unlink()
    (below / "cache" / "adapter_config.json").symlink_to("../good/adapter_config.json")
    return below


def load(directory: Path, path: str, name: str = "x") -> str:
    """The directory that the engine is asked to load."""
    desk = AdapterDesk(cast(Frontend, PlayedFrontend()), directory.resolve(), 60.0)
    with pytest.raises(Asked) as asked:
        asyncio.run(desk.load(name, path))
    return str(asked.value)


def test_what_lies_below_is_loaded(directory: Path) -> None:
    good = str((directory / "good").resolve())
    assert [load(directory, path) for path in ("good", "./cache/../good/", "linked", good)] == [good] * 4
    assert load(directory, "cache") == str((directory / "cache").resolve())


@pytest.mark.parametrize(
    "path",
    ["", ".", "..", "../elsewhere", "outside", "circle", "config", "weights", "nowhere", "good/adapter_config.json",
     "/etc", "good\0", "a" * 5000, "\ud800"],
)  # fmt: skip
def test_nothing_else_is_looked_at(directory: Path, path: str) -> None:
    desk = AdapterDesk(cast(Frontend, PlayedFrontend()), directory.resolve(), 60.0)
    with pytest.raises(Refusal, match=r"lora_path: there is no directory .* below server\.adapter_directory"):
        asyncio.run(desk.load("x", path))


@pytest.mark.parametrize("name", ["", " x", "a\nb", "a\x1b[31m", "\ud800", "x" * 201, "base"])
def test_names_that_no_adapter_may_have(directory: Path, name: str) -> None:
    desk = AdapterDesk(cast(Frontend, PlayedFrontend()), directory.resolve(), 60.0)
    with pytest.raises(Refusal, match=r"lora_name must be a line|\"base\" is the model's own"):
        asyncio.run(desk.load(name, "good"))
