"""LangChain's client, unmodified, on the shipped pair: typed answers, calls that are wanted, prompts that are too long.

What only a model that calls tools by itself shows, and other clients, are run by scripts/clients.sh.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field
from servers import PATIENCE, Server

pytest.importorskip("langchain_openai", reason="needs langchain-openai: pip install langchain-openai")
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI

pytestmark = pytest.mark.timeout(300)


class Record(BaseModel):
    """A record of an animal."""

    kind: Literal["cat", "dog"]
    age: Annotated[int, Field(ge=0, le=99)]


@pytest.fixture
def chat(server: Server) -> ChatOpenAI:
    return chat_of(server)


def chat_of(server: Server, **options: Any) -> ChatOpenAI:
    values: dict[str, Any] = {"temperature": 0, "max_tokens": 100, "max_retries": 0, "timeout": PATIENCE, **options}
    return ChatOpenAI(model="pair", base_url=server.url + "/v1", api_key="-", **values)


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_typed_answers_come_whole_and_in_streams(server: Server, method: Any) -> None:
    """The pair, which likes blanks, ends its text by itself."""
    chat = chat_of(server, max_tokens=400)
    typed = chat.with_structured_output(Record, method=method, include_raw=True)
    told = typed.invoke("write a record")
    assert isinstance(told, dict) and isinstance(told["parsed"], Record) and told["parsing_error"] is None
    assert told["raw"].response_metadata["finish_reason"] == ("stop" if method == "json_schema" else "tool_calls")
    assert list(chat.with_structured_output(Record, method=method).stream("write a record"))[-1] == told["parsed"]


def test_a_call_that_is_wanted_is_streamed_and_goes_back(chat: ChatOpenAI) -> None:
    wanting = chat.bind_tools([Record], tool_choice="any", parallel_tool_calls=False)
    asked = HumanMessage("write a record")
    told = wanting.invoke([asked])
    (call,) = told.tool_calls
    assert told.response_metadata["finish_reason"] == "tool_calls"
    assert call["name"] == "Record" and Record(**call["args"]) and not told.invalid_tool_calls
    chunks = list(wanting.stream([asked]))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    assert [one["args"] for one in whole.tool_calls] == [call["args"]]
    assert whole.response_metadata["finish_reason"] == "tool_calls"
    last = chat.bind_tools([Record], tool_choice="none").invoke(
        [asked, told, ToolMessage("kept", tool_call_id=call["id"])]
    )
    assert last.response_metadata["finish_reason"] == "length" and last.text  # the pair does not end a text by itself
    assert not last.tool_calls and last.usage_metadata and told.usage_metadata
    assert last.usage_metadata["input_tokens"] > told.usage_metadata["input_tokens"]


def test_responses_are_chats(server: Server, chat: ChatOpenAI) -> None:
    responses = chat_of(server, use_responses_api=True, max_tokens=20)
    told = responses.invoke("write a loop")
    text = told.text
    assert told.response_metadata["status"] == "incomplete"
    assert told.response_metadata["incomplete_details"] == {"reason": "max_output_tokens"}
    assert text and text == "".join(chunk.text for chunk in responses.stream("write a loop"))
    assert text == chat_of(server, max_tokens=20).invoke("write a loop").text
    typed = chat_of(server, use_responses_api=True).with_structured_output(Record, include_raw=True).invoke("write")
    assert isinstance(typed, dict) and isinstance(typed["parsed"], Record)
    assert typed["raw"].response_metadata["status"] == "completed"


@pytest.mark.parametrize("use_responses_api", [False, True])
def test_a_prompt_that_is_too_long_is_known_as_that(server: Server, use_responses_api: bool) -> None:
    with pytest.raises(ContextOverflowError):
        chat_of(server, use_responses_api=use_responses_api).invoke("x " * 3000)
