"""The fields of requests to /v1/responses: which have an effect, which change no text, and which are refused by name
unless they ask for nothing. It knows names and values, and no body.
"""

from __future__ import annotations

from collections.abc import Mapping

from launch.serve.api.openai.fields import OPENAI, Field, Treatment
from launch.serve.api.openai.types import SAMPLING_FIELDS

EFFECT = (
    "model", "input", "instructions", "max_output_tokens", "temperature", "top_p", "tools", "tool_choice",
    "parallel_tool_calls", "text", "reasoning", "stream", "stream_options", "top_logprobs", "include", "metadata",
)  # fmt: skip
IGNORED = (
    "user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "service_tier",
    "client_metadata", "store",
)  # fmt: skip
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "background": (False,),
    "background_options": (),
    "truncation": ("disabled",),
    "previous_response_id": (),
    "conversation": (),
    "prompt": (),
    "max_tool_calls": (),
    "context_management": ([],),
    "moderation": (),
    "image": (),
    "access_programs": (),
}
"""Taken at these values alone: nothing is kept between requests, and no tool is run here."""

OTHERS = tuple(
    sorted(
        SAMPLING_FIELDS - {"max_tokens", "n", "prompt_logprobs", *EFFECT}
        | {"chat_template_kwargs", "documents", "request_id", "stop_in_thoughts"}
    )
)
"""Of chats, with the same meaning."""

RESPONSE_FIELDS: Mapping[str, Field] = {
    field.name: field
    for field in (
        *(Field(name, OPENAI, Treatment.EFFECT) for name in (*EFFECT, *OTHERS)),
        *(Field(name, OPENAI, Treatment.IGNORED) for name in IGNORED),
        *(Field(name, OPENAI, Treatment.NEUTRAL, neutral=values) for name, values in NEUTRAL.items()),
    )
}
