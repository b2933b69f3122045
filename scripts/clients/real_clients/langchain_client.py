"""LangChain's ChatOpenAI against a running server with the chat model of chat_model.py.

python langchain_client.py URL MODEL      it runs in an environment that has langchain and langchain-openai
"""

from __future__ import annotations

from typing import Any, Literal

from cases import case, run_cases, same
from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

CALL = {"name": "weather", "args": {"city": "Rome"}, "type": "tool_call"}
OTHER = {"name": "weather", "args": {"city": "Oslo"}, "type": "tool_call"}
SAID = "It is 21 degrees in Rome."
HELLO = "Hello, what may I do?"


class Record(BaseModel):
    """A record of an animal."""

    kind: Literal["cat", "dog"]
    age: int = Field(ge=0, le=99)


class Report(BaseModel):
    """How warm it is."""

    city: Literal["Rome", "Oslo"]
    degrees: int = Field(ge=0, le=50)


@tool
def weather(city: str) -> str:
    """How warm it is in a city."""
    return f"21 degrees in {city}"


def make_chat(url: str, model: str, **options: Any) -> ChatOpenAI:
    """A client as LangChain's users have it: of the server it is told the URL and the name of the model."""
    values: dict[str, Any] = {"temperature": 0, "max_retries": 0, **options}
    return ChatOpenAI(model=model, base_url=f"{url}/v1", api_key="-", **values)


@case("invoke, usage, metadata")
def invoke(url: str, model: str) -> None:
    told = make_chat(url, model).invoke([SystemMessage("be brief"), HumanMessage("hi")])
    same(told.content, HELLO)
    assert told.usage_metadata and told.usage_metadata["output_tokens"] > 0
    same(told.response_metadata["finish_reason"], "stop")
    same(told.response_metadata["model_name"], model)


@case("stream, with usage")
def stream(url: str, model: str) -> None:
    chunks = list(make_chat(url, model, stream_usage=True).stream("hi"))
    same("".join(str(chunk.content) for chunk in chunks), HELLO)
    same(sum(chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata), 10)


@case("batch, n, stop, seed, logprobs")
async def options(url: str, model: str) -> None:
    chat = make_chat(url, model, temperature=0.7, seed=3, stop_sequences=["?"], logprobs=True, top_logprobs=2)
    for told in await chat.abatch(["hi", "hello"]):
        assert len(told.response_metadata["logprobs"]["content"]) > 0 and "?" not in told.content
    several = await make_chat(url, model, n=2, temperature=0.7).agenerate([[HumanMessage("hi")]])
    same(len(several.generations[0]), 2)


@case("with_structured_output, by json_schema, function_calling and json_mode")
def structured(url: str, model: str) -> None:
    for method in ("json_schema", "function_calling", "json_mode"):
        for strict in (None, True, False) if method != "json_mode" else (None,):
            asked = make_chat(url, model).with_structured_output(Record, method=method, strict=strict)
            same(asked.invoke("a record as JSON"), Record(kind="cat", age=3))
    asked = make_chat(url, model).with_structured_output(Record.model_json_schema(), method="json_schema")
    same(asked.invoke("a record as JSON"), {"kind": "cat", "age": 3})
    both = make_chat(url, model).with_structured_output(Record, include_raw=True).invoke("a record")
    same((both["parsed"], both["parsing_error"]), (Record(kind="cat", age=3), None))


@case("with_structured_output, streamed")
def structured_streams(url: str, model: str) -> None:
    for method in ("json_schema", "function_calling", "json_mode"):
        asked = make_chat(url, model).with_structured_output(Record, method=method)
        same(list(asked.stream("a record as JSON"))[-1], Record(kind="cat", age=3))


@case("bind_tools, each tool_choice")
def tool_choices(url: str, model: str) -> None:
    for choice in (None, "auto", "any", "required", "weather", True):
        for strict in (None, True):
            told = make_chat(url, model).bind_tools([weather], tool_choice=choice, strict=strict).invoke("warm?")
            same([{**call, "id": ""} for call in told.tool_calls], [{**CALL, "id": ""}])
            same(told.invalid_tool_calls, [])
    told = make_chat(url, model).bind_tools([weather], tool_choice="none").invoke("warm?")
    same(told.tool_calls, [])


@case("several calls, and parallel_tool_calls false")
def parallel(url: str, model: str) -> None:
    told = make_chat(url, model).bind_tools([weather]).invoke("Rome and Oslo?")
    same([{**call, "id": ""} for call in told.tool_calls], [{**CALL, "id": ""}, {**OTHER, "id": ""}])
    told = make_chat(url, model).bind_tools([weather], parallel_tool_calls=False).invoke("Rome and Oslo?")
    same(len(told.tool_calls), 1)


@case("streamed calls")
def streamed_calls(url: str, model: str) -> None:
    whole: Any = None
    for chunk in make_chat(url, model).bind_tools([weather]).stream("Rome and Oslo?"):
        whole = chunk if whole is None else whole + chunk
    same([call["args"] for call in whole.tool_calls], [{"city": "Rome"}, {"city": "Oslo"}])
    same(len({call["id"] for call in whole.tool_calls}), 2)
    same(whole.response_metadata["finish_reason"], "tool_calls")


@case("an answer with calls goes back with their results")
def goes_back(url: str, model: str) -> None:
    chat = make_chat(url, model).bind_tools([weather])
    messages: list[Any] = [HumanMessage("Rome and Oslo?")]
    told = chat.invoke(messages)
    assert isinstance(told, AIMessage)
    messages += [told, *(weather.invoke(call) for call in told.tool_calls)]
    assert isinstance(messages[-1], ToolMessage)
    same(chat.invoke(messages).content, SAID)


@case("an agent: a call, its result, an answer")
def agent(url: str, model: str) -> None:
    answer = create_agent(make_chat(url, model), [weather]).invoke({"messages": [HumanMessage("warm in Rome?")]})
    kinds = [message.type for message in answer["messages"]]
    same(kinds, ["human", "ai", "tool", "ai"])
    same(answer["messages"][-1].content, SAID)


@case("an agent, streamed")
async def agent_stream(url: str, model: str) -> None:
    running = create_agent(make_chat(url, model), [weather])
    pieces = [piece async for piece, _ in running.astream({"messages": "warm in Rome?"}, stream_mode="messages")]
    text = "".join(str(piece.content) for piece in pieces if piece.type == "AIMessageChunk")
    same(text, SAID)


@case("an agent with a typed answer, by a tool and by response_format")
def typed_agent(url: str, model: str) -> None:
    asked: Any = {"messages": [HumanMessage("warm in Rome? report")]}
    by_tool = create_agent(make_chat(url, model), [weather], response_format=ToolStrategy(Report)).invoke(asked)
    same(by_tool["structured_response"], Report(city="Rome", degrees=21))
    by_format = create_agent(make_chat(url, model), [weather], response_format=ProviderStrategy(Report)).invoke(asked)
    same(by_format["structured_response"], Report(city="Rome", degrees=21))
    same(by_format["messages"][-2].type, "tool")


@case("use_responses_api: text, calls, typed answers, an agent")
def responses(url: str, model: str) -> None:
    chat = make_chat(url, model, use_responses_api=True)
    told = chat.invoke("hi")
    same(told.text, HELLO)
    assert told.usage_metadata and told.usage_metadata["output_tokens"] == 10
    same("".join(chunk.text for chunk in chat.stream("hi")), HELLO)
    same(chat.bind_tools([weather]).invoke("warm?").tool_calls[0]["args"], {"city": "Rome"})
    same(chat.with_structured_output(Record).invoke("a record"), Record(kind="cat", age=3))
    answer = create_agent(chat, [weather]).invoke({"messages": [HumanMessage("warm in Rome?")]})
    same(answer["messages"][-1].text, SAID)


@case("a prompt that is too long")
def too_long(url: str, model: str) -> None:
    for chat in (make_chat(url, model), make_chat(url, model, use_responses_api=True)):
        try:
            chat.invoke("x " * 9000)
        except ContextOverflowError:
            continue
        raise AssertionError("it was answered")


if __name__ == "__main__":
    run_cases()
