"""A start reads each model's config.json once, and ranks other than 0 are told what it says.

Whoever opens weights looks into config.json for the kind of checkpoint, and whoever tells files from others takes the
hash of its bytes: these open it again.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import ARCHITECTURES, make_checkpoint, make_draft
from pipelines import configuration, prompt_of
from quantized_checkpoints import make_pair
from safetensors.torch import load_file, save_file

from launch.jobs.check.preflight import check_job
from parallel.groups import open_groups
from trtrun import LLM, SamplingParams
from trtrun.configuration.config import RuntimeConfig, make_config
from trtrun.kvcache.sizing import StoreSize
from trtrun.models.config import ModelConfig
from trtrun.start import job_spec
from trtrun.start.job_spec import JobSpec
from trtrun.start.startup import RankStartup

OTHERS = {"open_checkpoint", "hash_files", "configuration_bytes"}
"""Functions that open config.json, or that do by `read_json`, and do not read what the model is."""

_opened: list[tuple[str, list[str]]] | None = None


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    if _opened is not None and event == "open" and str(arguments[0]).endswith("/config.json"):
        _opened.append((str(arguments[0]), [frame.name for frame in traceback.extract_stack()]))


sys.addaudithook(_note)


@contextmanager
def opened() -> Iterator[list[tuple[str, list[str]]]]:
    """The config.json that are opened, each with the functions on the stack."""
    global _opened
    _opened = []
    try:
        yield _opened
    finally:
        _opened = None


def pair(folder: Path, **settings: Any) -> RuntimeConfig:
    target = make_checkpoint(folder / "target", seed=1)
    return configuration(target, make_draft(folder / "draft", target, 2), **settings)


def test_a_start_in_one_process_reads_each_config_once(tmp_path: Path) -> None:
    spec = JobSpec(pair(tmp_path, speculation={"draft_len": 2}))
    with opened() as found:
        check_job(spec)
        with LLM.open(spec) as llm:  # type: ignore[union-attr]
            llm.generate([prompt_of(5)], SamplingParams(max_tokens=3))
    read = [path for path, stack in found if not OTHERS & {*stack}]
    assert sorted(read) == [str(tmp_path / name / "config.json") for name in ("draft", "target")]


def test_a_rank_that_is_told_reads_no_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ranks other than 0 start: with models that another process has read."""
    config = pair(tmp_path, speculation={"draft_len": 2})
    told = JobSpec(config).encode_models()

    def read(path: Path) -> ModelConfig:
        raise AssertionError(f"{path} is read again")

    monkeypatch.setattr(job_spec, "read_model_config", read)
    spec = JobSpec(config).with_models(told)
    with opened() as found:
        startup = RankStartup(spec, 0, open_groups(None, spec.topology, torch.device("cpu")))
        worker, _ = startup.finish(StoreSize.smallest((StoreSize(9), startup.load(lambda done, total: None))))
        worker.close()
    assert all(OTHERS & {*stack} for _, stack in found)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_models_that_are_told_are_those_that_were_read(tmp_path: Path, architecture: str) -> None:
    spec = JobSpec(configuration(make_checkpoint(tmp_path, architecture), None))
    assert spec.with_models(spec.encode_models()).target == spec.target


@pytest.mark.parametrize("name", ["gptq", "fp8 block", "modelopt FP8"])
def test_stored_quantizations_are_told_too(tmp_path: Path, name: str) -> None:
    spec = JobSpec(configuration(make_pair(tmp_path, name)[0], None))
    found, read = spec.with_models(spec.encode_models()).target, spec.target
    assert found.quant_method == read.quant_method is not None and found.kv_scheme == read.kv_scheme
    assert found.stored is not None and read.stored is not None
    for part in (part for weight in read.weights for part in weight.parts):
        assert repr(found.stored(part.name)) == repr(read.stored(part.name))


def test_a_model_whose_weights_rank_0_does_not_have_is_read_where_they_are(tmp_path: Path) -> None:
    """Headers of weights say a part of what a model is, and weights are needed only where ranks hold them."""
    values = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    whole = make_checkpoint(tmp_path / "whole")
    stated = json.loads((whole / "config.json").read_text())
    section = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": values}
    (whole / "config.json").write_text(json.dumps({**stated, "quantization_config": section}))
    weights = load_file(whole / "model.safetensors")
    scales = {
        f"model.layers.{index}.self_attn.{kind}_scale": torch.tensor([0.02])
        for index in range(stated["num_hidden_layers"])
        for kind in "kv"
    }
    save_file({**weights, **scales}, whole / "model.safetensors")
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_bytes((whole / "config.json").read_bytes())
    here, there = (JobSpec(configuration(path, None)) for path in (bare, whole))
    assert here.target.kv_scheme is not None and not here.target.kv_scheme.has_scales
    told = there.with_models(here.encode_models())
    assert told.target.kv_scheme is not None and told.target.kv_scheme.has_scales
    assert here.with_models(there.encode_models()).target.kv_scheme == there.target.kv_scheme


@pytest.mark.parametrize(
    ("devices", "draft_devices", "leaves"), [([0, 1], [0, 1], True), ([0, 1], [0], True), ([0], [1], False)]
)
def test_first_uses_are_not_left_to_rounds_where_a_device_waits_for_its_host(
    devices: list[int], draft_devices: list[int], leaves: bool
) -> None:
    sections = {"target": devices, "draft": draft_devices}
    config = make_config({role: {"model": f"asset:{role}", "devices": of_role} for role, of_role in sections.items()})
    assert JobSpec(config, is_awaited=True).leaves_first_uses == leaves
    assert not JobSpec(config).leaves_first_uses
