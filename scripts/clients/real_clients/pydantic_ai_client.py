"""Pydantic AI against a running server with the chat model of chat_model.py: over chats, responses and messages.

python pydantic_ai_client.py URL MODEL      it runs in an environment that has pydantic-ai-slim[openai,anthropic]
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from cases import case, run_cases, same
from pydantic import BaseModel
from pydantic_ai import Agent, ModelRetry, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

HELLO = "Hello, what may I do?"
SAID = "It is 21 degrees in Rome."
ASKED = "report whether it is warm"


class Report(BaseModel):
    """How warm it is."""

    city: Literal["Rome", "Oslo"]
    degrees: int


def models(url: str, model: str) -> Iterator[Any]:
    """The server, by each of its ways in."""
    provider = OpenAIProvider(base_url=f"{url}/v1", api_key="-")
    yield OpenAIChatModel(model, provider=provider)
    yield OpenAIResponsesModel(model, provider=provider)
    yield AnthropicModel(model, provider=AnthropicProvider(base_url=url, api_key="-"))


def make_agent(model: Any, *tools: Any, **options: Any) -> Agent[None, Any]:
    """An agent with tools."""
    return Agent(model, tools=tools, model_settings={"temperature": 0.0, "max_tokens": 300}, **options)


def weather(city: str) -> str:
    """How warm it is in a city."""
    return f"21 degrees in {city}"


@case("text, whole and streamed")
async def text(url: str, model: str) -> None:
    for one in models(url, model):
        told = await make_agent(one, instructions="be brief").run("hi")
        same((told.output, told.usage.output_tokens), (HELLO, 10))
        async with make_agent(one).run_stream("hi") as stream:
            same([piece async for piece in stream.stream_text()][-1], HELLO)


@case("a call, its result, an answer; whole and streamed")
async def tools(url: str, model: str) -> None:
    for one in models(url, model):
        for said in ("is it warm?", "Rome and Oslo?"):
            same((await make_agent(one, weather).run(said)).output, SAID)
            async with make_agent(one, weather).run_stream(said) as stream:
                same(await stream.get_output(), SAID)


@case("typed answers: by a tool, by response_format, by what the prompt says")
async def typed(url: str, model: str) -> None:
    for one in models(url, model):
        for kind in (ToolOutput, NativeOutput, PromptedOutput):
            if kind is NativeOutput and isinstance(one, AnthropicModel):
                continue  # it offers that for models of Anthropic's own names alone
            for given in ((), (weather,)):
                told = await make_agent(one, *given, output_type=kind(Report)).run(ASKED)
                same(told.output, Report(city="Rome", degrees=21))
            print("  ", type(one).__name__, kind.__name__)


@case("a typed answer, streamed")
async def typed_streams(url: str, model: str) -> None:
    for one in models(url, model):
        async with make_agent(one, output_type=Report).run_stream(ASKED) as stream:
            same([piece async for piece in stream.stream_output()][-1], Report(city="Rome", degrees=21))


@case("a tool that asks for another try")
async def retries(url: str, model: str) -> None:
    for one in models(url, model):
        tries: list[str] = []

        def strict(city: str, tries: list[str] = tries) -> str:
            """How warm it is in a city."""
            tries.append(city)
            if len(tries) == 1:
                raise ModelRetry("say it once more")
            return "21 degrees"

        strict.__name__ = "weather"
        told = await make_agent(one, strict).run("is it warm?")
        same(told.output, SAID)


if __name__ == "__main__":
    run_cases()
