"""`trtrun init` on made-up caches of tiny checkpoints and with a stand-in for sinfo: the files are loaded again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from checkpoints import make_checkpoint, make_tokenizer
from hub_caches import fill_cache
from huggingface_hub import constants

from launch.cli import cli
from trtrun.configuration.config import RuntimeConfig, load_config
from trtrun.configuration.model_paths import ASSETS
from trtrun.errors import CheckpointError, ConfigError

Init = Callable[..., tuple[RuntimeConfig, str]]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with nothing in it, in a folder of its own, without Slurm."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hub"


@pytest.fixture
def init(cache: Path) -> Init:
    """Runs the command; returns what its file means, and says."""

    def run(*words: str) -> tuple[RuntimeConfig, str]:
        assert cli.main(["init", "--force", *words], standalone_mode=False) == 0
        return load_config("run.yaml"), Path("run.yaml").read_text(encoding="utf-8")

    return run


def add(cache: Path, name: str, *, layers: int = 2, special: tuple[str, ...] = (), ref: str = "main") -> Path:
    """Put a tiny model with a tokenizer into a cache; returns its snapshot."""
    made = make_checkpoint(cache.parent / "made" / name, num_hidden_layers=layers, vocab_size=300)
    make_tokenizer(made, special=special)
    return fill_cache(cache, name, made, ref)


def test_without_models_it_is_the_shipped_pair(init: Init, capsys: pytest.CaptureFixture[str]) -> None:
    config, text = init()
    assert (config.target.model, config.draft_devices) == (ASSETS / "target", ("cpu:0",))
    assert config.draft is not None and config.draft.model == ASSETS / "draft"
    for said in ("no model that fits", "sinfo is not on PATH", "trtrun plan says that it fits"):
        assert said in text.replace("\n# ", " ")
    capsys.readouterr()
    assert cli.main(["init", "--output", "-"], standalone_mode=False) == 0
    assert capsys.readouterr().out == text
    with pytest.raises(ConfigError, match=r"run\.yaml is there already: --force"):
        cli.main(["init"], standalone_mode=False)


def test_the_largest_model_that_fits_and_a_draft_of_its_tokenizer(cache: Path, init: Init) -> None:
    add(cache, "org/large", layers=12)
    add(cache, "org/half", layers=7)
    add(cache, "org/small", layers=2, ref="v1")
    add(cache, "org/another-tokenizer", layers=1, special=("<|other|>",))
    broken = add(cache, "org/broken", layers=14) / "config.json"
    values = json.loads(broken.read_text(encoding="utf-8"))
    broken.unlink()
    broken.write_text(json.dumps({**values, "num_hidden_layers": 15}), encoding="utf-8")
    config, text = init()
    assert "model: org/large\n" in text and "model: org/small@v1\n" in text
    assert config.speculation.method == "draft_target"
    assert "# In the cache; it has the target's tokenizer, and has " in text
    config, text = init("--model", "org/small@v1")  # nothing is half as large
    assert config.speculation.method == "ngram" and config.draft is None
    named = (cache.parent / "made" / "org" / "large").rename(cache.parent / "FILES")  # a word of the help
    assert init("--model", str(named))[0].target.model == init(str(named))[0].target.model == named
    for words, line in (
        ((str(named), "--model", "x"), "are two models: name one"),
        (("--output", str(cache)), "is a directory: name a file"),
    ):
        with pytest.raises((click.UsageError, ConfigError), match=line):
            init(*words)
    _, text = init("--model", "org/large", "--draft", "org/half", "--devices", "cpu:0,cpu:1")
    assert "model: org/half\n" in text and text.count("devices: ['cpu:0', 'cpu:1']") == 2
    with pytest.raises(CheckpointError, match=r"model\.layers\.14\."):
        init("--model", "org/broken")


def test_heads_that_are_named_for_the_target(cache: Path, init: Init) -> None:
    fill_cache(cache, "org/Coder-1.5", ASSETS / "target")
    heads = fill_cache(cache, "other/heads", ASSETS / "eagle3")
    assert init()[0].speculation.method == "ngram"  # nothing says whose they are
    (heads / "README.md").write_text("---\nbase_model: org/Coder-1.5\n---\n", encoding="utf-8")
    config, text = init()
    assert config.speculation.method == "eagle3" and config.heads is not None
    assert "model: org/Coder-1.5\n" in text and "model: other/heads\n" in text
    shutil.rmtree(heads.parents[1])
    fill_cache(cache, "other/EAGLE3-Coder-1.5", ASSETS / "eagle3")
    assert "model: other/EAGLE3-Coder-1.5\n" in init()[1]


def test_a_partition_with_gpus_where_this_host_has_none(cache: Path, init: Init) -> None:
    sinfo = cache.parent / "bin" / "sinfo"
    lines = ("cpu*|up|1-00:00:00|16|(null)", "gone|down|1:00|2|gpu:8", "fast|up|2:00:00|4|gpu:a100:4(S:0-1)")
    sinfo.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines), encoding="utf-8")
    sinfo.chmod(0o755)
    config, text = init()
    assert config.target.devices == ("cuda:0",)
    assert config.launch.slurm is not None and "slurm: {partition: fast}\n" in text
    assert "cpu (16 nodes, up to 1-00:00:00), fast (4 nodes of gpu:a100:4(S:0-1), up to 2:00:00)" in text.replace(
        "\n# ", " "
    )
    assert "trtrun submit --config run.yaml -- serve" in text and "gone" not in text
    sinfo.write_text("#!/bin/sh\necho 'slurm_load_partitions: no controller' >&2; exit 1\n", encoding="utf-8")
    config, text = init()
    assert config.target.devices == ("cpu:0",) and "sinfo failed" in text
