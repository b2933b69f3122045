"""Anthropic's client against a running server with the chat model of chat_model.py.

python anthropic_client.py URL MODEL      it runs in an environment that has anthropic
"""

from __future__ import annotations

import json
from typing import Any, Literal

import anthropic
from anthropic import beta_tool
from cases import case, run_cases, same
from pydantic import BaseModel

HELLO = "Hello, what may I do?"
SAID = "It is 21 degrees in Rome."
TOOL: dict[str, Any] = {
    "name": "weather",
    "description": "How warm it is in a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


class Record(BaseModel):
    """A record of an animal."""

    kind: Literal["cat", "dog"]
    age: int


@beta_tool
def weather(city: str) -> str:
    """How warm it is in a city.

    Args:
        city: its name
    """
    return f"21 degrees in {city}"


def make_client(url: str) -> anthropic.Anthropic:
    """As its users have it, without retries."""
    return anthropic.Anthropic(base_url=url, api_key="-", max_retries=0)


def asked(model: str, text: str, **others: Any) -> dict[str, Any]:
    """A request. The client has no argument for the temperature any more."""
    messages = [{"role": "user", "content": text}]
    return {"model": model, "max_tokens": 200, "messages": messages, "extra_body": {"temperature": 0}, **others}


@case("messages, count_tokens, models")
def whole(url: str, model: str) -> None:
    client = make_client(url)
    told = client.messages.create(**asked(model, "hi", system="be brief"))
    same((told.content[0].text, told.stop_reason, told.usage.output_tokens), (HELLO, "end_turn", 10))
    assert told._request_id
    counted = client.messages.count_tokens(
        model=model, system="be brief", messages=[{"role": "user", "content": "hi"}]
    ).input_tokens
    same(counted, told.usage.input_tokens + (told.usage.cache_read_input_tokens or 0))
    same([(one.id, one.type, one.display_name) for one in client.models.list()], [(model, "model", model)])


@case("streams, with the helper and without")
def streams(url: str, model: str) -> None:
    client = make_client(url)
    with client.messages.stream(**asked(model, "hi")) as stream:
        same("".join(stream.text_stream), HELLO)
        same(stream.get_final_message().usage.output_tokens, 10)
    kinds = [event.type for event in client.messages.create(**asked(model, "hi"), stream=True)]
    same((kinds[0], kinds[-1]), ("message_start", "message_stop"))


@case("each tool_choice, whole and streamed")
def tools(url: str, model: str) -> None:
    client = make_client(url)
    for choice in ({"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "weather"}):
        given = asked(model, "is it warm?", tools=[TOOL], tool_choice=choice)
        told = client.messages.create(**given)
        same((told.content[-1].type, told.content[-1].input), ("tool_use", {"city": "Rome"}))
        same(told.stop_reason, "tool_use")
        with client.messages.stream(**given) as stream:
            pieces = [event.partial_json for event in stream if event.type == "input_json"]
            same(json.loads("".join(pieces)), {"city": "Rome"})
            same(stream.get_final_message().content[-1].input, {"city": "Rome"})
    both = client.messages.create(**asked(model, "Rome and Oslo?", tools=[TOOL]))
    same([block.input["city"] for block in both.content], ["Rome", "Oslo"])
    one = {"type": "auto", "disable_parallel_tool_use": True}
    single = client.messages.create(**asked(model, "Rome and Oslo?", tools=[TOOL], tool_choice=one))
    same(len(single.content), 1)


@case("results go back")
def goes_back(url: str, model: str) -> None:
    client = make_client(url)
    given = asked(model, "Rome and Oslo?", tools=[TOOL])
    told = client.messages.create(**given)
    results = [{"type": "tool_result", "tool_use_id": block.id, "content": "21 degrees"} for block in told.content]
    given["messages"] += [{"role": "assistant", "content": told.content}, {"role": "user", "content": results}]
    same(client.messages.create(**given).content[0].text, SAID)


@case("thoughts, and their way back")
def thoughts(url: str, model: str) -> None:
    client = make_client(url)
    thinking = {"type": "enabled", "budget_tokens": 1024}
    given = asked(model, "think", max_tokens=2000, thinking=thinking)
    told = client.messages.create(**given)
    same([block.type for block in told.content], ["thinking", "text"])
    given["messages"] += [{"role": "assistant", "content": told.content}, {"role": "user", "content": "hi"}]
    with client.messages.stream(**given) as stream:
        assert stream.get_final_text()


@case("typed answers by messages.parse")
def typed(url: str, model: str) -> None:
    client = make_client(url)
    told = client.messages.parse(**asked(model, "a record"), output_format=Record)
    same(told.parsed_output, Record(kind="cat", age=3))
    told = client.beta.messages.parse(**asked(model, "a record"), output_format=Record)
    same(told.parsed_output, Record(kind="cat", age=3))


@case("beta.messages.tool_runner, whole and streamed")
def runner(url: str, model: str) -> None:
    client = make_client(url)
    given = asked(model, "Rome and Oslo?", tools=[weather])
    same(client.beta.messages.tool_runner(**given).until_done().content[0].text, SAID)
    last: Any = None
    for stream in client.beta.messages.tool_runner(**given, stream=True):
        last = stream.get_final_message()
    same(last.content[0].text, SAID)


@case("asynchronous")
async def asynchronous(url: str, model: str) -> None:
    async with anthropic.AsyncAnthropic(base_url=url, auth_token="-", api_key=None, max_retries=0) as client:
        told = await client.messages.create(**asked(model, "hi"))
        same(told.content[0].text, HELLO)


@case("refusals")
def refusals(url: str, model: str) -> None:
    client = make_client(url)
    for given, kind in (
        (asked(model, "x " * 9000), anthropic.BadRequestError),
        (asked("other", "hi"), anthropic.NotFoundError),
        (asked(model, "hi", tools=[{"name": "weather"}]), anthropic.BadRequestError),
    ):
        try:
            client.messages.create(**given)
        except kind:
            continue
        raise AssertionError("it was answered")


if __name__ == "__main__":
    run_cases()
