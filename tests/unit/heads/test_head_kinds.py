"""Heads beside another method, and in a draft model's place: what to set is said in one line, from a directory's
tensors alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launch.jobs.check.preflight import check_models
from trtrun.configuration.config import RuntimeConfig, make_config
from trtrun.errors import CheckpointError, ConfigError
from trtrun.loading.model_settings import read_target_heads
from trtrun.models.config import read_model_config
from trtrun.start.job_spec import JobSpec

TARGET = {"model": "asset:target", "devices": ["cpu:0"]}


def configured(method: str, model: str, **draft: Any) -> RuntimeConfig:
    values = {"target": TARGET, "draft": {"model": model, **draft}, "speculation": {"method": method}}
    return make_config(values)


@pytest.mark.parametrize(
    ("method", "model", "found"),
    [("medusa", "asset:eagle3", "eagle3"), ("eagle3", "asset:medusa", "medusa"), ("dspark", "asset:medusa", "medusa")],
)
def test_heads_of_another_method_are_named(method: str, model: str, found: str) -> None:
    config = configured(method, model)
    with pytest.raises(CheckpointError, match=rf"method {found}: set speculation\.method to that$"):
        read_target_heads(config, read_model_config(Path(config.target.model)))


def test_what_has_no_heads_is_not_taken_for_any() -> None:
    config = configured("eagle3", "asset:draft")
    with pytest.raises(CheckpointError, match="it has no head of EAGLE-3"):
        read_target_heads(config, read_model_config(Path(config.target.model)))


@pytest.mark.parametrize(("model", "found"), [("asset:eagle3", "eagle3"), ("asset:medusa", "medusa")])
def test_heads_in_a_draft_models_place_are_named(model: str, found: str) -> None:
    config = configured("draft_target", model, devices=["cpu:0"])
    with pytest.raises(CheckpointError, match=rf"^draft: .*method {found}: .*, and leave draft\.devices out or null$"):
        check_models(JobSpec(config))


@pytest.mark.parametrize(
    ("method", "says"),
    [
        ("medusa", "draft.model (asset:medusa is for this target), or set"),
        ("eagle3", "draft.model (asset:eagle3 is for this target), or set"),
        ("draft_target", "add a draft section (asset:draft is for this target) or set"),
        ("eagle", "draft.model, or set"),
    ],
)
def test_what_ships_for_the_shipped_target_is_named_where_the_draft_is_missing(method: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_config({"target": TARGET, "speculation": {"method": method}})
    assert says in str(caught.value)
