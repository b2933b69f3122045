"""The YAML file: what is accepted, what each refusal says."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from parallel.topology import Topology
from trtrun.configuration.config import RuntimeConfig, load_config, make_config
from trtrun.errors import ConfigError
from trtrun.threads import count_cores, has_free_cores, outnumber_cores, threads_per_slot


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("target", "draft"):
        (tmp_path / name).mkdir()
    return tmp_path


def write(folder: Path, text: str) -> Path:
    file = folder / "run.yaml"
    file.write_text(text, encoding="utf-8")
    return file


PAIR = """
target: {model: target, devices: ["cpu:1", "cpu:2"], dtype: float32}
draft: {model: draft, devices: ["cpu:0"]}
"""


def refusal(folder: Path, text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as raised:
        load_config(write(folder, text), overrides)
    message = str(raised.value)
    assert "\n" not in message
    return message


def test_defaults_and_sections(folder: Path) -> None:
    config = load_config(write(folder, PAIR))
    assert config.target.model == (folder / "target").resolve()
    assert config.target.devices == ("cpu:1", "cpu:2")
    assert config.draft_devices == ("cpu:0",)
    assert config.target.dtype == "float32"
    assert (config.speculation.method, config.speculation.draft_len, config.speculation.use_logits) == (
        "draft_target",
        4,
        False,
    )
    assert config.kv_cache.block_size == 16
    assert config.kv_cache.enable_block_reuse
    assert config.threads is None


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("[0, 3]", ("cuda:0", "cuda:3")),
        ("1", ("cuda:1",)),
        ("cuda:2", ("cuda:2",)),
        ("[cuda]", ("cuda:0",)),
        ('["cpu:0", "cpu:1"]', ("cpu:0", "cpu:1")),
    ],
)
def test_device_spellings(folder: Path, written: str, read: tuple[str, ...]) -> None:
    text = f"target: {{model: target, devices: {written}}}\nspeculation: {{method: none}}"
    assert load_config(write(folder, text)).target.devices == read


@pytest.mark.parametrize(
    "devices", ["[]", "[-1]", '["gpu:0"]', '["cpu:01"]', "[true]", "[0, 0]", '["cuda:0", 0]', "[0.5]"]
)
def test_bad_devices_are_refused(folder: Path, devices: str) -> None:
    text = f"target: {{model: target, devices: {devices}}}\nspeculation: {{method: none}}"
    assert "target.devices" in refusal(folder, text)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("speculation.draft_length=3", "speculation.draft_length: unknown key (did you mean 'draft_len'?)"),
        ("speculatoin.draft_len=3", "speculatoin: unknown key (did you mean 'speculation'?)"),
        ("kv_cache.blocksize=8", "kv_cache.blocksize: unknown key (did you mean 'block_size'?)"),
        ("target.device=[0]", "target.device: unknown key (did you mean 'devices'?)"),
        ("speculation.draft_len=0", "speculation.draft_len"),
        ("speculation.draft_len=33", "speculation.draft_len"),
        ("speculation.draft_len=true", "speculation.draft_len: must be a number, not true"),
        ("speculation.draft_len=4.5", "speculation.draft_len"),
        (
            "speculation.method=jacobi",
            "speculation.method: unknown method 'jacobi' (known: dflash, draft_target, dspark, eagle, eagle3,",
        ),
        ("speculation.method=pard", "unknown method 'pard': a draft with a mask token drafts by method draft_target"),
        (
            "speculation.method=hybrid",
            "unknown method 'hybrid': name the model's method, and set enable_suffix_decoding",
        ),
        ("target.dtype=fp8", "target.dtype"),
        ("target.quantisation=fp8", "target.quantisation: unknown key (did you mean 'quantization'?)"),
        ("draft.quantisation=int8", "draft.quantisation: unknown key (did you mean 'quantization'?)"),
        ("draft.quantization=8", "draft.quantization: must be a valid string, not 8"),
        ("kv_cache.free_memory_fraction=1.5", "kv_cache.free_memory_fraction"),
        ("threads=0", "threads"),
        (
            "target=3",
            "target: must be a section with keys (model, devices, dtype, load_format, quantization, expert_parallel), "
            "not a number",
        ),
        ("adapters=3", "adapters: must be a section of names, each with its value, not a number"),
        ("target.model=nowhere", "target.model: no such directory"),
        ("target.model=run.yaml", "run.yaml is a file: name the model's directory"),
        ("target.model=asset:targte", "unknown asset 'asset:targte' (did you mean 'asset:target'?)"),
        ("target.model.x=1", "'target.model' is a value, not a section"),
        ("speculation", "write it as key=value"),
        ("a=[", "is not valid YAML"),
        ("draft.devices=[0]", "cannot be mixed"),
        (
            "scheduler.max_num_tokens=100",
            "scheduler.max_num_tokens: 100 is too small to verify 5 tokens of each of 32 rows",
        ),
    ],
)
def test_refusals_name_the_key_and_the_remedy(folder: Path, override: str, said: str) -> None:
    assert said in refusal(folder, PAIR, override)


def test_drafts_of_all_rows_have_room_where_no_limit_is_set(folder: Path) -> None:
    """As the README's lookahead of [7, 7, 7] needs more than the default; a limit that is set stays."""
    tree = ("speculation.method=lookahead", "speculation.lookahead_config=[7, 7, 7]")
    assert load_config(write(folder, PAIR), tree).max_num_tokens == 32 * 84
    assert load_config(write(folder, PAIR), [*tree, "scheduler.max_batch_size=2"]).max_num_tokens == 2048
    assert "is too small to verify 84 tokens" in refusal(folder, PAIR, *tree, "scheduler.max_num_tokens=2048")


def test_an_unknown_key_is_told_before_a_missing_one(folder: Path) -> None:
    assert "did you mean 'target'?" in refusal(folder, "targt: {model: target, devices: [0]}")


def test_a_key_that_stands_twice_is_refused(folder: Path) -> None:
    assert "the key 'threads' stands twice" in refusal(folder, PAIR + "threads: 1\nthreads: 2\n")


@pytest.mark.parametrize("text", ["", "[1, 2]", "target", "{"])
def test_files_that_are_no_configuration_are_refused(folder: Path, text: str) -> None:
    assert "run.yaml" in refusal(folder, text)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the configuration file"):
        load_config(tmp_path / "nowhere.yaml")


def test_overrides_win_and_are_read_as_yaml(folder: Path) -> None:
    config = load_config(
        write(folder, PAIR),
        ["speculation.draft_len=8", "speculation.use_logits=yes", 'target.devices=["cpu:4"]', "kv_cache.max_tokens=64"],
    )
    assert config.speculation.draft_len == 8
    assert config.speculation.use_logits
    assert config.target.devices == ("cpu:4",)
    assert config.kv_cache.max_tokens == 64


def test_an_override_changes_one_of_two_sections_that_share_an_anchor(folder: Path) -> None:
    text = "target: &model {model: target, devices: [0]}\ndraft: *model\n"
    config = load_config(write(folder, text), ["draft.devices=[1]"])
    assert (config.target.devices, config.draft_devices) == (("cuda:0",), ("cuda:1",))


def test_draft_target_needs_a_draft(folder: Path) -> None:
    message = refusal(folder, "target: {model: target, devices: [0]}")
    assert "add a draft section or set speculation.method to none" in message


def test_method_none_ignores_the_draft_even_if_its_directory_is_gone(folder: Path) -> None:
    text = PAIR.replace("model: draft", "model: nowhere") + "speculation: {method: none}\n"
    config = load_config(write(folder, text))
    assert config.draft is None
    assert config.draft_devices == ()
    assert not config.is_speculative


def test_models_are_looked_for_beside_the_file_first_then_in_the_working_directory(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    for name in ("target", "draft2"):
        (elsewhere / name).mkdir()
    monkeypatch.chdir(elsewhere)
    config = load_config(write(folder, PAIR.replace("model: draft", "model: draft2")))
    assert config.target.model == (folder / "target").resolve()
    assert config.draft is not None
    assert config.draft.model == (elsewhere / "draft2").resolve()


def test_make_config_takes_python_values(folder: Path) -> None:
    values: dict[str, Any] = {"target": {"model": folder / "target", "devices": [0]}, "speculation": {"method": "none"}}
    assert isinstance(make_config(values), RuntimeConfig)


def test_threads_come_from_the_file_then_the_environment_then_the_cores() -> None:
    assert threads_per_slot(3, 2, {"OMP_NUM_THREADS": "7"}) == 3
    assert threads_per_slot(None, 2, {"OMP_NUM_THREADS": "7"}) == 7
    assert threads_per_slot(None, 2, {"OMP_NUM_THREADS": "junk"}) >= 1
    assert threads_per_slot(None, 10**6, {}) == 1
    assert 1 <= threads_per_slot(None, 1, {}) <= (os.cpu_count() or 1)


@pytest.mark.parametrize(
    ("draft", "target", "threads", "host", "needed"),
    [
        (["cpu:0"], ["cpu:1"], 1, "", 3),
        (["cpu:0"], ["cpu:1", "cpu:2"], 3, "", 10),
        ([], ["cpu:0"], 4, "", 4),
        (["cuda:0"], ["cuda:1"], 8, "", 5),
        (["cpu:0"], ["cuda:0"], 8, "", 11),
        (["a/cpu:0", "a/cpu:1"], ["b/cpu:0"], 2, "a", 4),
        (["a/cpu:0", "a/cpu:1"], ["b/cpu:0"], 2, "b", 3),
    ],
)
def test_a_rank_may_spin_where_each_thread_of_its_host_has_a_core(
    draft: list[str], target: list[str], threads: int, host: str, needed: int
) -> None:
    topology = Topology.from_devices(draft, target)
    assert has_free_cores(topology, host, threads, needed)
    assert not has_free_cores(topology, host, threads, needed - 1)
    assert has_free_cores(topology, host, threads) == (needed <= count_cores())


def test_cpu_ranks_outnumber_cores_on_the_host_that_has_most_of_them() -> None:
    assert not outnumber_cores(["cpu:0", "cpu:1"], None, cores=2)
    assert outnumber_cores(["cpu:0", "cpu:1", "cpu:2"], None, cores=2)
    assert outnumber_cores(["cpu:0", "cpu:1"], 2, cores=2)
    assert not outnumber_cores(["north/cpu:0", "south/cpu:0", "south/cpu:1"], 1, cores=2)
    assert outnumber_cores(["north/cpu:0", "south/cpu:0", "south/cpu:1"], 1, cores=1)
    assert not outnumber_cores(["cuda:0", "cuda:1", "cpu:0"], None, cores=1)
