"""trtrun: lossless speculative decoding of large language models over MPI.

    from trtrun import LLM, SamplingParams

    with LLM(target="path/to/target", draft="path/to/draft") as llm:
        print(llm.generate(["def main("], SamplingParams(max_tokens=64))[0].completions[0].text)

Names are imported when they are first used, so that `import trtrun` and the command line's errors stay quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from trtrun.environment import set_environment

set_environment()  # before anything loads torch

if TYPE_CHECKING:
    from trtrun.api.async_llm import AsyncLLM
    from trtrun.api.llm import LLM, open_llm
    from trtrun.api.llm_engine import LLMEngine
    from trtrun.chats.chat import Chat
    from trtrun.configuration.config import RuntimeConfig, load_config
    from trtrun.core.outputs import CompletionDelta, CompletionOutput, RequestOutput
    from trtrun.core.sampling_params import SamplingParams
    from trtrun.errors import InvalidRequestError, QueueFullError, TrtrunError

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncLLM",
    "Chat",
    "CompletionDelta",
    "CompletionOutput",
    "InvalidRequestError",
    "LLMEngine",
    "QueueFullError",
    "RequestOutput",
    "RuntimeConfig",
    "SamplingParams",
    "TrtrunError",
    "__version__",
    "load_config",
    "open_llm",
]

_HOMES = {
    "LLM": "trtrun.api.llm",
    "open_llm": "trtrun.api.llm",
    "AsyncLLM": "trtrun.api.async_llm",
    "LLMEngine": "trtrun.api.llm_engine",
    "Chat": "trtrun.chats.chat",
    "SamplingParams": "trtrun.core.sampling_params",
    "RuntimeConfig": "trtrun.configuration.config",
    "load_config": "trtrun.configuration.config",
    **dict.fromkeys(("CompletionDelta", "CompletionOutput", "RequestOutput"), "trtrun.core.outputs"),
    **dict.fromkeys(("InvalidRequestError", "QueueFullError", "TrtrunError"), "trtrun.errors"),
}


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'trtrun' has no attribute '{name}'")
