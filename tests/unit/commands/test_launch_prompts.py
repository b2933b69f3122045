"""Sampling options of the command line: every parameter has one, and they mean what the same words in a row mean."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import click
import pytest

from launch.batch.input import InputRows
from launch.commands.prompts import given_sampling
from launch.commands.run import merge, run
from trtrun.core.sampling_params import LOGITS_FIELDS, SamplingParams

OPTIONS = (
    "--max-tokens 90 --min-tokens 2 --temperature 0.5 --top-k 7 --top-p 0.9 --min-p 0.1 --seed 3 --n 2 "
    "--stop a --stop b --include-stop-str-in-output --stop-token-id 5 --stop-token-id 6 --ignore-eos "
    "--stop-sequence 5,6 --stop-sequence 7 "
    "--no-skip-special-tokens --repetition-penalty 1.2 "
    "--presence-penalty 0.5 --frequency-penalty -0.5 --logit-bias 5=-100 --logit-bias 7=2.5 --bad-word no --logprobs 4 "
    "--prompt-logprobs 2 "
    "--draft-len 3 --draft-token-id 8 --draft-token-id 9 --lookahead-config 5 4 3 "
    '--guided {"choice":["yes","no"]} --lora-name sql --cache-salt x '
    "--thinking-token-budget 9 --thinking-mark [T] --thinking-mark [/T] --no-stop-in-thoughts"
)
VALUES = {
    "max_tokens": 90, "min_tokens": 2, "temperature": 0.5, "top_k": 7, "top_p": 0.9, "min_p": 0.1, "seed": 3, "n": 2,
    "stop": ["a", "b"], "include_stop_str_in_output": True, "stop_token_ids": [5, 6], "stop_sequences": [[5, 6], [7]],
    "ignore_eos": True, "skip_special_tokens": False,
    "repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": -0.5,
    "logit_bias": {"5": -100.0, "7": 2.5}, "bad_words": ["no"], "logprobs": 4, "prompt_logprobs": 2, "draft_len": 3,
    "draft_token_ids": [8, 9], "lookahead_config": [5, 4, 3],
    "guided": {"choice": ["yes", "no"]}, "lora_name": "sql", "cache_salt": "x",
    "thinking_token_budget": 9, "thinking_marks": ["[T]", "[/T]"], "stop_in_thoughts": False,
}  # fmt: skip


def sampling_of(command: click.Command, *words: str) -> dict[str, object]:
    """What a command takes from these options."""
    known = {item.name for item in fields(SamplingParams)}
    needed = ["--config", "x"] if command is run else ["--output", "x", "part"]
    with command.make_context("test", [*needed, *words]) as context:
        return given_sampling({name: value for name, value in context.params.items() if name in known})


@pytest.mark.parametrize("command", [run, merge], ids=["run", "merge"])
def test_every_sampling_parameter_has_an_option_that_means_the_same(tmp_path: Path, command: click.Command) -> None:
    given = sampling_of(command, *OPTIONS.split())
    known = {item.name for item in fields(SamplingParams)} - set(LOGITS_FIELDS)
    assert set(given) == known == set(VALUES)
    assert SamplingParams.from_mapping(given) == SamplingParams.from_mapping(VALUES)
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": "x", **VALUES}) + "\n")
    (from_options,) = InputRows(["x"], None, given).read()
    (from_row,) = InputRows((), file).read()
    assert (from_options.sampling, from_options.input_hash) == (from_row.sampling, from_row.input_hash)


def test_options_that_are_not_given_are_not_there() -> None:
    assert sampling_of(run) == {}
    assert sampling_of(run, "--n", "1") == {"n": 1}


@pytest.mark.parametrize("word", ["{", "json"])
def test_a_guide_that_is_no_json_is_refused(word: str) -> None:
    with pytest.raises(click.BadParameter, match="is no JSON"):
        sampling_of(run, "--guided", word)


@pytest.mark.parametrize("word", ["5", "x=1", "5=x", "=", "5=1=2"])
def test_a_bias_that_is_none_is_refused(word: str) -> None:
    with pytest.raises(click.BadParameter, match="write ID=NUMBER"):
        sampling_of(run, "--logit-bias", word)
