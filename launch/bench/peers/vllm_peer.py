"""vLLM on the same weights and prompts: plain, or drafting with the same draft model or heads.

`bench` has the interpreter that has vLLM run this file: `vllm_peer.py TASK.json ANSWER.json`, once for each mode. It
imports vLLM and nothing of trtrun, and knows vLLM's offline API (`LLM`, V1 engine).
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PLAIN, SPECULATIVE = "plain", "speculative"

SETTINGS = {
    "HF_HUB_OFFLINE": "1",  # nothing may be downloaded
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process, as trtrun's orchestrator is in its caller's
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # this process has looked at the GPUs before
    "VLLM_HOST_IP": "127.0.0.1",  # all of it is on one host, which may have no network
    "GLOO_SOCKET_IFNAME": "lo",
    "TVM_FFI_DISABLE_TORCH_C_DLPACK": "1",  # else it is compiled when it is imported
    "TOKENIZERS_PARALLELISM": "false",
}
"""Of the environment, unless they are set."""

MADE_UP = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
"""The same where weights are made up: `even_out` goes to workers that are processes of this one."""

OPTIONAL = {
    "flashinfer": {"VLLM_USE_FLASHINFER_SAMPLER": "0"},
    "deep_gemm": {"VLLM_USE_DEEP_GEMM": "0", "VLLM_MOE_USE_DEEP_GEMM": "0"},
}
"""The same where a package is not installed, which vLLM would use."""

MEMORY_SHARE = 0.85
"""Of a GPU's memory, for vLLM; less where less is free."""
SPARE_SHARE = 0.03
FREE_SECONDS = 20.0
"""How long memory may take to be free: the ranks of the job before have just ended."""

WARM_UPS = 3
"""Runs of each workload before those that are timed. Behind one alone speculative runs still got faster from one to the
next: 199, 220 and 361 tokens/s on an H200, with probabilistic drafts."""

WITHOUT_FLASHINFER = {"additional_config": {"gdn_prefill_backend": "triton"}}
"""Arguments of `LLM`, where that package is not installed: gated delta nets would use it for prompts."""

LEAST_BATCHED_TOKENS = 8192
"""Of one step: vLLM's own default on large GPUs."""


def prepare_environment(is_dummy: bool) -> None:
    """Before vLLM is imported, for weights that it reads or makes up. Whoever ends this process ends its workers, too:
    they are of its process group."""
    for name, value in (SETTINGS | (MADE_UP if is_dummy else {})).items():
        os.environ.setdefault(name, value)
    for package, values in OPTIONAL.items():
        if importlib.util.find_spec(package) is None:
            for name, value in values.items():
                os.environ.setdefault(name, value)
    if os.getpgrp() == os.getpid():
        signal.signal(signal.SIGTERM, lambda number, frame: os.killpg(0, signal.SIGKILL))


def memory_share(num_devices: int) -> float:
    """The share of each GPU's memory that vLLM may take."""
    import torch

    deadline = time.monotonic() + FREE_SECONDS
    while True:
        sizes = [torch.cuda.mem_get_info(device) for device in range(num_devices)]
        share = min(free / total for free, total in sizes) - SPARE_SHARE
        if share >= MEMORY_SHARE or time.monotonic() > deadline:
            return max(0.05, min(MEMORY_SHARE, share))
        time.sleep(0.5)


def engine_arguments(task: Mapping[str, Any], mode: str) -> dict[str, Any]:
    """Arguments of vLLM's `LLM`: as its users set them, with the job's limits and without its prefix cache, which fresh
    prompts cannot use."""
    rows = max(int(case["rows"]) for case in task["cases"])
    prompts = [prompt for case in task["cases"] for prompts in case[mode] for prompt in prompts]
    longest = max(map(len, prompts)) + int(task["max_tokens"])
    arguments: dict[str, Any] = {
        "model": task["target"],
        "skip_tokenizer_init": True,
        "dtype": task["dtype"],
        "seed": 0,
        "max_model_len": min(int(task["context"]), longest + int(task["draft_len"]) + 1),
        "max_num_seqs": rows,
        "max_num_batched_tokens": max(LEAST_BATCHED_TOKENS, rows * (1 + int(task["draft_len"]))),
        "enable_prefix_caching": False,
        "disable_log_stats": False,  # they count what was accepted
        "tensor_parallel_size": task["tensor_parallel_size"],
        "load_format": task["load_format"],
        **(WITHOUT_FLASHINFER if importlib.util.find_spec("flashinfer") is None else {}),
    }
    if task["device"] == "cuda":
        arguments["gpu_memory_utilization"] = memory_share(int(task["tensor_parallel_size"]))
    if mode == SPECULATIVE:
        arguments["speculative_config"] = {
            "method": task["method"],
            "model": task["draft"],
            "num_speculative_tokens": task["draft_len"],
            "draft_tensor_parallel_size": task["tensor_parallel_size"],
            **({"parallel_drafting": True} if task["in_parallel"] else {}),
            **task["options"],
        }
    return arguments


def even_out(model: Any) -> None:
    """Make all biases zero. Those that vLLM makes up outweigh what its made-up weights give, so that all tokens' hidden
    states are much the same, and choose the same experts: at 32 rows of gpt-oss it read 4 of 128 (5,850 tokens/s on an
    H200, where all choose their own 1,740).
    """
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.zero_()


class Peer:
    """vLLM with the target and what drafts for it, or with the target alone.

    Args:
        vllm: the package.
        task: what `bench` asks for.
        mode: PLAIN or SPECULATIVE.
    """

    def __init__(self, vllm: Any, task: Mapping[str, Any], mode: str) -> None:
        self._vllm, self._task, self._mode = vllm, task, mode
        self._llm = vllm.LLM(**engine_arguments(task, mode))
        if task["load_format"] == "dummy":
            self._llm.apply_model(even_out)

    def measure(self, case: Mapping[str, Any]) -> dict[str, Any]:
        """Medians for one workload, behind its warm-up, which repeats the first run."""
        runs = case[self._mode]
        for _ in range(WARM_UPS):
            self._run(runs[0], case["temperature"])
        before = self._counters()
        done = [self._run(prompts, case["temperature"]) for prompts in runs]
        after = self._counters()
        rates = [rate for rate, _ in done]
        figures: dict[str, Any] = {
            f"{self._mode}_tokens_per_s": round(statistics.median(rates), 2),
            f"{self._mode}_tokens_per_s_runs": [round(rate, 2) for rate in rates],
        }
        firsts = [first for _, run in done for first in run]
        if firsts:
            figures[f"{self._mode}_time_to_first_token_ms"] = round(1e3 * statistics.median(firsts), 3)
        rounds = after["num_drafts"] - before["num_drafts"]
        if rounds:
            accepted = after["num_accepted_tokens"] - before["num_accepted_tokens"]
            figures[f"{self._mode}_mean_acceptance_length"] = round(1 + accepted / rounds, 3)
        return figures

    def _run(self, prompts: Sequence[Sequence[int]], temperature: float) -> tuple[float, list[float]]:
        """Tokens a second over all rows, and seconds to each row's first token as far as vLLM tells them."""
        sampling = self._vllm.SamplingParams(
            temperature=temperature,
            top_p=self._task["top_p"] if temperature else 1.0,
            max_tokens=self._task["max_tokens"],
            ignore_eos=True,
            detokenize=False,
        )
        inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        started = time.perf_counter()
        outputs = self._llm.generate(inputs, sampling, use_tqdm=False)
        elapsed = time.perf_counter() - started
        firsts = [getattr(output.metrics, "first_token_latency", None) for output in outputs]
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        return tokens / elapsed, [first for first in firsts if first]

    def _counters(self) -> dict[str, int]:
        """Drafts and accepted draft tokens since the start."""
        counts = {"num_drafts": 0, "num_accepted_tokens": 0}
        for metric in self._llm.get_metrics():
            name = metric.name.removeprefix("vllm:spec_decode_")
            if name in counts:
                counts[name] += int(metric.value)
        return counts


def main() -> int:
    """Read the task, write the answer: figures of each case, or what is missing."""
    task_file, answer_file = (Path(argument) for argument in sys.argv[1:])
    task = json.loads(task_file.read_text(encoding="utf-8"))
    prepare_environment(task["load_format"] == "dummy")
    try:
        import vllm
    except ImportError as error:
        answer_file.write_text(json.dumps({"missing": str(error)}), encoding="utf-8")
        return 1
    mode = SPECULATIVE if SPECULATIVE in task["cases"][0] else PLAIN
    peer = Peer(vllm, task, mode)
    answer = {"version": vllm.__version__, "cases": [peer.measure(case) for case in task["cases"]]}
    answer_file.write_text(json.dumps(answer), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
