"""Compiled kernels on disk: read again, and only where nobody else can have written them."""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path

import pytest
import torch

from trtrun.kernels.cpu import fused, machine, object_cache
from trtrun.kernels.cpu.fused import NORMALISE, fused_module
from trtrun.kernels.cpu.object_cache import cache_folder, read_object, write_object
from trtrun.warmup_misses import WarmupMisses, WarmupMissWatch

KEY = "a1"


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "trtrun" / "kernels"


def test_what_is_written_is_read_again(folder: Path) -> None:
    assert read_object(KEY) is None
    write_object(KEY, b"code")
    assert read_object(KEY) == b"code"
    assert os.listdir(folder) == [f"{KEY}.o"]
    assert (folder.stat().st_mode | (folder / f"{KEY}.o").stat().st_mode) & 0o077 == 0


def test_what_is_not_whole_is_not_read(folder: Path) -> None:
    write_object(KEY, b"code")
    path = folder / f"{KEY}.o"
    for content in (path.read_bytes()[:-1], b"", path.read_bytes().replace(b"code", b"c0de")):
        path.write_bytes(content)
        assert read_object(KEY) is None


@pytest.mark.parametrize("is_folder", [False, True])
def test_what_others_may_write_is_not_read(folder: Path, is_folder: bool) -> None:
    write_object(KEY, b"code")
    path = folder if is_folder else folder / f"{KEY}.o"
    path.chmod(path.stat().st_mode | 0o002)
    assert read_object(KEY) is None


def test_what_another_user_has_written_is_not_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_object(KEY, b"code")
    assert read_object(KEY) is not None
    if os.geteuid() == 0:
        os.chown(folder / f"{KEY}.o", 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert read_object(KEY) is None


def test_what_an_image_has_is_read_where_the_user_has_none(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_object(KEY, b"code")
    folder.rename(tmp_path / "kernels")
    assert read_object(KEY) is None
    (tmp_path / "share" / "trtrun").mkdir(parents=True)
    (tmp_path / "kernels").rename(tmp_path / "share" / "trtrun" / "kernels")
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert read_object(KEY) == b"code"
    write_object(KEY, b"newer")
    assert read_object(KEY) == b"newer"


def test_a_link_is_not_followed(folder: Path) -> None:
    write_object(KEY, b"code")
    (folder / "b2.o").symlink_to(folder / f"{KEY}.o")
    assert read_object("b2") is None


def test_a_folder_that_cannot_be_made_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    write_object(KEY, b"code")
    assert read_object(KEY) is None


def test_without_a_home_there_is_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", "also/relative")
    assert cache_folder() is None
    write_object(KEY, b"code")
    assert read_object(KEY) is None


def test_files_are_few(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(object_cache, "MOST_FILES", 2)
    for number in range(4):
        write_object(f"k{number}", b"code")
        os.utime(folder / f"k{number}.o", (number, number))
    assert sorted(os.listdir(folder)) == ["k2.o", "k3.o"]


needs_kernels = pytest.mark.skipif(
    machine.processor_kind() is None, reason="needs a processor with AVX2, libgomp and llvmlite"
)


@needs_kernels
def test_kernels_are_compiled_once_for_each_kind_of_processor(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    compiled: list[object] = []
    compile_module = machine._compile
    monkeypatch.setattr(machine, "_compile", lambda module: compiled.append(module) or compile_module(module))
    for _ in range(2):
        assert list(machine.load_kernels(fused_module, False, False, names=(NORMALISE,))) == [NORMALISE]
    assert len(compiled) == 1 and len(os.listdir(folder)) == 1
    monkeypatch.setattr(machine, "processor_name", lambda: "x86-64-v4")
    machine.load_kernels(fused_module, False, False, names=(NORMALISE,))
    assert len(compiled) == 2


@needs_kernels
@pytest.mark.parametrize("is_on_disk", [False, True])
def test_a_kernel_counts_when_it_is_made_ready_and_not_when_it_is_used(
    monkeypatch: pytest.MonkeyPatch, is_on_disk: bool
) -> None:
    """Whoever waits for it waits for what is read and linked, too."""
    load = fused._kernels.__wrapped__
    if is_on_disk:
        load(machine.processor_kind() == machine.MULTIPLIES_BFLOAT16, False)
    monkeypatch.setattr(fused, "_kernels", functools.cache(load))  # as in a process that has used none yet
    watch, halves = WarmupMissWatch(), torch.ones(3, 64, dtype=torch.bfloat16)
    results = []
    for expected in (WarmupMisses(compilations=1), WarmupMisses(), WarmupMisses()):
        results.append(fused.activate_and_multiply(halves))
        assert watch.take() == expected
    assert torch.equal(results[0], results[1])
