"""Directories that a run of `trtrun quantize` may have left behind, or that are somebody else's."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import make_checkpoint

from trtrun.errors import ConfigError
from trtrun.quantizing.directory import check_output


@pytest.mark.parametrize("is_forced", [False, True])
def test_what_is_somebody_elses_is_kept(tmp_path: Path, is_forced: bool) -> None:
    """Whatever its folders are called."""
    source, mine = make_checkpoint(tmp_path / "source"), make_checkpoint(tmp_path / "mine")
    (mine / "quantizing").mkdir()
    with pytest.raises(ConfigError, match="was not made by trtrun quantize"):
        check_output(mine, source, is_forced)


@pytest.mark.parametrize("is_forced", [False, True])
def test_a_model_inside_the_output_is_refused(tmp_path: Path, is_forced: bool) -> None:
    """What is cleared away would be the model."""
    inner = make_checkpoint(tmp_path / "outer" / "quantizing")
    (inner / "run.json").write_text("{}")
    with pytest.raises(ConfigError, match="the model lies in it"):
        check_output(tmp_path / "outer", inner, is_forced)
