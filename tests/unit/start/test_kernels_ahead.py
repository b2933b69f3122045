"""What a start leaves for later ones: a mark that says what it measured, and that is gone with the kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

pytest.importorskip("triton", reason="needs triton: pip install triton")
from triton import knobs

from trtrun.kernels.library_speeds import Speeds, WeightSpeeds
from trtrun.kernels.triton.compilation import compile_processes
from trtrun.kernels.triton.matmul import dense as matmul
from trtrun.start import kernels_ahead
from trtrun.start.kernels_ahead import KernelsAhead, has_mark, mark_file

GPU = torch.device("cuda", 0)
LIKE = ["a pair", 8]
ROW = 100


class Played:
    """In the place of processes: what they were asked for."""

    started: ClassVar[list[Played]] = []

    def __init__(self, count: int) -> None:
        self.count, self.requests, self.is_closed = count, list[Any](), False
        Played.started.append(self)

    def submit(self, request: Any) -> None:
        """Keep it."""
        self.requests.append(request)

    def wait(self) -> int:
        """All were compiled."""
        return len(self.requests)

    def close(self) -> None:
        """Be closed."""
        self.is_closed = True


@pytest.fixture(autouse=True)
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU as far as is asked for it, and an empty cache."""
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path / "cache"))
    monkeypatch.setattr(compile_processes, "CompileProcesses", Played)
    monkeypatch.setattr(kernels_ahead, "triton_works", lambda device_type: True)
    monkeypatch.setattr(matmul, "_speeds", {})
    monkeypatch.setattr(Played, "started", [])


def test_a_start_that_ended_well_spares_later_ones_the_work(tmp_path: Path) -> None:
    first = KernelsAhead(LIKE, GPU, 1, ROW)
    assert first.working_bytes is None and len(Played.started) == 1
    played: list[int] = []
    first.compile(lambda: played.append(1))
    assert played == [1] and Played.started[0].is_closed
    speeds = [WeightSpeeds(64, 32, "torch.bfloat16", Speeds((True, False), (False, True)))]
    matmul.remember_speeds(speeds)
    first.finish(12345)
    matmul._speeds.clear()
    later = KernelsAhead(LIKE, GPU, 1, ROW)
    assert later.working_bytes == 12345 and len(Played.started) == 1
    assert matmul.known_speeds() == speeds
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [later._mark.name]  # type: ignore[union-attr]
    assert KernelsAhead([*LIKE, "another"], GPU, 1, ROW).working_bytes is None


@pytest.mark.parametrize(
    "content", [b"", b"{", b'{"working_bytes": 0, "longest": 100, "speeds": []}', b'{"working_bytes": 5}', b"\xff"]
)
def test_a_mark_that_says_nothing_is_none(content: bytes) -> None:
    first = KernelsAhead(LIKE, GPU, 1, ROW)
    first.finish(5)
    assert first._mark is not None
    first._mark.write_bytes(content)
    again = KernelsAhead(LIKE, GPU, 1, ROW)
    assert again.working_bytes is None
    again.finish(7)
    assert KernelsAhead(LIKE, GPU, 1, ROW).working_bytes == 7


def test_a_mark_says_nothing_of_longer_rows() -> None:
    KernelsAhead(LIKE, GPU, 1, ROW).finish(5)
    longer = KernelsAhead(LIKE, GPU, 1, ROW + 1)
    assert longer.working_bytes is None and KernelsAhead(LIKE, GPU, 1, ROW - 1).working_bytes == 5
    longer.finish(7)
    assert KernelsAhead(LIKE, GPU, 1, ROW + 1).working_bytes == 7


def test_a_start_that_failed_leaves_no_mark_and_no_process(tmp_path: Path) -> None:
    failed = KernelsAhead(LIKE, GPU, 1, ROW)
    failed.close()
    assert Played.started[0].is_closed and not (tmp_path / "cache").exists()


def test_a_machine_that_starts_no_process_compiles_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(count: int) -> Played:
        raise OSError("no more processes")

    monkeypatch.setattr(compile_processes, "CompileProcesses", refuse)
    ahead, played = KernelsAhead(LIKE, GPU, 1, ROW), list[int]()
    ahead.compile(lambda: played.append(1))
    ahead.finish(5)
    assert played == [1] and KernelsAhead(LIKE, GPU, 1, ROW).working_bytes == 5


def test_a_mark_can_be_looked_for_without_a_start(tmp_path: Path) -> None:
    mark = mark_file(LIKE, GPU)
    assert mark is not None and not has_mark(mark, ROW)
    KernelsAhead(LIKE, GPU, 1, ROW).finish(5)
    assert has_mark(mark, ROW)
    elsewhere = mark_file(LIKE, GPU, str(tmp_path / "other"))
    assert elsewhere == tmp_path / "other" / mark.name and not has_mark(elsewhere, ROW)
    assert mark_file(LIKE, torch.device("cpu")) is None


def test_processors_have_nothing_to_compile_ahead() -> None:
    on_cpu = KernelsAhead(LIKE, torch.device("cpu"), 1, ROW)
    on_cpu.finish(5)
    assert not Played.started
