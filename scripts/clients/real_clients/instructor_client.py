"""instructor, over OpenAI's and Anthropic's clients, against a running server with the chat model of chat_model.py.

python instructor_client.py URL MODEL      it runs in an environment that has instructor and anthropic
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import anthropic
import instructor
import openai
from cases import case, run_cases, same
from pydantic import BaseModel, Field, field_validator

MODES = ("TOOLS", "JSON", "MD_JSON", "JSON_SCHEMA", "RESPONSES_TOOLS")
ASKED: list[Any] = [{"role": "user", "content": "a record as JSON"}]
SEVERAL: list[Any] = [{"role": "user", "content": "records as JSON"}]


class Record(BaseModel):
    """A record of an animal."""

    kind: Literal["cat", "dog"]
    age: int = Field(ge=0, le=99)


class Elder(Record):
    """A record of an animal that is old."""

    @field_validator("age")
    @classmethod
    def is_old(cls, age: int) -> int:
        """Is no part of the schema: only what comes back can show it."""
        if age < 10:
            raise ValueError("it has to be older than ten")
        return age


Elder.__name__ = "Record"  # what the model knows as a tool


class Weather(BaseModel):
    """How warm it is in a city."""

    city: str


Weather.__name__ = "weather"


def make_client(url: str, mode: str, asynchronous: bool = False) -> Any:
    """OpenAI's client, patched for a mode."""
    kind = openai.AsyncOpenAI if asynchronous else openai.OpenAI
    client = kind(base_url=f"{url}/v1", api_key="-", max_retries=0)
    return instructor.from_openai(client, mode=getattr(instructor.Mode, mode))


@case("each mode: a typed answer, with its completion")
def typed(url: str, model: str) -> None:
    for mode in MODES:
        client = make_client(url, mode)
        told, completion = client.create_with_completion(
            model=model, messages=ASKED, response_model=Record, temperature=0
        )
        same(told.model_dump(), {"kind": "cat", "age": 3})
        assert completion.usage.total_tokens > 0
        print("  ", mode)


@case("each mode: an answer that fails validation is asked for again")
def retries(url: str, model: str) -> None:
    for mode in MODES:
        told, completion = make_client(url, mode).create_with_completion(
            model=model, messages=ASKED, response_model=Elder, temperature=0, max_retries=2
        )
        same(told.age, 30)
        print("  ", mode, completion.usage.total_tokens)


@case("each mode: partial answers from a stream")
def partials(url: str, model: str) -> None:
    for mode in MODES:
        told = list(
            make_client(url, mode).create_partial(model=model, messages=ASKED, response_model=Record, temperature=0)
        )
        same((told[-1].kind, told[-1].age), ("cat", 3))
        print("  ", mode, len(told))


@case("several answers from a stream")
def iterables(url: str, model: str) -> None:
    for mode in MODES:
        client = make_client(url, mode)
        told = list(
            client.create_iterable(model=model, messages=SEVERAL, response_model=Record, temperature=0, max_tokens=99)
        )
        same([(one.kind, one.age) for one in told], [("cat", 3), ("dog", 5)])
        print("  ", mode, len(told))


@case("PARALLEL_TOOLS")
def parallel(url: str, model: str) -> None:
    told = make_client(url, "PARALLEL_TOOLS").create(
        model=model,
        messages=[{"role": "user", "content": "Rome and Oslo?"}],
        response_model=Iterable[Weather],
        temperature=0,
    )
    same([one.city for one in told], ["Rome", "Oslo"])


@case("asynchronous")
async def asynchronous(url: str, model: str) -> None:
    for mode in MODES:
        client = make_client(url, mode, asynchronous=True)
        one = await client.create(model=model, messages=ASKED, response_model=Record, temperature=0)
        same(one.model_dump(), {"kind": "cat", "age": 3})
        told = [
            one
            async for one in client.create_partial(model=model, messages=ASKED, response_model=Record, temperature=0)
        ]
        same(told[-1].age, 3)


@case("over Anthropic's client")
def over_anthropic(url: str, model: str) -> None:
    client = anthropic.Anthropic(base_url=url, api_key="-", max_retries=0)
    greedy: dict[str, Any] = {"model": model, "max_tokens": 200, "extra_body": {"temperature": 0}}
    for mode in ("TOOLS", "JSON", "JSON_SCHEMA"):
        patched: Any = instructor.from_anthropic(client, mode=getattr(instructor.Mode, mode))
        told = patched.create(messages=ASKED, response_model=Record, **greedy)
        same(told.model_dump(), {"kind": "cat", "age": 3})
        told = patched.create(messages=ASKED, response_model=Elder, max_retries=2, **greedy)
        same(told.age, 30)
        print("  ", mode)
    both: Any = instructor.from_anthropic(client, mode=instructor.Mode.PARALLEL_TOOLS)
    told = both.create(
        messages=[{"role": "user", "content": "Rome and Oslo?"}], response_model=Iterable[Weather], **greedy
    )
    same([one.city for one in told], ["Rome", "Oslo"])


@case("from_provider")
def provider(url: str, model: str) -> None:
    client: Any = instructor.from_provider(f"openai/{model}", base_url=f"{url}/v1", api_key="-")
    told = client.create(messages=ASKED, response_model=Record, temperature=0)
    same(told.model_dump(), {"kind": "cat", "age": 3})


if __name__ == "__main__":
    run_cases()
