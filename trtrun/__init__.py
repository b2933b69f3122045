"""trtrun: lossless speculative decoding of large language models over MPI.

    from trtrun import LLM, SamplingParams

    with LLM(target="path/to/target", draft="path/to/draft") as llm:
        print(llm.generate(["def main("], SamplingParams(max_tokens=64))[0].completions[0].text)

Names are imported when they are first used, so that `import trtrun` and the command line's errors stay quick.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

# Weights on the CPU are read from end to end for every token: huge pages spare address translation (4 % of a round was
# measured). torch reads this when it first allocates, hence here; the user's own setting wins. The second variable
# tells child processes that are not trtrun whose setting it is.
if "THP_MEM_ALLOC_ENABLE" not in os.environ:
    os.environ["THP_MEM_ALLOC_ENABLE"] = os.environ["TRTRUN_SET_HUGE_PAGES"] = "1"

if TYPE_CHECKING:
    from trtrun.core import SamplingParams
    from trtrun.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> object:
    if name == "LLM":
        from trtrun.llm import LLM

        return LLM
    if name == "SamplingParams":
        from trtrun.core import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'trtrun' has no attribute '{name}'")
