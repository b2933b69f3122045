"""The fields of requests to /v1/messages: which have an effect, which change no text, and which are refused by name
unless they ask for nothing. It knows names and values, and no body.
"""

from __future__ import annotations

from collections.abc import Mapping

from launch.serve.api.openai.fields import Field, Treatment
from launch.serve.api.openai.types import SAMPLING_FIELDS

_ANTHROPIC = "Anthropic"

THREAD = "thread"
"""A conversation that the server is to keep. Clients' tool runners ask for one, and can do without."""

EFFECT = (
    "model", "max_tokens", "messages", "system", "tools", "tool_choice", "stop_sequences", "temperature", "top_p",
    "top_k", "stream", "thinking", "output_config", "output_format", "context_management",
)  # fmt: skip
IGNORED = (
    "metadata", "service_tier", "cache_control", "user_profile_id", "anthropic_version", "anthropic_beta", "betas",
    "billing_policy", "diagnostics", "fallback_credit_token", "fallbacks", "workspace_id", "inference_geo", "speed",
)  # fmt: skip
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "compaction": (),
    "container": (),
    "mcp_servers": ([],),
    THREAD: (),
}
"""Taken at these values alone: no tool is run here, and nothing is kept between requests."""

OTHERS = tuple(
    sorted(
        SAMPLING_FIELDS
        # What ends a text has to be told.
        - {"n", "prompt_logprobs", "stop", "include_stop_str_in_output", "min_tokens", *EFFECT}
        | {"chat_template_kwargs", "request_id", "stop_in_thoughts"}
    )
)
"""Of chats, with the same meaning."""

MESSAGE_FIELDS: Mapping[str, Field] = {
    field.name: field
    for field in (
        *(Field(name, _ANTHROPIC, Treatment.EFFECT) for name in (*EFFECT, *OTHERS)),
        *(Field(name, _ANTHROPIC, Treatment.IGNORED) for name in IGNORED),
        *(Field(name, _ANTHROPIC, Treatment.NEUTRAL, neutral=values) for name, values in NEUTRAL.items()),
    )
}
