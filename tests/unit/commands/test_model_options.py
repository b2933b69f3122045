"""Commands without a YAML file: what their words amount to, printed and read again, and what they refuse."""

from __future__ import annotations

import json
import re
from pathlib import Path

import click
import pytest
import yaml

from launch.cli import cli
from launch.commands.model_options import settle
from trtrun.configuration.config import RuntimeConfig, load_config, make_config
from trtrun.configuration.model_paths import ASSETS
from trtrun.configuration.yaml_source import COMMAND_LINE, read_values
from trtrun.errors import ConfigError, TrtrunError


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.main([*words, "--print-config"], standalone_mode=False) == 0
    return capsys.readouterr().out


def read_elsewhere(text: str, folder: Path) -> RuntimeConfig:
    """What a file in another folder means."""
    folder.mkdir(exist_ok=True)
    (folder / "run.yaml").write_text(text, encoding="utf-8")
    return load_config(folder / "run.yaml")


@pytest.mark.parametrize("command", ["run", "serve", "chat", "bench", "plan", "check", "warm-up"])
def test_the_printed_file_means_the_same(
    command: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ASSETS)  # ./target is there
    words = ["./target", "--draft", "asset:draft", "--devices", "cpu:0,cpu:1", "--draft-devices", "cpu:1"]
    words += ["--draft-len", "7", "--max-batch-size", "3", "--max-seq-len", "500", "--set", "kv_cache.dtype=fp8"]
    text = printed(capsys, command, *words)
    section = {"model": str(ASSETS / "target"), "devices": ["cpu:0", "cpu:1"]}
    meant = {
        "target": section,
        "draft": {"model": "asset:draft", "devices": ["cpu:1"]},
        "speculation": {"draft_len": 7, "method": "draft_target"},
        "scheduler": {"max_batch_size": 3, "max_seq_len": 500},
        "kv_cache": {"dtype": "fp8"},
    }
    assert yaml.safe_load(text) == meant
    assert read_elsewhere(text, tmp_path) == make_config(meant)
    assert "  # the draft is a model\n  method: draft_target" in text


def test_a_file_is_printed_with_its_changes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "model").symlink_to(ASSETS / "target")
    file = tmp_path / "a" / "run.yaml"
    values = {"target": {"model": "../model", "devices": ["cpu:0"]}, "speculation": {"method": "none"}}
    file.write_text(json.dumps(values), encoding="utf-8")
    text = printed(capsys, "serve", "--config", str(file), "--method", "ngram", "--draft-len", "2", "--http-port", "0")
    assert read_elsewhere(text, tmp_path / "b") == load_config(
        file, ["speculation={method: ngram, draft_len: 2}", "server.http_port=0"]
    )


def test_what_is_set_is_not_chosen() -> None:
    overrides = ("target.model=asset:target", "target.devices=[cpu:3]", "speculation.draft_len=2")
    settled = settle(None, overrides, "none", {})
    assert not settled.choices
    values = read_values(settled.path, [*settled.overrides, "speculation.method=none"])
    assert settled.path == COMMAND_LINE and make_config(values).target.devices == ("cpu:3",)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "name a model's directory, such as .*, or --config FILE"),
        (("asset:target", "--config", "run.yaml"), "'asset:target' and --config exclude each other"),
        (("nowhere",), r"MODEL: no such directory: .*/nowhere$"),
        (("org/model",), r"MODEL: .*run `hf download org/model`"),
        (("file",), "MODEL: file is a file: name the model's directory"),
        (("asset:target", "--draft", "nowhere"), "--draft: no such directory"),
        (("asset:tarjet",), r"unknown asset 'asset:tarjet' \(did you mean 'asset:target'\?\)"),
        (("asset:target", "--devices", "0,x"), "'x' is no device"),
        (("asset:target", "--devices", "0,0"), "cuda:0 stands more than once"),
        (("asset:target", "--devces", "0"), "--devices"),
        (("asset:target", "--max-batch-size", "0"), "the command line: scheduler.max_batch_size"),
        (("asset:target", "--print-config", "--set", "launch.pbs.quue=x"), r"launch\.pbs\.quue: unknown key"),
    ],
)
def test_refusals(words: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    with pytest.raises((click.ClickException, TrtrunError)) as caught:
        cli.main(["run", "--prompt", "x", *words], standalone_mode=False)
    error = caught.value
    assert isinstance(error, ConfigError | click.ClickException)
    text = error.format_message() if isinstance(error, click.ClickException) else str(error)
    assert re.search(said, text), text


def test_a_model_without_chats_is_refused_before_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launch.chat.own_server.own_server", lambda words: pytest.fail("it is loaded"))
    with pytest.raises(ConfigError, match="the model has no chat template: use trtrun run, or add"):
        cli.main(["chat", "asset:target"], standalone_mode=False)
