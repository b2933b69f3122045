"""Chats in Python and in rows of a file: prompts are transformers', answers those of the same tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint, make_tokenizer
from family_checkpoints import write_family
from pipelines import configuration, tokens_of
from transformers import AutoTokenizer

from launch.batch.checks import check_run, model_sampling, read_input
from launch.batch.complete import complete_rows
from launch.batch.input import InputRows
from launch.batch.options import RunOptions, SampledShare
from launch.batch.ordered import open_writer
from launch.jobs.mpi.job import Job
from trtrun import LLM, Chat, SamplingParams
from trtrun.errors import ConfigError, InvalidRequestError

TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if quiet %}shh {% endif %}{% endif %}"
    "{% if messages[0].content == 'no' %}{{ raise_exception('not this') }}{% endif %}"
)
MESSAGES = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "héllo"}]
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]
SAMPLING = {"temperature": 0.8, "top_k": 20, "seed": 5, "max_tokens": 6}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a chat template, and sampling of its own."""
    path = make_checkpoint(tmp_path_factory.mktemp("chats") / "model", tokenizer=True)
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    said = {"do_sample": True, "temperature": 0.8, "top_k": 20, "max_new_tokens": 6}
    (path / "generation_config.json").write_text(json.dumps(said))
    return path


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(config=configuration(model, None)) as llm:
        yield llm


@pytest.mark.parametrize(
    ("conversation", "fields"),
    [
        (MESSAGES, {}),
        (MESSAGES, {"tools": TOOLS, "chat_template_kwargs": {"quiet": True}}),
        (
            [*MESSAGES, {"role": "assistant", "content": "I think"}],
            {"add_generation_prompt": False, "continue_final_message": True},
        ),
        ([*MESSAGES, {"role": "assistant", "content": "Yes."}], {"add_generation_prompt": False}),
    ],
)
def test_prompts_of_chats_are_those_of_transformers(
    llm: LLM, model: Path, tmp_path: Path, conversation: Any, fields: dict[str, Any]
) -> None:
    """In a call, in a stream, and in a row of a file."""
    told = {"add_generation_prompt": True, **fields}
    told |= told.pop("chat_template_kwargs", {})
    expected = AutoTokenizer.from_pretrained(model).apply_chat_template(conversation, tokenize=False, **told)
    sampling = SamplingParams(**SAMPLING)  # type: ignore[arg-type]
    (output,) = llm.chat(conversation, sampling, **fields)
    assert output.error is None and output.prompt == expected
    assert llm.tokenizer is not None
    assert list(output.prompt_token_ids) == llm.tokenizer.encode(expected, add_special_tokens=False)
    assert tokens_of([output]) == tokens_of(llm.generate([list(output.prompt_token_ids)], sampling))
    streamed = list(llm.stream(Chat.read({"messages": conversation, **fields}), sampling))
    assert [token for delta in streamed for token in delta.token_ids] == list(output.completions[0].token_ids)
    row = run_rows(llm, tmp_path, [{"messages": conversation, **fields, **SAMPLING}])[0]
    assert row["error"] is None and row["token_ids"] == list(output.completions[0].token_ids)


def run_rows(llm: LLM, folder: Path, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    file, output = folder / "in.jsonl", folder / "out.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    given = InputRows(prompts_file=file)
    writer = open_writer(str(output), given, resume=False)
    complete_rows(llm, given, writer, lambda: None)
    writer.close()
    return [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]


def test_several_conversations_and_those_that_a_template_refuses(llm: LLM, tmp_path: Path) -> None:
    refused = [{"role": "user", "content": "no"}]
    first, second, third = llm.chat([MESSAGES, refused, tuple(MESSAGES)], SamplingParams(**SAMPLING))  # type: ignore[arg-type]
    assert tokens_of([first]) == tokens_of([third]) and first.error is None
    assert second.error == "messages: the model's chat template refuses them: 'not this'"
    rows = run_rows(llm, tmp_path, [{"messages": MESSAGES, **SAMPLING}, {"messages": refused}])
    assert rows[0]["token_ids"] == list(first.completions[0].token_ids) and rows[1]["error"] == second.error
    with pytest.raises(InvalidRequestError, match=r"messages\[0\]\.role must be one of system"):
        llm.chat([{"role": "you", "content": "a"}])
    with pytest.raises(InvalidRequestError, match="messages must be a list with one message at least"):
        llm.chat([])


def test_a_call_without_parameters_has_the_models_own(llm: LLM, model: Path) -> None:
    """As in vLLM: what a call gives is all that it gets."""
    own = SamplingParams(temperature=0.8, top_k=20, max_tokens=6)
    assert llm.default_sampling == own
    assert len(llm.generate(["abc"])[0].completions[0].token_ids) == 6
    assert sum(len(delta.token_ids) for delta in llm.stream("abc")) == 6
    assert len(llm.generate(["abc"], SamplingParams(max_tokens=9))[0].completions[0].token_ids) == 9
    options = RunOptions(prompts=("abc",), sampling={"temperature": 0.0, "seed": 3})
    (row,) = read_input(options, llm.config).read()
    assert row.sampling == SamplingParams(temperature=0.0, seed=3, top_k=20, max_tokens=6)
    plain = configuration(model, None, server={"generation_config": "none"})
    (row,) = read_input(options, plain).read()
    assert row.sampling == SamplingParams(temperature=0.0, seed=3)
    assert model_sampling(replace(options, sampled=SampledShare(0.5, 0.8, 0)), llm.config) == {}


def test_what_lacks_a_template_is_refused_before_anything_is_loaded(model: Path, tmp_path: Path) -> None:
    plain = make_checkpoint(tmp_path / "plain", tokenizer=True)
    rows = tmp_path / "in.jsonl"
    rows.write_text(json.dumps({"messages": MESSAGES}), encoding="utf-8")
    options = RunOptions(prompts_file=rows, sampling={"max_tokens": 2})
    check_run(Job(configuration(model, None), []), options)
    with pytest.raises(ConfigError, match=r"plain has no chat template, and rows have messages: add chat_t"):
        check_run(Job(configuration(plain, None), []), options)
    with LLM(plain, device="cpu:0", generation_config="none") as llm:
        (output,) = llm.chat(MESSAGES)
    assert output.error is not None and output.error.startswith("messages: the model has no chat template: give a")
    with pytest.raises(ConfigError, match="generation_config"):
        LLM(plain, device="cpu:0", generation_config="non")


GEMMA = (
    "{{ bos_token }}{% set first = messages[0].content + '\n\n' if messages[0].role == 'system' else '' %}"
    "{% for message in messages if message.role != 'system' %}"
    "<start_of_turn>{{ 'model' if message.role == 'assistant' else message.role }}\n"
    "{{ first if loop.first else '' }}{{ message.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
"""Turns as Gemma has them: the system's words stand in the user's, and a special token ends each."""
END_OF_TURN = 2


@pytest.mark.parametrize("speculation", [{"method": "none"}, {"method": "ngram", "prompt_lookup_min": 1}])
def test_a_chat_ends_with_gemmas_turn(tmp_path: Path, speculation: dict[str, Any]) -> None:
    """generation_config.json lists its end beside that of texts; config.json has the latter alone."""
    path = write_family(tmp_path, "gemma3_text", vocab_size=260, eos_token_id=0)
    make_tokenizer(path, add_bos=True, special=("<start_of_turn>", "<end_of_turn>"))
    (path / "chat_template.jinja").write_text(GEMMA)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, END_OF_TURN]}))
    expected = AutoTokenizer.from_pretrained(path).apply_chat_template(MESSAGES, add_generation_prompt=True)
    sampling = SamplingParams(max_tokens=20, min_tokens=6, logit_bias={END_OF_TURN: 100.0})
    with LLM(config=configuration(path, None, speculation=speculation)) as llm:
        outputs = llm.chat([MESSAGES, MESSAGES], [sampling, replace(sampling, ignore_eos=True)])
    assert [list(output.prompt_token_ids) for output in outputs] == [expected["input_ids"]] * 2
    assert expected["input_ids"].count(0) == 1
    (ended,), (ignoring,) = (output.completions for output in outputs)
    assert ended.finish_reason == "stop" and ended.token_ids[-1] == END_OF_TURN and len(ended.token_ids) == 7
    assert "end_of_turn" not in ended.text and len(ignoring.token_ids) == 20
