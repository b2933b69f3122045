"""A family of another package that is installed: found by its entry point, in this process and in those that it
starts."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint
from custom_family import make_custom_checkpoint
from paged import PagedModel

from trtrun.errors import CheckpointError
from trtrun.models.config import read_model_config
from trtrun.registry import MODEL_FAMILIES

HELPERS = Path(__file__).resolve().parents[2] / "helpers"
MODULE = """
from custom_family import ARCHITECTURE, FAMILY, MODEL_FAMILIES
MODEL_FAMILIES.register(ARCHITECTURE)(FAMILY)
"""


def install(site: Path, architecture: str, source: str) -> Path:
    """A package with a family, as pip would leave it."""
    told = site / "own_family-1.0.dist-info"
    told.mkdir(parents=True)
    (told / "METADATA").write_text("Metadata-Version: 2.1\nName: own-family\nVersion: 1.0\n")
    (told / "entry_points.txt").write_text(f"[trtrun_families]\n{architecture} = own_family\n")
    (site / "own_family.py").write_text(source)
    return site


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    from custom_family import custom_family

    with custom_family():
        return make_custom_checkpoint(tmp_path / "model")


def test_a_command_finds_it(tmp_path: Path, checkpoint: Path) -> None:
    site = install(tmp_path / "site", "FourNormsForCausalLM", MODULE)
    places = os.pathsep.join([str(site), str(HELPERS), os.environ.get("PYTHONPATH", "")])
    config = {"target": {"model": str(checkpoint), "devices": ["cpu:0"]}, "threads": 1}
    config |= {"speculation": {"method": "ngram"}, "kv_cache": {"max_tokens": 512}}
    (tmp_path / "job.yaml").write_text(json.dumps(config))
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt_token_ids": [5, 6, 7]}))
    words = ["run", "--config", str(tmp_path / "job.yaml"), "--prompts", str(tmp_path / "prompts.jsonl")]
    words += ["--max-tokens", "4", "--output", str(tmp_path / "texts.jsonl")]
    ended = subprocess.run(
        [sys.executable, "-m", "launch.cli", *words],
        env={**os.environ, "PYTHONPATH": places}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert len(json.loads((tmp_path / "texts.jsonl").read_text())["token_ids"]) == 4


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import there_is_no_such_thing", "cannot be loaded from own_family: ModuleNotFoundError"),
        ("1 / 0", "cannot be loaded from own_family: ZeroDivisionError"),
        ("pass", "own_family, which the family of FourNormsForCausalLM is said to be in, does not register it"),
    ],
)
def test_what_is_wrong_with_it_is_said_in_a_line(
    tmp_path: Path, checkpoint: Path, source: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(install(tmp_path / "site", "FourNormsForCausalLM", source)))
    monkeypatch.delitem(sys.modules, "own_family", raising=False)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_model_config(checkpoint)
    assert "\n" not in str(caught.value) and "FourNormsForCausalLM" not in MODEL_FAMILIES


def test_without_it_the_page_about_families_is_named(checkpoint: Path) -> None:
    with pytest.raises(CheckpointError, match=r"unknown architecture 'FourNorms.*docs/adding-a-model\.md"):
        read_model_config(checkpoint)


def test_the_family_of_the_page_is_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama's layers under another name: what the page says is installed as it stands there."""
    page = (HELPERS.parents[1] / "docs" / "adding-a-model.md").read_text(encoding="utf-8")
    (source,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    assert page.count('[project.entry-points."trtrun_families"]\nNewForCausalLM = "package.module"') == 1
    monkeypatch.delitem(sys.modules, "own_family", raising=False)
    monkeypatch.syspath_prepend(str(install(tmp_path / "site", "NewForCausalLM", source)))
    path, tokens = make_checkpoint(tmp_path / "model", seed=1), list(range(3, 40))
    expected = PagedModel(path).forward([[(0, 0, tokens)]])
    values = json.loads((path / "config.json").read_text(encoding="utf-8"))
    (path / "config.json").write_text(json.dumps(values | {"architectures": ["NewForCausalLM"], "model_type": "new"}))
    try:
        assert torch.equal(PagedModel(path).forward([[(0, 0, tokens)]]), expected)
    finally:
        MODEL_FAMILIES._items.pop("NewForCausalLM", None)
