"""What training refuses, each in one line that says what to do; the order of rows; and the picture of a run."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import click
import pytest
from checkpoints import make_checkpoint
from hub_caches import fill_cache
from huggingface_hub import constants
from training_runs import MASK, make_method, rows_of

from launch.commands.train_drafter import train_drafter, train_options
from launch.train.checks import check_output, find_start
from launch.train.job import TrainOptions
from launch.train.run import draw_curves, figure_of
from trtrun.configuration.config import make_config
from trtrun.errors import CheckpointError, ConfigError
from trtrun.tools.training.data import batch_indexes, read_data
from trtrun.tools.training.loop import steps_within
from trtrun.tools.training.methods.pard import find_pard_token
from trtrun.tools.training.methods.table import METHODS, find_method
from trtrun.tools.training.models import load_model
from trtrun.tools.training.settings import TrainingSettings
from trtrun.tools.training.state import rate_factor

GOOD = {"prompt_token_ids": [1, 2], "token_ids": [3, 4, 5], "temperature": 0.0, "error": None}


def read(tmp_path: Path, *rows: Any, heldout: int = 0, length: int = 10) -> Any:
    file = tmp_path / "data.jsonl"
    file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return read_data([file], length, heldout, 50, 0)


def test_rows_are_read_and_what_cannot_be_learned_is_left_out(tmp_path: Path) -> None:
    found = read(
        tmp_path, GOOD, {**GOOD, "error": "too long"}, {**GOOD, "token_ids": []}, "", {**GOOD, "temperature": 0.7},
        {**GOOD, "prompt_token_ids": list(range(10))}, {**GOOD, "token_ids": list(range(30))},
    )  # fmt: skip
    assert [row.number for row in found.rows] == [1, 5, 7]
    assert found.num_left_out == 3
    assert [row.is_greedy for row in found.rows] == [True, False, True]
    assert found.rows[0].tokens == (1, 2, 3, 4, 5)
    assert len(found.rows[2].tokens) == 10
    again = read(tmp_path, *[GOOD] * 6, heldout=2)
    assert sorted(row.number for row in [*again.rows, *again.heldout]) == [1, 2, 3, 4, 5, 6]
    assert again.digest != found.digest


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("{", "line 1: not valid JSON"),
        ([1], "a row must be an object"),
        ({"token_ids": [1], "temperature": 0}, "needs a list of token ids 'prompt_token_ids'"),
        ({**GOOD, "token_ids": ["a"]}, "needs a list of token ids 'token_ids'"),
        ({**GOOD, "temperature": None}, "needs the 'temperature' that it was made at"),
        ({**GOOD, "token_ids": [50]}, "another vocabulary's: line 1 holds token 50, and the target has tokens 0 to 49"),
        ({**GOOD, "error": "no"}, "no row to train on; make some with trtrun generate-data"),
    ],
)
def test_data_that_is_wrong_is_refused(tmp_path: Path, row: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as raised:
        read(tmp_path, row)
    assert "\n" not in str(raised.value)


def test_data_that_is_not_there_or_too_little_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.jsonl cannot be read: No such file"):
        read_data([tmp_path / "nothing.jsonl"], 10, 0, 50, 0)
    with pytest.raises(ConfigError, match=r"--heldout-rows is 2, but .* has 2 rows"):
        read(tmp_path, GOOD, GOOD, heldout=2)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"optimizer": "adam"}, r"--optimizer: unknown optimizer 'adam' \(did you mean 'adamw'\?\)"),
        ({"num_tokens": 0}, "--num-tokens is 0: it must be 1 or more"),
        ({"retention": 1.5}, "--retention is 1.5: it must be above 0, and 1 at most"),
        ({"divergence": 0.0, "cross_entropy": 0.0}, "nothing would be learned"),
        ({"epochs": 0.0}, "--epochs is 0.0"),
        ({"draft_vocab_size": 0}, "--draft-vocab-size is 0: it must be 1 or more"),
        ({"minutes": -1.0}, "--minutes is -1.0: it must be 0 or more"),
        ({"steps": 5, "minutes": 2.0}, "--steps 5 and --minutes 2: give one of them"),
    ],
)
def test_settings_out_of_their_range_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        TrainingSettings(**changes)


def test_an_unknown_method_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"unknown method 'prad' \(did you mean 'pard'\?\)"):
        find_method("prad")


@pytest.mark.parametrize("method", METHODS)
def test_methods_have_defaults_of_their_own_and_the_user_has_the_last_word(method: str) -> None:
    def settings(*words: str) -> TrainingSettings:
        context = train_drafter.make_context(
            "train-drafter", [*("--config", "x", "--data", "y", "--output", "z"), *words]
        )
        return train_options(context.params).settings

    own = METHODS[method].defaults
    assert settings("--method", method) == TrainingSettings(method=method, **own)
    given = settings("--method", method, "--depth-decay", "1", "--eagle3-layers-to-capture", "-1,0")
    assert (given.depth_decay, given.eagle3_layers_to_capture) == (1.0, (-1, 0))
    assert given.find_difference(json.loads(given.to_json())) is None
    assert settings("--method", method).find_difference(json.loads(given.to_json())) is not None
    with pytest.raises(click.BadParameter, match="layers are numbers between commas"):
        settings("--eagle3-layers-to-capture", "1,x")


def test_mask_tokens_that_a_text_may_hold_are_refused(pair: tuple[Path, Path], data: Path) -> None:
    rows = rows_of(data)
    with pytest.raises(ConfigError, match="--pard-token 199: the draft has tokens 0 to 198"):
        make_method(*pair, pard_token=199)
    token = rows[3].tokens[-1]
    with pytest.raises(ConfigError, match=f"holds token {token}, which is to stand for tokens that are guessed"):
        make_method(*pair, pard_token=token).check(rows)
    make_method(*pair, pard_token=MASK).check(rows)


def test_a_draft_that_does_not_know_the_targets_tokens_is_refused(
    pair: tuple[Path, Path], data: Path, tmp_path: Path
) -> None:
    small = make_checkpoint(tmp_path / "small", vocab_size=100)
    with pytest.raises(ConfigError, match=r"the draft has a vocabulary of 100: start from a draft that knows"):
        make_method(pair[0], small, pard_token=99).check(rows_of(data))


def test_the_mask_token_is_one_that_the_tokenizer_leaves_free(tmp_path: Path) -> None:
    padded = make_checkpoint(tmp_path / "padded", tokenizer=True, vocab_size=264)
    known = load_model(padded, "auto").config
    assert find_pard_token(known, padded) == 263
    known.pard_token = 261
    assert find_pard_token(known, padded) == 261
    full = make_checkpoint(tmp_path / "full", tokenizer=True, vocab_size=257)
    with pytest.raises(ConfigError, match="--pard-token: name the id of a token that no text has"):
        find_pard_token(load_model(full, "auto").config, full)


@pytest.mark.parametrize(
    ("name", "resume", "said"),
    [
        ("full", False, "it is not empty; go on with --resume, or name another directory"),
        ("full", True, "it holds no training run to go on with"),
        ("no/out", False, r"the directory .*no does not exist"),
        ("full/notes.txt", False, "it is no directory"),
        ("out", True, None),
        ("full/empty", False, None),
    ],
)
def test_an_output_directory_that_would_lose_something_is_refused(
    tmp_path: Path, name: str, resume: bool, said: str | None
) -> None:
    (tmp_path / "full" / "empty").mkdir(parents=True)
    (tmp_path / "full" / "notes.txt").write_text("mine")
    options = TrainOptions(settings=TrainingSettings(), data=[], output=tmp_path / name, start=None, resume=resume)
    if said is None:
        check_output(options)
        return
    with pytest.raises(ConfigError, match=said):
        check_output(options)


def test_a_checkpoint_that_transformers_cannot_load_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "nothing"}')
    with pytest.raises(CheckpointError, match="transformers cannot load") as raised:
        load_model(tmp_path, "auto")
    assert "\n" not in str(raised.value)


def test_rows_longer_than_a_window_of_attention_are_refused(pair: tuple[Path, Path], tmp_path: Path) -> None:
    draft = make_checkpoint(tmp_path / "window", "MistralForCausalLM", vocab_size=199, sliding_window=16)
    with pytest.raises(CheckpointError, match="attends to a window of 16 tokens, and rows have up to 40"):
        make_method(pair[0], draft)
    make_method(pair[0], draft, max_length=16)


def test_each_pass_takes_every_row_once_in_an_order_of_its_own() -> None:
    indexes = [index for step in range(6) for index in batch_indexes(10, 5, step, seed=3)]
    passes = [indexes[:10], indexes[10:20], indexes[20:]]
    assert all(Counter(one) == Counter(range(10)) for one in passes)
    assert len({tuple(one) for one in passes}) == 3
    assert batch_indexes(4, 10, 0, seed=0) != batch_indexes(4, 10, 1, seed=0)


def test_the_rate_rises_and_falls() -> None:
    factors = [rate_factor(step, 100, 10) for step in range(100)]
    assert factors[0] == 0.1 and factors[9] == 1.0
    assert factors[10:] == sorted(factors[10:], reverse=True)
    assert 0.1 <= factors[-1] < 0.11


def test_steps_of_a_time_are_reckoned_from_those_that_are_done() -> None:
    assert steps_within(60.0, 10, 20.0) == 30
    assert steps_within(60.0, 10, 59.9) == 10  # as long as it takes, the next one would be late
    assert steps_within(60.0, 10, 80.0) == 10
    assert steps_within(60.0, 1, 0.0) > 1


def test_curves_are_one_for_each_depth(tmp_path: Path) -> None:
    metrics = [
        {"step": step, "loss": [3 / step, 5 / step], **({"acceptance_by_depth": [0.5, 0.2]} if step % 500 == 0 else {})}
        for step in range(1, 1001)
    ]
    losses, shares = figure_of(metrics).axes
    assert [line.get_label() for line in (*losses.lines, *shares.lines)] == ["depth 1", "depth 2"] * 2
    steps, means = losses.lines[0].get_data()
    assert len(steps) == 334 and (steps[0], steps[-1]) == (3, 1000)
    assert means[0] == pytest.approx((3 + 3 / 2 + 3 / 3) / 3) and means[-1] == pytest.approx(3 / 1000)
    assert [tuple(line.get_ydata()) for line in shares.lines] == [(0.5, 0.5), (0.2, 0.2)]
    for name, lines in (("curves.png", metrics), ("empty.png", [])):
        draw_curves(lines, tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_a_drafter_starts_from_a_model_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    snapshot = fill_cache(tmp_path / "hub", "org/draft", make_checkpoint(tmp_path / "draft"))
    config = make_config({"target": {"model": "asset:target", "devices": ["cpu:0"]}, "speculation": {"method": "none"}})

    def options(start: str) -> TrainOptions:
        return TrainOptions([], tmp_path / "out", Path(start), False, TrainingSettings())

    assert find_start(config, options("org/draft")) == snapshot
    with pytest.raises(ConfigError, match=r"^--from: no such directory: .*; and org/other is not in the Hugging Face"):
        find_start(config, options("org/other"))
