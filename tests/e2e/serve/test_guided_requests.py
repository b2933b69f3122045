"""Guided output through the server: under the names of OpenAI, vLLM and Triton, whole and in streams, and refusals."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal
from urllib.parse import urlsplit

import jsonschema
import openai
import pydantic
import pytest
from servers import PATIENCE, Server, wait_until

from trtrun import LLM, SamplingParams

pytestmark = pytest.mark.timeout(300)
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
GENERATE, TOKENS = "/v2/models/ensemble/generate", "/v2/models/tensorrt_llm/generate"
PROMPT = "The record is: "
MESSAGES: list[Any] = [{"role": "user", "content": "write a record"}]
CHAT_PROMPT = "# user\nwrite a record\n# answer\n"
SCHEMA: dict[str, Any] = {
    "x-guidance": {"whitespace_flexible": False},
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["kind", "age"],
    "additionalProperties": False,
}
OPEN = {key: value for key, value in SCHEMA.items() if key != "x-guidance"}
REGEX, CHOICE, GRAMMAR = "[a-c]{3}-[0-9]{2}", ["yes", "no"], 'root ::= "(" [0-9] ")"'
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "pet", "schema": SCHEMA, "strict": True}}


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="-", timeout=PATIENCE, max_retries=0) as client:
        yield client


def text_of(llm: LLM, prompt: str, guided: Any, **others: Any) -> str:
    sampling = SamplingParams(**{"max_tokens": 24, "guided": guided, **others})
    return llm.generate([prompt], sampling)[0].completions[0].text


@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 1.0, "seed": 4}], ids=["greedy", "seed"])
def test_answers_to_a_schema_are_those_of_the_python_api(
    client: openai.OpenAI, llm: LLM, options: dict[str, Any]
) -> None:
    asked: dict[str, Any] = {"model": "pair", "messages": MESSAGES, "response_format": JSON_SCHEMA, "max_tokens": 24}
    expected = text_of(llm, CHAT_PROMPT, {"json": SCHEMA}, **options)
    jsonschema.validate(json.loads(expected), SCHEMA)
    (choice,) = client.chat.completions.create(**asked, **options).choices
    assert choice.message.content == expected and choice.finish_reason == "stop"
    chunks = list(client.chat.completions.create(**asked, **options, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected
    several = client.chat.completions.create(**asked, temperature=1.0, seed=9, n=3).choices
    for choice in several:
        jsonschema.validate(json.loads(choice.message.content or ""), SCHEMA)


def test_the_clients_own_models_are_answered(client: openai.OpenAI) -> None:
    class Pet(pydantic.BaseModel):
        kind: Literal["cat", "dog"]
        is_tame: bool

    answer = client.chat.completions.parse(
        model="pair", messages=MESSAGES, response_format=Pet, max_tokens=200, temperature=0
    )
    assert isinstance(answer.choices[0].message.parsed, Pet)


NAMES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"guided_json": SCHEMA}, {"json": SCHEMA}),
    ({"guided_json": json.dumps(SCHEMA), "guided_regex": None}, {"json": SCHEMA}),
    ({"guided_regex": REGEX}, {"regex": REGEX}),
    ({"guided_choice": CHOICE}, {"choice": CHOICE}),
    ({"guided_grammar": GRAMMAR}, {"grammar": GRAMMAR}),
    ({"structured_outputs": {"json": SCHEMA, "disable_fallback": False, "regex": None}}, {"json": SCHEMA}),
    ({"structured_outputs": {"json": OPEN, "disable_any_whitespace": True}}, {"json": SCHEMA}),
    ({"structured_outputs": {"json": OPEN, "whitespace_pattern": ""}}, {"json": SCHEMA}),
    (
        {"structured_outputs": {"disable_any_whitespace": True}, "response_format": {"type": "json_object"}},
        {"json_object": True, "disable_any_whitespace": True},
    ),
    ({"guided_json": OPEN, "guided_whitespace_pattern": " "}, {"json": OPEN, "whitespace_pattern": " "}),
    ({"guided_regex": REGEX, "guided_whitespace_pattern": " "}, {"regex": REGEX}),
    ({"structured_outputs": {"choice": CHOICE, "disable_any_whitespace": True}}, {"choice": CHOICE}),
    ({"structured_outputs": {"json_object": True}}, {"json_object": True}),
    ({"response_format": {"type": "json_object"}}, {"json_object": True}),
    ({"response_format": JSON_SCHEMA}, {"json": SCHEMA}),
    ({"response_format": {"type": "text"}, "regex": REGEX}, {"regex": REGEX}),
    ({"ebnf": GRAMMAR}, {"grammar": GRAMMAR}),
    ({"grammar": GRAMMAR, "json_schema": {}}, {"grammar": GRAMMAR}),
    ({"json_schema": SCHEMA, "grammar": ""}, {"json": SCHEMA}),
    ({"guided": {"regex": REGEX}}, {"regex": REGEX}),
]


def test_names_of_other_servers_mean_the_same(server: Server, llm: LLM) -> None:
    for fields, guided in NAMES:
        body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 24, **fields}
        (choice,) = server.post(COMPLETIONS, body).raise_for_status().json()["choices"]
        assert choice["text"] == text_of(llm, PROMPT, guided), fields


BAD: list[tuple[dict[str, Any], str, str | None]] = [
    ({"response_format": "json"}, "response_format must be an object such as", "response_format"),
    ({"response_format": {"type": "json"}}, "response_format.type must be text, json_object", "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema must be an object with a schema", None),
    ({"response_format": {"type": "text", "schema": {}}}, "unknown field", "response_format"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": [1]}}},
        "response_format.json_schema.schema must be a JSON schema",
        "response_format",
    ),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice and guided_regex both say", "guided_regex"),
    ({"guided_regex": 5}, "guided_regex must be a text", "guided_regex"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs.json and structured_outputs.regex", None),
    ({"structured_outputs": {"json": False}}, "Unsatisfiable schema: schema is false", None),
    ({"structured_outputs": {"structural_tag": "x"}}, "unknown field", "structured_outputs"),
    (
        {"structured_outputs": {"json_object": True, "disable_any_whitespace": 1}},
        "structured_outputs.disable_any_whitespace must be true or false",
        "structured_outputs",
    ),
    (
        {"guided_json": {}, "guided_whitespace_pattern": "a*"},
        "guided_whitespace_pattern must be a regular expression of blanks",
        None,
    ),
    ({"guided_json": {}, "guided_whitespace_pattern": "("}, "the JSON schema cannot be followed", None),
    (
        {"guided": {"regex": "a", "disable_any_whitespace": True}},
        "guided.disable_any_whitespace is of JSON: leave it out with regex",
        None,
    ),
    ({"guided": {"jsn": {}}}, "guided must be an object with one of", "guided"),
    (
        {"guided_json": {"type": "object", "properties": {"a": {"type": "strin"}}}},
        "the JSON schema cannot be followed at /properties/a: Invalid type: strin",
        None,
    ),
    ({"guided_regex": "(a"}, "the regular expression cannot be followed", None),
    ({"guided_grammar": "start: foo"}, "the grammar cannot be followed", None),
]


def test_what_is_wrong_is_said_in_a_line(server: Server) -> None:
    for path, rest in ((COMPLETIONS, {"prompt": PROMPT}), (CHATS, {"messages": MESSAGES})):
        for fields, said, param in BAD:
            answer = server.post(path, {**rest, "max_tokens": 2, **fields})
            assert answer.status_code == 400, (fields, answer.text)
            error = answer.json()["error"]
            assert said in error["message"] and "\n" not in error["message"], error
            assert param is None or error["param"] == param
    long = {"prompt": PROMPT, "guided_choice": ["x" * 1000] * 15, "max_tokens": 2, "guided_regex": "a"}
    assert server.post(COMPLETIONS, long).status_code == 400
    assert not [line for line in server.lines if "Traceback" in line]


NEVER_ENDS = {"type": "string", "allOf": [{"pattern": f"(a|b)*a(a|b){{{count}}}"} for count in range(5, 25)]}
"""Each pattern doubles what the library does, more than once: a few hundred characters are hours of work."""
TRITON_NEVER_ENDS = {"guided_decoding_guide_type": "json_schema", "guided_decoding_guide": json.dumps(NEVER_ENDS)}
NEVER_ENDING: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": PROMPT, "max_tokens": 2, "guided_json": NEVER_ENDS}),
    (GENERATE, {"text_input": PROMPT, "max_tokens": 2, **TRITON_NEVER_ENDS}),
]


def test_what_never_ends_is_ended_elsewhere_than_in_the_front(server: Server) -> None:
    """Which costs seconds of a core; those who ask by Triton's names wait for the same process."""
    answer = server.post(*NEVER_ENDING[0])
    assert answer.status_code in (400, 413), answer.text
    assert re.search("(processor time|more memory).*: send less at once, or a simpler", answer.text), answer.text


def count(server: Server, model: str, name: str, **labels: str) -> float:
    """A counter of a model, 0 before its first request."""
    wanted = ",".join(f'{label}="{value}"' for label, value in {"model": model, **labels, "version": "1"}.items())
    return server.metrics().get(f"nv_inference_{name}{{{wanted}}}", 0.0)


@contextmanager
def being_read(server: Server, model: str, path: str, body: dict[str, Any]) -> Iterator[None]:
    """Send a request that takes long to read; within the block it is read, behind it the client has gone."""
    server.wait_idle()
    content = json.dumps(body).encode()
    address = urlsplit(server.url)
    assert address.hostname is not None and address.port is not None
    with socket.create_connection((address.hostname, address.port), PATIENCE) as client:
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
        client.sendall(head.encode() + content)
        wait_until(lambda: count(server, model, "pending_request_count") or None, "the request is read")
        yield
    wait_until(lambda: not count(server, model, "pending_request_count") or None, "the request is over")


@pytest.mark.parametrize(("model", "path", "body"), [("pair", *NEVER_ENDING[0]), ("ensemble", *NEVER_ENDING[1])])
def test_no_guide_is_built_for_a_client_that_has_gone(
    server: Server, model: str, path: str, body: dict[str, Any]
) -> None:
    given_up = count(server, model, "request_failure", reason="CANCELED")
    with being_read(server, model, path, body):
        pass
    assert count(server, model, "request_failure", reason="CANCELED") == given_up + 1


def test_other_guides_do_not_wait_for_one_that_takes_long(server: Server) -> None:
    body = {"prompt": PROMPT, "max_tokens": 2, "guided_choice": ["yes", "no"]}
    with being_read(server, "pair", *NEVER_ENDING[0]):
        assert server.post(COMPLETIONS, body).status_code == 200
        assert count(server, "pair", "pending_request_count") == 1, "it is still read"


def test_triton_clients_ask_by_their_names(server: Server, llm: LLM) -> None:
    assert llm.tokenizer is not None
    for kind, guide, guided in (
        ("json_schema", json.dumps(SCHEMA), {"json": SCHEMA}),
        ("regex", REGEX, {"regex": REGEX}),
        ("ebnf_grammar", GRAMMAR, {"grammar": GRAMMAR}),
        ("json", None, {"json": True}),
    ):
        named = {"guided_decoding_guide_type": kind} | ({} if guide is None else {"guided_decoding_guide": guide})
        told = server.post(GENERATE, {"text_input": PROMPT, "max_tokens": 24, **named}).raise_for_status().json()
        assert told["text_output"] == text_of(llm, PROMPT, guided)
        ids = llm.tokenizer.encode(PROMPT)
        asked = {"input_ids": ids, "input_lengths": len(ids), "request_output_len": 24, **named}
        told = server.post(TOKENS, asked | {"exclude_input_in_output": True}).raise_for_status().json()
        assert llm.tokenizer.decode(told["output_ids"]).startswith(text_of(llm, PROMPT, guided))
    for named, said in (
        ({"guided_decoding_guide": "a"}, "guided_decoding_guide_type"),
        ({"guided_decoding_guide_type": "regex"}, "is missing beside the type regex"),
        ({"guided_decoding_guide_type": "rgx", "guided_decoding_guide": "a"}, "must be one of json, json_schema"),
        ({"guided_decoding_guide_type": "json", "guided_decoding_guide": "{}"}, "does not go with the type json"),
        ({"guided_decoding_guide_type": "regex", "guided_decoding_guide": "(a"}, "cannot be followed"),
    ):
        answer = server.post(GENERATE, {"text_input": PROMPT, "max_tokens": 2, **named})
        assert answer.status_code == 400 and said in answer.json()["error"], answer.text


def test_what_ends_by_itself_is_whole(server: Server) -> None:
    body = {"prompt": PROMPT, "temperature": 1.0, "seed": 2, "n": 4, "max_tokens": 24, "guided_regex": REGEX}
    choices = server.post(COMPLETIONS, body).raise_for_status().json()["choices"]
    assert all(choice["finish_reason"] == "stop" and re.fullmatch(REGEX, choice["text"]) for choice in choices)
