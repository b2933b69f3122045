"""Builds engines for tests, in this process."""

from __future__ import annotations

from pathlib import Path

from launch.commands.write_models import BuildOptions, run_build
from trtrun.configuration.engine_directory import Limits
from trtrun.tools.building.settings import BuildSettings


def build_engine(
    checkpoint: Path,
    output: Path,
    tp_size: int = 1,
    quantization: str = "none",
    dtype: str = "auto",
    device: str | None = "cpu",
    force: bool = False,
    **limits: int,
) -> Path:
    """An engine of a checkpoint; returns `output`."""
    settings = BuildSettings(tp_size, dtype, quantization, device, Limits(**limits))
    assert run_build(BuildOptions(checkpoint, output, settings, force)) == 0
    return output
