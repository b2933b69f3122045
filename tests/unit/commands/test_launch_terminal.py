"""Progress bars: where they show, and that they clean up after themselves."""

from __future__ import annotations

import pytest

from launch.mpi.mpirun import OUTPUT_VARIABLE, TERMINAL_VARIABLE
from launch.terminal import Bar, output_console


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
