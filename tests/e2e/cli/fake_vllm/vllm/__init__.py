"""Stands for vLLM in tests of the peer: its offline API as far as the peer uses it. Tokens are made up.

FAKE_VLLM names a folder: it gets a file for each mode, with arguments and calls. FAKE_VLLM_FAULT may be
"import", "raise" or "stay"; the last starts a process of its own and waits for it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

__version__ = "0.26.0+fake"
FOLDER = Path(os.environ["FAKE_VLLM"])
FAULT = os.environ.get("FAKE_VLLM_FAULT")
if FAULT == "import":
    raise ImportError("libcudart.so.13: cannot open shared object file")


class SamplingParams:
    """Keeps what it is given."""

    def __init__(
        self, *, temperature: float, top_p: float, max_tokens: int, ignore_eos: bool, detokenize: bool
    ) -> None:
        assert ignore_eos and not detokenize
        self.temperature, self.top_p, self.max_tokens = temperature, top_p, max_tokens


class _Numbers(list[float]):
    """Stands for a tensor."""

    def zero_(self) -> None:
        self[:] = [0.0] * len(self)


class LLM:
    """Answers at once, and counts one draft of three accepted tokens for each row of a call."""

    def __init__(self, model: str, **arguments: object) -> None:
        if FAULT == "raise":
            raise RuntimeError("No available memory for the cache blocks.")
        if FAULT == "stay":
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            (FOLDER / "child").write_text(f"{os.getpid()} {child.pid}")
            child.wait()
        self._arguments = {"model": model, **arguments}
        self._calls: list[dict[str, object]] = []
        self._drafts = 0

    def generate(self, inputs: list[dict[str, list[int]]], sampling: SamplingParams, use_tqdm: bool) -> list[object]:
        assert not use_tqdm
        self._drafts += len(inputs)
        prompts = [values["prompt_token_ids"] for values in inputs]
        self._calls.append({"prompts": prompts, "temperature": sampling.temperature, "top_p": sampling.top_p})
        line = json.dumps({"arguments": self._arguments, "calls": self._calls})
        (FOLDER / self._mode).write_text(line)
        completion = SimpleNamespace(token_ids=list(range(sampling.max_tokens)))
        return [
            SimpleNamespace(outputs=[completion], metrics=SimpleNamespace(first_token_latency=0.25)) for _ in inputs
        ]

    def apply_model(self, change: Callable[[object], None]) -> None:
        values = {f"layers.0.mlp.{name}": [1.0] for name in ("router.bias", "router.weight", "gate.bias", "down.bias")}
        parameters = {name: SimpleNamespace(data=_Numbers(value)) for name, value in values.items()}
        change(SimpleNamespace(named_parameters=parameters.items))
        (FOLDER / "zeros").write_text(json.dumps([name for name, it in parameters.items() if not any(it.data)]))

    def get_metrics(self) -> list[object]:
        if self._mode == "plain":
            return []
        counts = {"num_drafts": self._drafts, "num_accepted_tokens": 3 * self._drafts}
        return [SimpleNamespace(name=f"vllm:spec_decode_{name}", value=value) for name, value in counts.items()]

    @property
    def _mode(self) -> str:
        return "speculative" if "speculative_config" in self._arguments else "plain"
