"""Progress bars: where they show, and that they clean up after themselves."""

from __future__ import annotations

import re
import threading

import pytest

from launch.jobs.mpi.mpirun import OUTPUT_VARIABLE, TERMINAL_VARIABLE
from launch.jobs.terminal import NEWS_VARIABLE, Bar, output_console


def draw() -> None:
    with Bar("loading", in_bytes=True) as bar:
        bar.update(1_000_000, 4_000_000)
        bar.update(1_100_000, 4_000_000)  # too soon to be drawn
        bar.update(4_000_000, 4_000_000)


def test_no_bar_without_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TERMINAL_VARIABLE, raising=False)
    draw()
    assert capsys.readouterr().err == ""


def test_a_rank_draws_on_the_terminal_that_its_parent_saw(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TERMINAL_VARIABLE, "60")
    draw()
    shown = capsys.readouterr().err
    assert shown.split("\r")[1].startswith("loading [")
    assert "1.0 of 4.0 MB" in shown and "4.0 of 4.0 MB" in shown and "1.1 of" not in shown
    assert shown.endswith("\r\033[K")
    assert "\n" not in shown
    assert all(len(part.removesuffix("\033[K")) <= 60 for part in shown.split("\r"))


def test_only_rank_0_draws(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TERMINAL_VARIABLE, "60")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    draw()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("is_terminal", [True, False])
def test_colours_are_for_terminals(monkeypatch: pytest.MonkeyPatch, is_terminal: bool) -> None:
    monkeypatch.setenv(OUTPUT_VARIABLE, str(int(is_terminal)))
    monkeypatch.setenv(TERMINAL_VARIABLE, "80")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert output_console().is_terminal is is_terminal


class Told:
    """Stands for standard error, and says when something was written that a pattern is found in."""

    def __init__(self, text: str) -> None:
        self.is_there = threading.Event()
        self.written = ""
        self._text = text

    def isatty(self) -> bool:
        return False

    def write(self, text: str) -> None:
        self.written += text
        if re.search(self._text, self.written):
            self.is_there.set()

    def flush(self) -> None:
        pass


@pytest.mark.parametrize(
    ("given", "updates", "told"),
    [
        ({}, [], r"trtrun: loading: \d+ s so far\n"),
        ({}, [(3, 9)], r"trtrun: loading: 3 of 9 after \d+ s\n"),
        ({}, [(3, 9), (4, 9)], r"trtrun: loading: 4 of 9 after \d+ s, about \d+ s to go\n"),
        ({"then": "trying rounds"}, [(9, 9)], r"trtrun: trying rounds: \d+ s so far\n"),
    ],
)
def test_without_a_terminal_a_long_work_says_now_and_then_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], updates: list[tuple[int, int]], told: str
) -> None:
    monkeypatch.delenv(TERMINAL_VARIABLE, raising=False)
    monkeypatch.setenv(NEWS_VARIABLE, "0.01")
    heard = Told(told)
    monkeypatch.setattr("sys.stderr", heard)
    with Bar("loading", **given) as bar:  # type: ignore[arg-type]
        for done, total in updates:
            bar.update(done, total)
        assert heard.is_there.wait(60)
    assert not [thread for thread in threading.enumerate() if thread.name == "progress"]


def test_a_bar_that_stands_still_says_for_how_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TERMINAL_VARIABLE, "60")
    monkeypatch.setattr("launch.jobs.terminal.SECOND", 0.01)
    monkeypatch.setattr("launch.jobs.terminal.SILENT_SECONDS", 0.0)
    heard = Told(r"\] 3 of 9, \d+ s")
    monkeypatch.setattr("sys.stderr", heard)
    with Bar("loading") as bar:
        bar.update(3, 9)
        assert heard.is_there.wait(60)
    assert heard.written.endswith("\r\033[K") and "\n" not in heard.written
