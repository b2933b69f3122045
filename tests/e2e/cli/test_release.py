"""What is released: scripts/release.sh builds it, and runs the shipped pair with the wheel in an empty environment."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from commands import ROOT, command_environment

from trtrun import __version__

PACKAGES = ("launch", "parallel", "trtrun")
pytest.importorskip("twine", reason="needs the extra release: build and twine")


def test_the_release_is_built_and_its_wheel_works(tmp_path: Path) -> None:
    environment = command_environment({"TRTRUN_PYTHON": sys.executable})
    done = subprocess.run(
        ["bash", str(ROOT / "scripts" / "release.sh"), str(tmp_path)],
        env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=170,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    wheel, archive = map(Path, done.stdout.split())
    assert archive.name == f"trtrun-{__version__}.tar.gz" and archive.is_file()
    assert "1 prompt, 8 tokens" in done.stderr
    with zipfile.ZipFile(wheel) as files:
        packed = {name for name in files.namelist() if name.startswith(PACKAGES)}
    tracked = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.*")
        if path.is_file() and path.suffix not in (".pyc", ".md")
    }
    assert not tracked - packed
