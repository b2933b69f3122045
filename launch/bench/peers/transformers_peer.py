"""transformers on the same weights, prompts and threads: plain, and assisted generation with a constant draft.

`bench` has the interpreter that has transformers run this file: `transformers_peer.py TASK.json ANSWER.json`. It
imports transformers and nothing of trtrun.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: nothing may be downloaded

import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.utils import logging


class Peer:
    """Both models in transformers.

    Args:
        task: what `bench` sent: directories, dtype, device, threads, draft_len, max_tokens, top_p.
    """

    def __init__(self, task: dict[str, Any]) -> None:
        torch.set_num_threads(task["threads"])
        self._device = torch.device(task["device"])
        self._max_tokens = int(task["max_tokens"])
        self._top_p = float(task["top_p"])
        self._sampling: dict[str, Any] = {}
        self._target = self._load(task["target"], task["dtype"])
        self._draft = self._load(task["draft"], task["dtype"]) if task["draft"] else None
        if self._draft is not None:
            settings = self._draft.generation_config
            settings.num_assistant_tokens = task["draft_len"]
            settings.num_assistant_tokens_schedule = "constant"
            settings.assistant_confidence_threshold = 0.0
        self._num_forwards = 0
        self._target.register_forward_hook(self._count_forward)

    def measure(self, case: dict[str, Any]) -> dict[str, Any]:
        """Medians for one workload. Assisted generation takes one row only: more rows have no figure for it."""
        self._sampling = {"do_sample": False}
        if case["temperature"]:
            self._sampling = {"do_sample": True, "temperature": case["temperature"], "top_p": self._top_p, "top_k": 0}
        result = self._measure_mode("plain", case["plain"], assisted=False)
        if case["rows"] == 1 and self._draft is not None and "speculative" in case:
            result |= self._measure_mode("assisted", case["speculative"], assisted=True)
        return result

    def _measure_mode(self, name: str, runs: list[list[list[int]]], assisted: bool) -> dict[str, Any]:
        self._generate(runs[0], min(8, self._max_tokens), assisted)
        rates, lengths = [], []
        for prompts in runs:
            self._num_forwards = 0
            started = time.perf_counter()
            tokens = self._generate(prompts, self._max_tokens, assisted)
            rates.append(tokens / (time.perf_counter() - started))
            lengths.append(tokens / len(prompts) / self._num_forwards)
        figures: dict[str, Any] = {
            f"{name}_tokens_per_s": round(statistics.median(rates), 2),
            f"{name}_tokens_per_s_runs": [round(rate, 2) for rate in rates],
        }
        if assisted:
            figures["assisted_mean_acceptance_length"] = round(statistics.mean(lengths), 3)
        return figures

    def _generate(self, prompts: list[list[int]], max_tokens: int, assisted: bool) -> int:
        """Complete prompts of one length; returns the number of new tokens."""
        tokens = torch.tensor(prompts, device=self._device)
        extra = {"assistant_model": self._draft} if assisted else {}
        with torch.inference_mode():
            output = self._target.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=max_tokens,
                min_new_tokens=max_tokens,
                pad_token_id=0,
                **self._sampling,
                **extra,
            )
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return int(output.numel() - tokens.numel())

    def _load(self, path: str, dtype: str) -> Any:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype), local_files_only=True)
        return model.to(self._device).eval()

    def _count_forward(self, *_: object) -> None:
        self._num_forwards += 1


def main() -> None:
    """Read the task, write the answer."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    task_file, answer_file = (Path(argument) for argument in sys.argv[1:])
    task = json.loads(task_file.read_text(encoding="utf-8"))
    peer = Peer(task)
    answer = {"version": transformers.__version__, "cases": [peer.measure(case) for case in task["cases"]]}
    answer_file.write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    main()
