"""trtrun: lossless speculative decoding of large language models over MPI.

    from trtrun import LLM, SamplingParams

    with LLM(target="path/to/target", draft="path/to/draft") as llm:
        print(llm.generate(["def main("], SamplingParams(max_tokens=64))[0].completions[0].text)

Names are imported when they are first used, so that `import trtrun` and the command line's errors stay quick.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING

# Settings of torch that it reads when it first allocates and multiplies, hence here; the user's own win.
_SETTINGS = {
    # Weights on the CPU are read from end to end for every token: huge pages spare address translation (4 % of a round
    # was measured).
    "THP_MEM_ALLOC_ENABLE": "1",
    # With AMX, oneDNN's bfloat16 results depend on the number of rows, so that verification would not be exact.
    "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16",
    # So do those of cuBLAS on GPUs, and cuBLASLt can be asked not to (trtrun.kernels.cublas).
    "TORCH_BLAS_PREFER_CUBLASLT": "1",
}
_ours = [name for name in _SETTINGS if name not in os.environ]
os.environ.update({name: _SETTINGS[name] for name in _ours})
if _ours:  # tells child processes that are not trtrun whose settings these are
    os.environ["TRTRUN_SETTINGS"] = ",".join(_ours)

if TYPE_CHECKING:
    from trtrun.async_llm import AsyncLLM
    from trtrun.config import RuntimeConfig, load_config
    from trtrun.errors import InvalidRequestError, QueueFullError, TrtrunError
    from trtrun.llm import LLM, open_llm
    from trtrun.llm_engine import LLMEngine
    from trtrun.outputs import CompletionDelta, CompletionOutput, RequestOutput
    from trtrun.sampling_params import SamplingParams

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncLLM",
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
    "LLM": "trtrun.llm",
    "open_llm": "trtrun.llm",
    "AsyncLLM": "trtrun.async_llm",
    "LLMEngine": "trtrun.llm_engine",
    "SamplingParams": "trtrun.sampling_params",
    "RuntimeConfig": "trtrun.config",
    "load_config": "trtrun.config",
    **dict.fromkeys(("CompletionDelta", "CompletionOutput", "RequestOutput"), "trtrun.outputs"),
    **dict.fromkeys(("InvalidRequestError", "QueueFullError", "TrtrunError"), "trtrun.errors"),
}


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'trtrun' has no attribute '{name}'")
