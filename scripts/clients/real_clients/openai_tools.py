"""OpenAI's client for Python against a running server with the chat model of chat_model.py: its helpers for types.

python openai_tools.py URL MODEL      it runs in an environment that has openai
"""

from __future__ import annotations

import json
from typing import Any, Literal

import openai
from cases import case, run_cases, same
from pydantic import BaseModel

HELLO = "Hello, what may I do?"
SAID = "It is 21 degrees in Rome."


class Record(BaseModel):
    """A record of an animal."""

    kind: Literal["cat", "dog"]
    age: int


class weather(BaseModel):
    """How warm it is in a city."""

    city: str


def make_client(url: str) -> openai.OpenAI:
    """As its users have it, without retries."""
    return openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0)


def asked(model: str, text: str, **others: Any) -> dict[str, Any]:
    """A request for a chat."""
    return {"model": model, "temperature": 0, "messages": [{"role": "user", "content": text}], **others}


@case("chat.completions.parse: a type, a tool by a type, an answer that is cut")
def parse(url: str, model: str) -> None:
    client = make_client(url)
    told = client.chat.completions.parse(**asked(model, "a record"), response_format=Record)
    same(told.choices[0].message.parsed, Record(kind="cat", age=3))
    told = client.chat.completions.parse(**asked(model, "warm?"), tools=[openai.pydantic_function_tool(weather)])
    same(told.choices[0].message.tool_calls[0].function.parsed_arguments, weather(city="Rome"))
    try:
        client.chat.completions.parse(**asked(model, "a record", max_tokens=3), response_format=Record)
    except openai.LengthFinishReasonError as error:
        same(error.completion.choices[0].finish_reason, "length")
    else:
        raise AssertionError("it was no error")


@case("chat.completions.stream: events, types, calls, usage")
def stream(url: str, model: str) -> None:
    client = make_client(url)
    with client.chat.completions.stream(**asked(model, "a record"), response_format=Record) as events:
        kinds = {event.type for event in events}
        same(events.get_final_completion().choices[0].message.parsed, Record(kind="cat", age=3))
    assert {"chunk", "content.delta", "content.done"} <= kinds, kinds
    tools = [openai.pydantic_function_tool(weather)]
    options = {"include_usage": True}
    with client.chat.completions.stream(
        **asked(model, "Rome and Oslo?"), tools=tools, stream_options=options
    ) as events:
        done = [event.parsed_arguments for event in events if event.type == "tool_calls.function.arguments.done"]
        final = events.get_final_completion()
    same(done, [weather(city="Rome"), weather(city="Oslo")])
    same([call.function.parsed_arguments for call in final.choices[0].message.tool_calls], done)
    assert final.usage.completion_tokens > 30


@case("an answer with calls goes back with their results")
def goes_back(url: str, model: str) -> None:
    client, tools = make_client(url), [openai.pydantic_function_tool(weather)]
    given = asked(model, "Rome and Oslo?", tools=tools)
    message = client.chat.completions.create(**given).choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": "21"} for call in message.tool_calls]
    given["messages"] += [message, *results]
    same(client.chat.completions.create(**given).choices[0].message.content, SAID)


@case("responses: create, parse, stream, calls that go back")
def responses(url: str, model: str) -> None:
    client, given = make_client(url), {"model": model, "temperature": 0}
    same(client.responses.create(**given, input="hi").output_text, HELLO)
    same(client.responses.parse(**given, input="a record", text_format=Record).output_parsed, Record(kind="cat", age=3))
    with client.responses.stream(**given, input="a record", text_format=Record) as events:
        assert [event for event in events if event.type == "response.output_text.delta"]
        same(events.get_final_response().output_parsed, Record(kind="cat", age=3))
    function = openai.pydantic_function_tool(weather)["function"]
    tools = [{"type": "function", **function}]
    said: list[Any] = [{"role": "user", "content": "Rome and Oslo?"}]
    told = client.responses.create(**given, input=said, tools=tools)
    calls = [item for item in told.output if item.type == "function_call"]
    same([json.loads(call.arguments)["city"] for call in calls], ["Rome", "Oslo"])
    said += told.output
    said += [{"type": "function_call_output", "call_id": call.call_id, "output": "21"} for call in calls]
    same(client.responses.create(**given, input=said, tools=tools).output_text, SAID)


@case("asynchronous")
async def asynchronous(url: str, model: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as client:
        told = await client.chat.completions.parse(**asked(model, "a record"), response_format=Record)
        same(told.choices[0].message.parsed, Record(kind="cat", age=3))
        async with client.chat.completions.stream(**asked(model, "think")) as events:
            final = await events.get_final_completion()
        same(final.choices[0].message.content, "Yes, it is warm.")


if __name__ == "__main__":
    run_cases()
