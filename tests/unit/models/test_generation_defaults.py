"""What generation_config.json says of sampling is taken where a request is silent, as vLLM takes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from checkpoints import make_checkpoint
from pipelines import configuration

from launch.serve.api.openai.types import read_chat, read_completion
from launch.serve.application import parts
from launch.serve.application.request_parser import RequestParser
from launch.serve.engine.client import EngineClient
from launch.serve.http.requests import Keys
from launch.serve.parsing.messages import HEAD_BYTES, Facts, Read, Task, pack, unpack
from trtrun.core.sampling_params import LARGEST_COUNT, SamplingParams
from trtrun.errors import CheckpointError
from trtrun.loading.model_settings import describe_generation_defaults, read_generation_defaults
from trtrun.start.job_spec import JobSpec
from trtrun.tokens.text import read_tokenizer

CHAT = [{"role": "user", "content": "a"}]
LLAMA = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "eos_token_id": [1, 2], "transformers_version": "4"}


def read(folder: Path, values: dict[str, Any]) -> dict[str, Any]:
    (folder / "generation_config.json").write_text(json.dumps(values))
    return read_generation_defaults(folder)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (LLAMA, {"temperature": 0.6, "top_p": 0.9}),
        ({"do_sample": True, "top_k": 20, "min_p": 0.1}, {"top_k": 20, "min_p": 0.1, "temperature": 1.0}),
        ({"do_sample": False, "temperature": 0.7}, {"temperature": 0.7}),
        ({"do_sample": False, "eos_token_id": 5}, {}),
        ({"max_new_tokens": 30, "repetition_penalty": 1.1}, {"repetition_penalty": 1.1, "max_tokens": 30}),
        ({"top_k": -1, "top_p": None}, {"top_k": 0}),
    ],
)
def test_what_a_file_says(tmp_path: Path, values: dict[str, Any], expected: dict[str, Any]) -> None:
    assert read(tmp_path, values) == expected


def test_a_model_without_the_file_says_nothing_and_a_wrong_one_is_told(tmp_path: Path) -> None:
    assert read_generation_defaults(tmp_path) == {} and describe_generation_defaults({}) == ""
    with pytest.raises(CheckpointError, match=r"generation_config\.json: top_p must be above 0 .* 7\.0; server\.gen"):
        read(tmp_path, {"top_p": 7})
    assert "temperature 0.6, top_p 0.9; server.generation_config: none" in describe_generation_defaults(
        read(tmp_path, LLAMA)
    )


@pytest.mark.parametrize(
    ("kind", "body", "most"),
    [
        ("chat", {"messages": CHAT}, 30),
        ("completion", {"prompt": "a"}, 16),
        ("response", {"input": "a"}, 30),
        ("message", {"messages": CHAT, "max_tokens": 7}, 7),
    ],
)
@pytest.mark.parametrize("is_on", [True, False])
def test_a_server_takes_it_for_requests_of_all_kinds(
    tmp_path: Path, kind: str, body: dict[str, Any], most: int, is_on: bool
) -> None:
    """From the model's directory to the process that reads requests, as facts travel to it."""
    path = make_checkpoint(tmp_path, tokenizer=True)
    (path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    values = {"do_sample": True, "temperature": 0.6, "top_k": 20, "max_new_tokens": 30}
    (path / "generation_config.json").write_text(json.dumps(values))
    section = {} if is_on else {"server": {"generation_config": "none"}}
    with mock.patch.object(parts, "Parsers") as parsers:
        made = parts.make_parts(JobSpec(configuration(path, None, **section)), Keys(()), EngineClient())
    facts = unpack(pack(parsers.call_args.args[0])[HEAD_BYTES:], Facts)
    task = Task(kind=kind, seconds=60.0, most_tokens=200)
    found, _ = RequestParser(facts, read_tokenizer(path)).read(task, json.dumps(body).encode())
    assert isinstance(found, Read)
    sampling = SamplingParams.from_mapping(found.samplings[0])
    if is_on:
        assert (sampling.temperature, sampling.top_k, sampling.max_tokens) == (0.6, 20, most)
    else:
        assert (sampling.temperature, sampling.top_k) == (1.0, 0)
    assert bool(made.sampling) == is_on


def test_requests_that_are_silent_have_it(tmp_path: Path) -> None:
    defaults = read(tmp_path, {**LLAMA, "max_new_tokens": 30})
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]}
    found = read_chat(chat, "m", (), defaults).answering.sampling
    assert (found.temperature, found.top_p, found.max_tokens) == (0.6, 0.9, 30)
    found = read_chat({**chat, "temperature": 0, "top_p": None, "max_tokens": 40}, "m", (), defaults).answering.sampling
    assert (found.temperature, found.top_p, found.max_tokens) == (0.0, 0.9, 40) and found.is_greedy
    found = read_completion({"prompt": "a"}, "m", (), defaults).answering.sampling
    assert (found.temperature, found.top_p, found.max_tokens) == (0.6, 0.9, 16)
    found = read_chat(chat, "m").answering.sampling
    assert (found.temperature, found.top_p, found.max_tokens) == (1.0, 1.0, LARGEST_COUNT)
