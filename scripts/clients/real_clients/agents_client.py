"""OpenAI's Agents SDK against a running server with the chat model of chat_model.py.

python agents_client.py URL MODEL      it runs in an environment that has openai-agents
"""

from __future__ import annotations

from typing import Any, Literal

import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    SQLiteSession,
    function_tool,
    set_tracing_disabled,
)
from cases import case, run_cases, same
from pydantic import BaseModel

SAID = "It is 21 degrees in Rome."
KINDS = (OpenAIChatCompletionsModel, OpenAIResponsesModel)


class Report(BaseModel):
    """How warm it is."""

    city: Literal["Rome", "Oslo"]
    degrees: int


@function_tool
def weather(city: str) -> str:
    """How warm it is in a city."""
    return f"21 degrees in {city}"


def make_agent(url: str, model: str, kind: Any, **options: Any) -> Agent[None]:
    """An agent over chats, or over responses."""
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0)
    settings = ModelSettings(**{"temperature": 0.0, **options.pop("settings", {})})
    return Agent(**{"name": "assistant", "model": kind(model, client), "model_settings": settings, **options})


@case("text, over chats and responses")
async def text(url: str, model: str) -> None:
    for kind in KINDS:
        told = await Runner.run(make_agent(url, model, kind, instructions="be brief"), "hi")
        same(told.final_output, "Hello, what may I do?")
        same(told.context_wrapper.usage.output_tokens, 10)


@case("calls, their results, an answer")
async def tools(url: str, model: str) -> None:
    for kind in KINDS:
        for choice in (None, "auto", "required", "weather"):
            agent = make_agent(url, model, kind, tools=[weather], settings={"tool_choice": choice})
            told = await Runner.run(agent, "is it warm?")
            same(told.final_output, SAID)
            same(len(told.raw_responses), 2)
        agent = make_agent(url, model, kind, tools=[weather], settings={"parallel_tool_calls": True})
        same(len((await Runner.run(agent, "Rome and Oslo?")).new_items), 5)


@case("streamed")
async def streamed(url: str, model: str) -> None:
    for kind in KINDS:
        running = Runner.run_streamed(make_agent(url, model, kind, tools=[weather]), "is it warm?")
        names, told = [], ""
        async for event in running.stream_events():
            if event.type == "run_item_stream_event":
                names.append(event.name)
            elif event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
                told += event.data.delta
        same(running.final_output, SAID)
        same(told, SAID)
        same(names, ["tool_called", "tool_output", "message_output_created"])


@case("a typed answer behind a tool")
async def typed(url: str, model: str) -> None:
    for kind in KINDS:
        agent = make_agent(url, model, kind, tools=[weather], output_type=Report)
        told = await Runner.run(agent, "report whether it is warm")
        same(told.final_output, Report(city="Rome", degrees=21))
        same(len(told.raw_responses), 2)


@case("a handoff to another agent")
async def handoff(url: str, model: str) -> None:
    for kind in KINDS:
        other = make_agent(url, model, kind, name="forecaster", tools=[weather])
        told = await Runner.run(make_agent(url, model, kind, handoffs=[other]), "is it warm?")
        same((told.last_agent.name, told.final_output), ("forecaster", SAID))


@case("a conversation that goes on, thoughts in it")
async def session(url: str, model: str) -> None:
    for kind in KINDS:
        kept = SQLiteSession(kind.__name__)
        agent = make_agent(url, model, kind, tools=[])
        same((await Runner.run(agent, "think", session=kept)).final_output, "Yes, it is warm.")
        same((await Runner.run(agent, "hi", session=kept)).final_output, "Hello, what may I do?")


if __name__ == "__main__":
    set_tracing_disabled(True)
    run_cases()
