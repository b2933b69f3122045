"""litellm and openai-python against a running server, and what they make of its refusals.

python openai_clients.py URL      URL ends with /v1; it runs in an environment that has both
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import litellm
import openai

TOLD: list[Any] = [{"role": "user", "content": "write a loop"}]
TOO_LONG = "x " * 3000


def ask_litellm(url: str, model: str) -> None:
    """Whole answers and streams by each of its ways in, and a prompt that is too long."""
    litellm.suppress_debug_info = True
    server: dict[str, Any] = {"api_base": url, "api_key": "-"}
    for provider in ("openai", "hosted_vllm", "text-completion-openai"):
        options = {"model": f"{provider}/{model}", "messages": TOLD, "max_tokens": 8, **server}
        print(provider, "whole:", litellm.completion(**options).usage.completion_tokens)
        chunks = list(litellm.completion(**options, stream=True, stream_options={"include_usage": True}))
        usages = [chunk.usage for chunk in chunks if getattr(chunk, "usage", None)]
        print(provider, "stream:", usages[-1].completion_tokens)
    for provider in ("openai", "hosted_vllm"):
        messages = [{"role": "user", "content": TOO_LONG}]
        try:
            litellm.completion(model=f"{provider}/{model}", messages=messages, **server)
            print(provider, "too long: answered")
        except Exception as error:  # its kind is what is looked at
            print(provider, "too long:", type(error).__name__)


def ask_openai(client: openai.OpenAI, model: str) -> None:
    """Fields of other servers, streams, an answer that is put back."""
    try:
        client.completions.create(model=model, prompt=TOO_LONG)
    except openai.BadRequestError as error:
        print("openai code:", error.code, "param:", error.param)
    others = {"chat_template_kwargs": {"enable_thinking": False}, "top_k": -1, "guided_json": None}
    whole = client.chat.completions.create(
        model=model, messages=TOLD, max_completion_tokens=4, max_tokens=9, extra_body=others
    )
    print("chat:", whole.usage.completion_tokens if whole.usage else None)
    stream = client.chat.completions.create(
        model=model, messages=TOLD, max_tokens=4, stream=True, stream_options={"include_usage": True}
    )
    print("stream:", [chunk.usage.completion_tokens for chunk in stream if chunk.usage])
    messages = [*TOLD, whole.choices[0].message.model_dump(), *TOLD]
    back = client.chat.completions.create(model=model, messages=messages, max_tokens=4, extra_body={"ignore_eos": True})
    print("answer put back:", back.usage.completion_tokens if back.usage else None)


def main() -> None:
    """Ask for the model that there is."""
    warnings.filterwarnings("ignore")
    client = openai.OpenAI(base_url=sys.argv[1], api_key="-", max_retries=0)
    models: list[Any] = list(client.models.list())
    print("models:", [(model.id, model.max_model_len) for model in models])
    ask_litellm(sys.argv[1], models[0].id)
    ask_openai(client, models[0].id)


if __name__ == "__main__":
    main()
