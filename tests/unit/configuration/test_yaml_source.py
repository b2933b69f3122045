"""What a YAML file may hold at all: refused in one line with its place, at once, whatever is written there."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.jobs.placement.devices import Allocation, fill_counts
from trtrun.configuration.config import load_config, make_config
from trtrun.configuration.yaml_source import MOST_DEPTH, MOST_VALUES, apply_override, parse_yaml
from trtrun.errors import ConfigError

LAUGHS = "a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"a{number}: &a{number} [{','.join([f'*a{number - 1}'] * 10)}]\n" for number in range(1, 12)
)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (LAUGHS, f"more than {MOST_VALUES} values, with every alias written out"),
        ("a: &a [*a]", "line 1, column 8 is not valid YAML: an alias stands inside of what it names"),
        ("a: &a {b: *a}", "an alias stands inside"),
        ("&a {*a : 1}", "an alias stands inside"),
        ("a: " + "[" * 10_000, f"more than {MOST_DEPTH} levels are nested here"),
        ("".join(" " * level + "a:\n" for level in range(1000)), f"more than {MOST_DEPTH} levels"),
        ("a: " + "9" * 5000, "9… cannot be read as a whole number"),
        ("a: !!int x", "column 4 is not valid YAML: 'x' cannot be read as a whole number"),
        ("a: !!float x", "'x' cannot be read as a number"),
        ("a: !!bool x", "'x' cannot be read as true or false"),
        ("a: !!timestamp x", "the kind '!!timestamp' means nothing here"),
        ("a: !!set {b}", "the kind '!!set' means nothing here"),
        ("a: !!python/object/apply:os.system [ls]", "the kind '!!python/object/apply:os.system' means nothing here"),
        ("a: !b c", "the kind '!b' means nothing here"),
        ("a: {<<: {b: 1}}", "keys are not merged (<<) here: write them out"),
        ("? [a]\n: b", "a key must be a word, not ['a']"),
        ("!!map x", "expected a mapping node"),
        ("a: \0", "unacceptable character"),
    ],
)
def test_what_no_configuration_can_hold_is_refused_with_its_place(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_yaml(text, "run.yaml")
    assert str(caught.value).startswith("run.yaml:") and said in str(caught.value)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_dates_and_numbers_in_base_60_are_texts() -> None:
    assert parse_yaml("{a: 2024-99-99, b: 2024-01-01, c: 1:30:00}", "") == {
        "a": "2024-99-99",
        "b": "2024-01-01",
        "c": "1:30:00",
    }


def test_aliases_within_the_bound_are_as_if_written_out() -> None:
    assert parse_yaml("{a: &a [1, 2], b: [*a, *a]}", "") == {"a": [1, 2], "b": [[1, 2], [1, 2]]}


def test_options_of_any_length_are_told_in_short() -> None:
    for override in ("a=" + "9" * 100_000, "a" * 100_000, "a.b=!!int " + "x" * 100_000):
        with pytest.raises(ConfigError) as caught:
            apply_override({}, override)
        assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("tokenizer: ~nosuchuser/x", "tokenizer: ~nosuchuser/x: there is no such user"),
        ("tokenizer: " + "x" * 5000, "cannot be read: File name too long"),
        ("tokenizer: 2024-99-99", "tokenizer: no such directory: "),
        ('tokenizer: "a\\0b"', "tokenizer: must be the path of a file or directory, not 'a\\x00b'"),
        ('tokenizer: "\\ud800"', "tokenizer: '\\ud800' holds half a character"),
        ("tokenizer: ''", "tokenizer: must be the path of a file or directory, not ''"),
        ("threads: " + "9" * 400, "threads: must be less than or equal to 1024, not 999"),
        ("threads: " + "v" * 1_000_000, "threads: must be a valid integer"),
        ("kv_cache: {max_tokens: 99999999999999999999}", "kv_cache.max_tokens: must be less than or equal to 10995"),
        ("scheduler: {max_num_tokens: 99999999999}", "scheduler.max_num_tokens: must be less than or equal to 2147"),
        ('"a\\e[31m\\nb": 1', "'a\\x1b[31m\\nb': unknown key"),
        ("k" * 1000 + ": 1", "k…: unknown key"),
        ('launch: {environment: {A: "\\ud800"}}', "launch.environment: the value of A holds half a character"),
    ],
)
def test_odd_values_are_one_line_with_file_and_key(tmp_path: Path, lines: str, said: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        'target: {model: "asset:target", devices: ["cpu:0"]}\nspeculation: {method: none}\n' + lines, encoding="utf-8"
    )
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    message = str(caught.value)
    assert str(file) in message and said in message and "\n" not in message and len(message) < 1000


def test_more_devices_than_any_model_has_heads_are_refused_before_they_are_named() -> None:
    values = {"target": {"model": "asset:target", "devices": {"cpus_per_node": 10**12}}}
    with pytest.raises(ConfigError, match="1000000000000 devices are more than the 4096 that one engine may have"):
        fill_counts(values, lambda: Allocation(("",), None, 4, "this host"))
    values["target"]["devices"] = {"nodes": 10**12, "cpus_per_node": 1}  # type: ignore[index]
    with pytest.raises(ConfigError, match="1000000000000 devices are more than"):
        fill_counts(values, lambda: Allocation(("",), None, 4, "this host"))
    devices = [f"cpu:{number}" for number in range(5000)]
    with pytest.raises(ConfigError, match="5000 devices are more than the 4096"):
        make_config({"target": {"model": "asset:target", "devices": devices}, "speculation": {"method": "none"}})


def test_a_file_too_large_for_a_configuration_is_not_read_whole() -> None:
    with pytest.raises(ConfigError, match="/dev/zero: it is larger than 1 MiB"):
        load_config("/dev/zero")


def test_paths_begin_at_home_where_they_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    file = tmp_path / "run.yaml"
    file.write_text(
        'target: {model: "asset:target", devices: ["cpu:0"]}\nspeculation: {method: none}\n'
        "server: {batch_directory: ~/batches}\nlaunch: {log_directory: ~/logs}\n"
    )
    config = load_config(file, ["server.name_file=~/name.json"])
    found = (config.server.batch_directory, config.launch.log_directory, config.server.name_file)
    assert found == (tmp_path / "batches", tmp_path / "logs", tmp_path / "name.json")
