"""Models by name: where they are found in the cache, what goes before them, and what is said where they are not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import make_checkpoint
from hub_caches import COMMIT, OTHER_COMMIT, fill_cache, name_commit
from huggingface_hub import constants

from launch.jobs.placement.run_config import is_model_here, make_run_config
from trtrun.configuration.config import RuntimeConfig, make_config, make_one_device_config
from trtrun.configuration.model_paths import HubName, name_of_model, read_hub_name
from trtrun.errors import CheckpointError, ConfigError
from trtrun.weights.checkpoint import Checkpoint, NoWeightsError, read_json

ROOT = Path(__file__).resolve().parents[3]
MODEL = "some-org/Small.Model_1"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), num_shards=3)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def config_of(name: str, base: Path | None = None, **sections: object) -> RuntimeConfig:
    values = {"target": {"model": name, "devices": ["cpu:0"]}, "speculation": {"method": "none"}, **sections}
    return make_config(values, base)


def refusal(name: str) -> str:
    with pytest.raises(ConfigError) as caught:
        config_of(name)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("org/name", HubName("org/name")),
        ("Org-1/na.me_2", HubName("Org-1/na.me_2")),
        ("org/name@main", HubName("org/name", "main")),
        ("org/name@refs/pr/1", HubName("org/name", "refs/pr/1")),
        *((text, None) for text in ("name", "/org/name", "a/b/c", "../name", "org/..", "~/name", "org/name@", "a--b/c",
                                    "org/name@../../x", "org/-name", "org/na me", "örg/name")),
    ],
)  # fmt: skip
def test_which_texts_are_names(text: str, name: HubName | None) -> None:
    assert read_hub_name(text) == name


def test_main_is_found_and_revisions_by_ref_and_commit(cache: Path, model: Path) -> None:
    main = fill_cache(cache, MODEL, model)
    other = fill_cache(cache, MODEL, model, "v1.0", OTHER_COMMIT)
    assert config_of(MODEL).target.model == main
    assert config_of(f"{MODEL}@v1.0").target.model == other
    assert config_of(f"{MODEL}@{OTHER_COMMIT}").target.model == other
    assert len(Checkpoint(main).list_files()) == 3
    assert make_one_device_config(MODEL, None, "cpu:0", "auto", ("none", "none"), {"draft_len": 1}).target.model == main


def test_heads_and_tokenizers_are_found_without_a_config(cache: Path, model: Path, tmp_path: Path) -> None:
    main = fill_cache(cache, MODEL, model)
    found = {}
    for name, file in (("o/heads", "medusa_lm_head.safetensors"), ("o/tokens", "tokenizer.json")):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / file).write_text("{}")
        found[name] = fill_cache(cache, name, tmp_path / name)
    config = config_of(MODEL, draft={"model": "o/heads"}, tokenizer="o/tokens", speculation={"method": "medusa"})
    assert config.heads is not None and config.tokenizer is not None
    assert (config.target.model, config.heads.model, config.tokenizer) == (main, found["o/heads"], found["o/tokens"])


def test_a_directory_goes_before_a_name(cache: Path, model: Path, tmp_path: Path) -> None:
    fill_cache(cache, MODEL, model)
    own = tmp_path / MODEL
    own.mkdir(parents=True)
    assert config_of(MODEL, tmp_path).target.model == own
    own.rmdir()
    own.write_text("")
    with pytest.raises(ConfigError, match="is a file: name the model's directory"):
        config_of(MODEL, tmp_path)


def test_a_name_that_is_not_there(cache: Path, model: Path) -> None:
    assert refusal("a/b").endswith(
        f"target.model: no such directory: {Path.cwd()}/a/b; and a/b is not in the Hugging Face cache {cache}, which "
        "does not exist: run `hf download a/b` on each host, or set HF_HOME or HF_HUB_CACHE to where it is"
    )
    fill_cache(cache, MODEL, model)
    assert f"cache {cache}: run `hf download a/b` on" in refusal("a/b")
    assert f"cache {cache} (did you mean '{MODEL}'?): run" in refusal(MODEL.lower())
    assert "Face" not in refusal("a/b/c")
    with pytest.raises(ConfigError, match=r"speculation\.suffix_corpus: no such file: [^;]*$"):
        config_of(MODEL, speculation={"method": "suffix", "suffix_corpus": MODEL})


def test_a_revision_that_is_not_there(cache: Path, model: Path) -> None:
    fill_cache(cache, MODEL, model)
    line = refusal(f"{MODEL}@v2")
    assert f"{MODEL}@v2 is not in the Hugging Face cache {cache} (of it there: main, {COMMIT}): " in line
    assert f"run `hf download {MODEL} --revision v2` on each host" in line


def test_a_download_that_has_only_begun(cache: Path) -> None:
    name_commit(cache, MODEL, "main", COMMIT)
    assert f"cache {cache} (its download has only begun): run `hf download {MODEL}`" in refusal(MODEL)


def test_a_cache_that_is_a_file(cache: Path) -> None:
    cache.write_text("")
    assert f"cache {cache}, which cannot be read: run" in refusal(MODEL)


def test_missing_shards_are_named_with_the_command_that_fetches_them(cache: Path, model: Path) -> None:
    snapshot = fill_cache(cache, MODEL, model)
    command = f"its download is not complete: run `hf download {MODEL} --revision {COMMIT}`"
    (snapshot / "model-00003-of-00003.safetensors").unlink()  # not fetched yet
    (snapshot / "model-00001-of-00003.safetensors").resolve().unlink()  # a link without its blob
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(config_of(MODEL).target.model)
    names = "model-00001-of-00003.safetensors, model-00003-of-00003.safetensors"
    assert str(caught.value) == f"{snapshot} lacks shards {names} (3 in its index); {command}"
    (snapshot / "model.safetensors.index.json").unlink()
    with pytest.raises(NoWeightsError) as caught:
        Checkpoint(snapshot)
    assert str(caught.value).endswith(f"; {command}")
    with pytest.raises(CheckpointError) as caught:
        read_json(snapshot, "other.json", required=True)
    assert str(caught.value) == f"{snapshot} has no other.json; {command}"


def test_a_truncated_shard_is_fetched_again(cache: Path, model: Path) -> None:
    snapshot = fill_cache(cache, MODEL, model)
    file = snapshot / "model-00002-of-00003.safetensors"
    whole = file.read_bytes()
    for kept in (4, 200):
        file.write_bytes(whole[:kept])
        with pytest.raises(CheckpointError, match=f"; run `hf download {MODEL} --revision {COMMIT} --force-download`$"):
            Checkpoint(snapshot)


def test_what_a_model_is_called() -> None:
    assert name_of_model(Path(f"/hub/models--org--name/snapshots/{COMMIT}")) == "org/name"
    for path in (
        "/models/name",
        "/models--org--name/other/name",
        "/hub/models/snapshots/name",
        "/hub/models--/snapshots/name",
    ):
        assert name_of_model(Path(path)) == "name"


def test_hosts_may_have_it_by_name_or_in_a_directory(cache: Path, model: Path) -> None:
    snapshot = fill_cache(cache, MODEL, model)
    assert is_model_here(MODEL) and not is_model_here("a/b") and not is_model_here("\0")
    values = {"target": {"devices": ["cpu:0"]}, "speculation": {"method": "none"}}
    for paths in ({"elsewhere": "/none", "default": MODEL}, {"elsewhere": "/none", "nowhere": MODEL}):
        values["target"] = {"devices": ["cpu:0"], "model": paths}
        assert make_run_config({"values": values, "base": "/", "where": "run.yaml"}).target.model == snapshot


OFFLINE = """
import socket, sys
def refuse(*_, **__):
    raise AssertionError("nothing goes over the network")
socket.create_connection = socket.socket.connect = socket.getaddrinfo = refuse
from trtrun.configuration.config import make_config
from trtrun.errors import ConfigError
for name in sys.argv[1:]:
    values = {"target": {"model": name, "devices": ["cpu:0"]}, "speculation": {"method": "none"}}
    try:
        print(make_config(values).target.model)
    except ConfigError as error:
        print(error)
print(sorted({"torch", "transformers"} & set(sys.modules)))
"""


@pytest.mark.parametrize(("variable", "offline"), [("HF_HOME", "0"), ("HF_HUB_CACHE", "1")])
def test_the_variables_of_the_cache_without_network_and_torch(
    variable: str, offline: str, model: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "hub"
    snapshot = fill_cache(cache, MODEL, model)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGINGFACE_"))}
    of_cache = {variable: str(tmp_path if variable == "HF_HOME" else cache), "HF_HUB_OFFLINE": offline}
    done = subprocess.run(
        [sys.executable, "-c", OFFLINE, MODEL, f"{MODEL}@v2", "a/b"],
        env=kept | of_cache | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    found, other, absent, imported = done.stdout.splitlines()
    assert found == str(snapshot)
    assert (
        f"is not in the Hugging Face cache {cache}" in other and f"is not in the Hugging Face cache {cache}" in absent
    )
    assert imported == "[]"


def test_a_cache_that_cannot_be_read_is_one_line(cache: Path, model: Path) -> None:
    fill_cache(cache, MODEL, model)
    ref = cache / "models--some-org--Small.Model_1" / "refs" / "main"
    ref.write_bytes(b"\xff\xff")
    assert f"target.model: {MODEL} in the Hugging Face cache cannot be used: UnicodeDecodeError: " in refusal(MODEL)
