"""launch_triton_server.py's command line: a model repository becomes a YAML file, and a server of it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import yaml
from engines import build_engine

from launch.compat.tensorrt_llm import model_repository
from launch.compat.tensorrt_llm.model_repository import make_values, run
from trtrun.configuration.config import load_config
from trtrun.configuration.model_paths import ASSETS
from trtrun.errors import ConfigError

FILLED = """
name: "tensorrt_llm"
max_batch_size: 6
parameters: {{
  key: "gpt_model_path"
  value: {{
    string_value: "{model}"
  }}
}}
parameters: {{
  key: "gpu_device_ids"
  value: {{
    string_value: "{devices}"
  }}
}}
parameters: {{
  key: "max_tokens_in_paged_kv_cache"
  value: {{
    string_value: "2560"
  }}
}}
parameters: {{
  key: "enable_kv_cache_reuse"
  value: {{
    string_value: "False"
  }}
}}
parameters: {{
  key: "decoding_mode"
  value: {{
    string_value: "${{decoding_mode}}"
  }}
}}
"""


def fill(repository: Path, model: str, engine: Path, devices: str = "0") -> Path:
    path = repository / model / "config.pbtxt"
    path.parent.mkdir(parents=True)
    path.write_text(FILLED.format(model=engine, devices=devices))
    return path


def test_the_pair_of_a_repository_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = tmp_path / "llama_dtm"
    engine = build_engine(ASSETS / "target", tmp_path / "engine", max_draft_len=10)
    fill(repository, "tensorrt_llm", engine, "1")
    fill(repository, "tensorrt_llm_draft", ASSETS / "draft")
    started: list[list[str]] = []
    monkeypatch.setattr(model_repository.os, "execve", lambda program, words, environment: started.append(words))
    monkeypatch.setattr(model_repository, "has_gpu", lambda: False)
    run([f"--model_repo={repository}", "--multi-model", "--world_size=3", "--http_port", "80"])
    file = repository / "serve.yaml"
    command = [sys.executable, "-m", "launch.cli", "serve", "--config", str(file), "--http-port", "80"]
    assert started == [command]
    config = load_config(file)
    assert config.draft is not None and config.draft.model == ASSETS / "draft"
    assert [str(device) for device in (*config.target.devices, *config.draft.devices)] == ["cpu:1", "cpu:0"]
    assert (config.draft_len, config.scheduler.max_batch_size, config.server.model_name) == (10, 6, "llama_dtm")
    assert (config.kv_cache.max_tokens, config.kv_cache.enable_block_reuse) == (2560, False)


def test_a_target_alone_and_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"there is no tensorrt_llm/config\.pbtxt"):
        make_values(tmp_path, is_on_gpus=True)
    monkeypatch.chdir(tmp_path)
    path = fill(tmp_path, "tensorrt_llm", Path("engine"), "0,1")
    values = make_values(tmp_path, is_on_gpus=True)
    assert values["target"] == {"model": os.path.abspath("engine"), "devices": ["cuda:0", "cuda:1"]}
    assert values["speculation"] == {"method": "none"} and "draft" not in values
    assert yaml.safe_load(yaml.safe_dump(values)) == values
    for old, new, said in (
        ("2560", "many", "max_tokens_in_paged_kv_cache: 'many' is not a number"),
        ("${decoding_mode}", "medusa", "decoding_mode 'medusa': start trtrun serve with a YAML file"),
        ('"engine"', '"${engine_dir}"', "gpt_model_path is not filled in: the engine_dir of fill_template.py"),
    ):
        filled = path.read_text()
        path.write_text(filled.replace(old, new))
        with pytest.raises(ConfigError, match=said):
            make_values(tmp_path, is_on_gpus=True)
        path.write_text(filled)
